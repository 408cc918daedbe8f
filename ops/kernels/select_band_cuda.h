// What the kernels of select_cuda.cu share: the state of a selection, an entry's sum, counting in
// bins, and the descent to the band in which the k-th largest key lies.
//
// A kernel counts keys in bins (`clear`, `bin_of`, `collect`); its last block (`last_block`), which
// sees what all the others have written, narrows the band to one bin (`descend`). So no decision
// needs the host.
#pragma once

#include "kernels/cuda.h"
#include "kernels/select.h"
#include "kernels/select_scan.h"

namespace tfcommx {

constexpr int64_t kStrip = 1024;         // entries that a warp takes at a time
constexpr uint32_t kWhole = kStrip + 1;  // the count of a strip that has no list
constexpr uint32_t kBins = 2048;
constexpr uint32_t kEnd = uint32_t{1} << 31;  // above all keys
constexpr int kCoarseShift = 20;              // bins that cover all keys
// A band of mstopk: equal exponent, equal first twelve mantissa bits.
constexpr int kBandShift = 11;
constexpr int kFound = -1;

struct State {
  uint32_t lower, upper;  // the band: keys in [lower, upper)
  uint32_t inside;        // entries in the band
  uint32_t need;          // of them to be chosen; all above the band are
  int32_t shift;          // bins of 2^shift keys are counted next; kFound: the band is final
  uint32_t all;           // every entry is a candidate
};

template <class T>
struct Job {
  Selection s;
  int64_t strips;
  int64_t room;   // entries of a strip's list
  uint32_t near;  // bins above the threshold in which `add` expects the k-th largest key
  State* state;
  uint32_t* blocks_done;  // of the kernel that runs; not in the state, which all blocks read
  uint32_t* bins;         // [kBins]
  // Entries above the band << 32 | in it: of the warps before this one in its block, and of the
  // blocks before this one
  uint64_t *warp_tallies, *block_tallies;
  uint32_t* counts;     // [strips]: entries in the list, or kWhole
  float* values;        // [strips * room]; the sample's keys before
  uint16_t* positions;  // [strips * room], in the strip, ascending

  __device__ float gradient(int64_t i) const { return widen(static_cast<const T*>(s.gradient)[i]); }
};

struct Sum {
  float velocity, acc;
};

__device__ inline Sum sum(bool with_residual, bool with_velocity, float momentum, float gradient,
                          float residual, float velocity) {
  const float moved = with_velocity ? add(multiply(momentum, velocity), gradient) : gradient;
  return {moved, with_residual ? add(residual, moved) : moved};
}

template <class T>
__device__ float sum_at(const Job<T>& job, int64_t i) {
  const float *residual = job.s.residual, *velocity = job.s.velocity;
  return sum(residual, velocity, job.s.momentum, job.gradient(i), residual ? residual[i] : 0,
             velocity ? velocity[i] : 0)
      .acc;
}

__device__ inline int64_t warp() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}
__device__ inline int64_t warps() { return static_cast<int64_t>(gridDim.x) * kWarps; }

__device__ inline uint32_t bin_of(uint32_t key, uint32_t lower, int shift) {
  const uint32_t bin = ((key < kNotFinite ? key : kNotFinite) - lower) >> shift;
  return bin < kBins ? bin : kBins - 1;
}

__device__ inline void clear(uint32_t* bins) {
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads) bins[bin] = 0;
  __syncthreads();
}

// Adds the block's bins to all blocks'.
__device__ inline void collect(const uint32_t* bins, uint32_t* all) {
  __syncthreads();
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads)
    if (bins[bin]) atomicAdd(&all[bin], bins[bin]);
}

// Moves all blocks' bins to the block's: read all at once, where `find` would wait for each in turn.
__device__ inline void take(uint32_t* all, uint32_t* bins) {
  uint32_t mine[kBins / kThreads];
#pragma unroll
  for (uint32_t j = 0; j < kBins / kThreads; ++j) mine[j] = all[threadIdx.x + j * kThreads];
  __syncthreads();
#pragma unroll
  for (uint32_t j = 0; j < kBins / kThreads; ++j) {
    bins[threadIdx.x + j * kThreads] = mine[j];
    all[threadIdx.x + j * kThreads] = 0;
  }
  __syncthreads();
}

// True in the block that comes here last; it sees what all blocks have written.
__device__ inline bool last_block(uint32_t* blocks_done) {
  // The first fence publishes this block's writes before it is counted; the second keeps the last
  // block's reads behind the count
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(blocks_done, 1u) == gridDim.x - 1;
    if (last) *blocks_done = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

struct Bin {
  uint32_t position;  // kBins: there are fewer than `need` entries
  uint32_t above;     // entries in the bins above
  uint32_t inside;    // entries in this one
};

// The bin that holds the need-th entry from the top, 1 <= need; by a whole block.
__device__ inline Bin find(const uint32_t* bins, uint32_t need) {
  constexpr uint32_t kEach = kBins / kThreads;
  __shared__ Bin found;
  uint32_t position = kBins - 1 - threadIdx.x * kEach, mine = 0;
  for (uint32_t j = 0; j < kEach; ++j) mine += bins[position - j];
  if (threadIdx.x == 0) found = {kBins, 0, 0};
  uint32_t above = exclusive_sum_of_block(mine);
  if (above < need && need <= above + mine) {
    for (; above + bins[position] < need; --position) above += bins[position];
    found = {position, above, bins[position]};
  }
  __syncthreads();
  const Bin result = found;
  __syncthreads();  // it may be written again
  return result;
}

// Makes the band the bin in which the last entry to be chosen lies, from the bins that were counted
// as the state says. By the last block, whose bins are overwritten.
template <class T>
__device__ void descend(const Job<T>& job, uint32_t* bins) {
  State state = *job.state;
  take(job.bins, bins);
  const Bin bin = find(bins, state.need);
  if (threadIdx.x != 0) return;
  const uint64_t upper = state.lower + (static_cast<uint64_t>(bin.position + 1) << state.shift);
  // Too few, or in the bin of all that is larger.
  if (bin.position == kBins || (bin.position == kBins - 1 && upper < state.upper)) {
    state.all = bin.position == kBins;
    state.lower = 0;
    state.shift = kCoarseShift;
  } else {
    state.lower += bin.position << state.shift;
    if (upper < state.upper) state.upper = static_cast<uint32_t>(upper);
    state.inside = bin.inside;
    state.need -= bin.above;
    const bool finer = job.s.rule == Rule::exact && bin.inside > state.need;
    state.shift = state.shift == kCoarseShift          ? kBandShift
                  : state.shift == kBandShift && finer ? 0
                                                       : kFound;
  }
  *job.state = state;
}

}  // namespace tfcommx
