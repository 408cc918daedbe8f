// Selection on GPUs. Compiled by nvcc, and run on CPUs by tests/cuda_on_cpu; no GPU has run it yet.
//
//   sample   a sample of the magnitudes gives a key that a little more than k entries should reach:
//   the candidates
//   add      the only pass over everything: r += g; marks the candidates, one bit each, and counts
//   them in bins
//   narrow   count the candidates of the band in bins, go to the bin where the k-th largest lies;
//            returns at once where that is done already. Where the sample misled, all entries are
//            candidates
//   tally    the entries above the band and in it, for each warp's share; their running sums are
//   where each warp will write
//   emit     write what is above the band, and from the band the rest of k; zero them in r
//
// A warp takes a strip of 1024 entries at a time. While adding, its lanes hold neighbours, so that
// memory is read in whole lines at any alignment and a ballot makes 32 marks in the order of the
// entries; later each lane walks over the marks of one word. In a strip with entries that are not
// finite the bits mark these instead, and all its entries are candidates: r cannot tell them, for
// it keeps its old value there. What a kernel's last block does follows all that the others have
// written, so no decision needs the host. The result depends on no order: sums of integers only,
// and places from running sums.
#include <cmath>

#include "kernels/cuda.h"
#include "kernels/random.h"
#include "kernels/select.h"
#include "kernels/select_scan.h"

namespace tfcommx {
namespace {

constexpr int kBlocksPerProcessor = 8;
constexpr int kMostBlocks = 2048;
constexpr int64_t kStrip = 1024;
constexpr int kBatch = 8;  // entries of a lane that are on their way together
constexpr uint32_t kBins = 2048;
constexpr uint32_t kEnd = uint32_t{1} << 31;  // above all keys
constexpr int kCoarseShift = 20;              // bins that cover all keys
// a band of mstopk: equal exponent, equal first twelve mantissa bits
constexpr int kBandShift = 11;
constexpr int kFound = -1;
constexpr int64_t kRun = 8, kMostRuns = 4096;  // of neighbours in the sample

struct State {
  uint32_t lower, upper;  // the band: keys in [lower, upper)
  uint32_t inside;        // entries in the band
  uint32_t need;          // of them to be chosen; all above the band are
  int32_t shift;          // bins of 2^shift keys are counted next; kFound: the band is final
  uint32_t all;           // every entry is a candidate
  uint32_t blocks_done;   // of the kernel that runs
};

template <class T>
struct Job {
  Selection s;
  int64_t strips;
  State* state;
  uint32_t* bins;  // [kBins]
  // by warp: entries above the band << 32 | in it; then their sums over the warps before
  uint64_t* tallies;
  uint32_t* marks;  // [strips * 32]
  uint8_t* flags;   // [strips]: are there entries that are not finite?

  __device__ float gradient(int64_t i) const { return widen(static_cast<const T*>(s.gradient)[i]); }
};

struct Sum {
  float velocity, acc;
};

__device__ Sum sum(bool with_residual, bool with_velocity, float momentum, float gradient,
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

__device__ int64_t warp() { return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; }
__device__ int64_t warps() { return static_cast<int64_t>(gridDim.x) * kWarps; }

__device__ uint32_t bin_of(uint32_t key, uint32_t lower, int shift) {
  const uint32_t bin = ((key < kNotFinite ? key : kNotFinite) - lower) >> shift;
  return bin < kBins ? bin : kBins - 1;
}

__device__ void clear(uint32_t* bins) {
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads) bins[bin] = 0;
  __syncthreads();
}

// Adds the block's bins to all blocks'.
__device__ void collect(const uint32_t* bins, uint32_t* all) {
  __syncthreads();
  for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads)
    if (bins[bin]) atomicAdd(&all[bin], bins[bin]);
}

// True in the block that comes here last; it sees what all blocks have written.
__device__ bool last_block(State* state) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&state->blocks_done, 1u) == gridDim.x - 1;
    if (last) state->blocks_done = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

struct Bin {
  uint32_t place;   // kBins: there are fewer than `need` entries
  uint32_t above;   // entries in the bins above
  uint32_t inside;  // entries in this one
};

// The bin that holds the need-th entry from the top, 1 <= need; by a whole block.
__device__ Bin find(const uint32_t* bins, uint32_t need) {
  constexpr uint32_t kEach = kBins / kThreads;
  __shared__ Bin found;
  uint32_t place = kBins - 1 - threadIdx.x * kEach, mine = 0;
  for (uint32_t j = 0; j < kEach; ++j) mine += bins[place - j];
  if (threadIdx.x == 0) found = {kBins, 0, 0};
  uint32_t above = exclusive_sum_of_block(mine);
  if (above < need && need <= above + mine) {
    for (; above + bins[place] < need; --place) above += bins[place];
    found = {place, above, bins[place]};
  }
  __syncthreads();
  const Bin result = found;
  __syncthreads();  // it may be written again
  return result;
}

// Makes the band the bin in which the last entry to be chosen lies, from the bins that were counted
// as the state says. By the last block.
template <class T>
__device__ void descend(const Job<T>& job) {
  State state = *job.state;
  const Bin bin = find(job.bins, state.need);
  clear(job.bins);
  if (threadIdx.x != 0) return;
  const uint64_t upper = state.lower + (static_cast<uint64_t>(bin.place + 1) << state.shift);
  // too few, or in the bin of all that is larger
  if (bin.place == kBins || (bin.place == kBins - 1 && upper < state.upper)) {
    state.all = bin.place == kBins;
    state.lower = 0;
    state.shift = kCoarseShift;
  } else {
    state.lower += bin.place << state.shift;
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

// One entry is drawn by each thread; the neighbours of a run lie in one stretch of memory, which
// costs as much as one entry.
// rank: of the drawn key that becomes the threshold, from the top; runs = 0: none, all entries are
// candidates.
template <class T>
__global__ void __launch_bounds__(kThreads) sample(Job<T> job, int64_t runs, uint32_t rank) {
  __shared__ uint32_t bins[kBins];
  uint32_t* keys = job.marks;  // not needed yet
  clear(bins);
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < runs * kRun;
       i += gridDim.x * kThreads) {
    const int64_t run = i / kRun, stretch = job.s.n / kRun / runs;
    const uint32_t key =
        key_of(sum_at(job, (run * stretch + below(job.s.seed + run, stretch)) * kRun + i % kRun));
    keys[i] = key < kNotFinite ? key : 0;
    atomicAdd(&bins[keys[i] >> kCoarseShift], 1u);
  }
  collect(bins, job.bins);
  if (!last_block(job.state)) return;

  const Bin coarse = find(job.bins, rank);
  clear(job.bins);
  uint32_t lower = 0;
  if (coarse.place < kBins) {
    clear(bins);
    for (int64_t i = threadIdx.x; i < runs * kRun; i += kThreads)
      if (keys[i] >> kCoarseShift == coarse.place)
        atomicAdd(&bins[keys[i] >> (kCoarseShift - kBandShift) & (kBins - 1)], 1u);
    __syncthreads();
    lower = coarse.place << kCoarseShift | find(bins, rank - coarse.above).place
                                               << (kCoarseShift - kBandShift);
    lower = lower >> kBandShift << kBandShift;  // mstopk's band must be marked whole
  }
  if (threadIdx.x == 0)
    *job.state = {lower, kEnd, 0, static_cast<uint32_t>(job.s.k), kBandShift, false, 0};
}

template <class T, bool kResidual, bool kVelocity>
__global__ void __launch_bounds__(kThreads) add_and_mark(Job<T> job) {
  __shared__ uint32_t bins[kBins];
  clear(bins);
  const Selection& s = job.s;
  const uint32_t lower = job.state->lower;
  for (int64_t strip = warp(); strip < job.strips; strip += warps()) {
    const int64_t base = strip * kStrip;
    const int length = static_cast<int>(base + kStrip <= s.n ? kStrip : s.n - base);
    const T* gradients = static_cast<const T*>(s.gradient) + base;
    float *residuals = s.residual + base, *velocities = s.velocity + base;
    uint32_t mark = 0, bad = 0;  // this lane's words
#pragma unroll 1
    for (int word = 0; word < 32; word += kBatch) {
      T gradient[kBatch];
      float residual[kBatch] = {}, velocity[kBatch] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int place = (word + j) * 32 + lane();
        // a branch would keep the loads from being under way together
        const int i = place < length ? place : length - 1;
        gradient[j] = gradients[i];
        if (kResidual) residual[j] = residuals[i];
        if (kVelocity) velocity[j] = velocities[i];
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int place = (word + j) * 32 + lane();
        const Sum total =
            sum(kResidual, kVelocity, s.momentum, widen(gradient[j]), residual[j], velocity[j]);
        const uint32_t key = key_of(total.acc);  // of a velocity that is not finite, neither is acc
        const bool within = place < length;
        if (within && key < kNotFinite) {
          if (kResidual) residuals[place] = total.acc;
          if (kVelocity) velocities[place] = total.velocity;
        }
        const bool candidate = within && key >= lower;
        const uint32_t candidates = __ballot_sync(kAllLanes, candidate);
        if (candidates == 0) continue;
        if (candidate) atomicAdd(&bins[bin_of(key, lower, kBandShift)], 1u);
        const uint32_t not_finite = __ballot_sync(kAllLanes, within && key >= kNotFinite);
        if (lane() == word + j) {
          mark = candidates;
          bad = not_finite;
        }
      }
    }
    const bool flag = __any_sync(kAllLanes, bad != 0);
    job.marks[strip * 32 + lane()] = flag ? bad : mark;
    if (lane() == 0) job.flags[strip] = flag;
  }
  if (s.k == 0) return;
  collect(bins, job.bins);
  if (last_block(job.state)) descend(job);
}

// Calls body(index, key, value) for the candidates among this lane's 32 entries of the strip,
// ascending (perhaps for some that are none too). The key of what is not finite is kNotFinite.
template <class T, class Body>
__device__ void visit(const Job<T>& job, bool all, int64_t strip, const Body& body) {
  const Selection& s = job.s;
  const int64_t first = strip * kStrip + lane() * 32;
  const uint32_t bits = job.marks[strip * 32 + lane()], bad = job.flags[strip] ? bits : 0;
  uint32_t rest = bits;
  if (all || job.flags[strip])
    rest = first + 32 <= s.n ? kAllLanes : first < s.n ? (1u << (s.n - first)) - 1 : 0;
  for (; rest; rest &= rest - 1) {
    const int place = __ffs(static_cast<int>(rest)) - 1;
    const int64_t i = first + place;
    if (bad >> place & 1) {
      body(i, kNotFinite, sum_at(job, i));
    } else {
      const float value = s.residual ? s.residual[i] : s.velocity ? s.velocity[i] : job.gradient(i);
      body(i, key_of(value), value);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) narrow(Job<T> job) {
  const State state = *job.state;
  if (state.shift == kFound) return;
  __shared__ uint32_t bins[kBins];
  clear(bins);
  for (int64_t strip = warp(); strip < job.strips; strip += warps()) {
    visit(job, state.all, strip, [&](int64_t, uint32_t key, float) {
      if (key >= state.lower && key < state.upper)
        atomicAdd(&bins[bin_of(key, state.lower, state.shift)], 1u);
    });
  }
  collect(bins, job.bins);
  if (last_block(job.state)) descend(job);
}

// Calls body(strip) for this warp's share of the strips: neighbours, in order.
template <class T, class Body>
__device__ void each_strip_of_warp(const Job<T>& job, const Body& body) {
  const int64_t end = job.strips * (warp() + 1) / warps();
  for (int64_t strip = job.strips * warp() / warps(); strip < end; ++strip) body(strip);
}

__device__ uint64_t above_or_inside(const State& state, uint32_t key) {
  return key >= state.upper ? uint64_t{1} << 32 : key >= state.lower;
}

template <class T>
__global__ void __launch_bounds__(kThreads) tally(Job<T> job) {
  const State state = *job.state;
  uint64_t mine = 0;
  each_strip_of_warp(job, [&](int64_t strip) {
    visit(job, state.all, strip,
          [&](int64_t, uint32_t key, float) { mine += above_or_inside(state, key); });
  });
  mine = inclusive_sum_of_warp(mine);
  if (lane() == 31) job.tallies[warp()] = mine;
  if (!last_block(job.state)) return;

  const int64_t share = (warps() + kThreads - 1) / kThreads, first = threadIdx.x * share;
  const int64_t end = first + share < warps() ? first + share : warps();
  uint64_t total = 0;
  for (int64_t i = first; i < end; ++i) total += job.tallies[i];
  uint64_t before = exclusive_sum_of_block(total);
  for (int64_t i = first; i < end; ++i) {
    const uint64_t own = job.tallies[i];
    job.tallies[i] = before;
    before += own;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) emit(Job<T> job) {
  const Selection& s = job.s;
  const State state = *job.state;
  const bool window = s.rule == Rule::mstopk && state.lower < kNotFinite;
  const uint32_t first = window
                             ? static_cast<uint32_t>(below(s.seed, state.inside - state.need + 1))
                             : 0,
                 end = first + state.need;
  uint64_t before = job.tallies[warp()];
  each_strip_of_warp(job, [&](int64_t strip) {
    uint64_t mine = 0;
    visit(job, state.all, strip,
          [&](int64_t, uint32_t key, float) { mine += above_or_inside(state, key); });
    const uint64_t up_to_here = inclusive_sum_of_warp(mine);
    uint64_t next = before + up_to_here - mine;
    visit(job, state.all, strip, [&](int64_t i, uint32_t key, float value) {
      const uint64_t kind = above_or_inside(state, key);
      const uint32_t above = static_cast<uint32_t>(next >> 32),
                     inside = static_cast<uint32_t>(next);
      next += kind;
      if (kind == 0 || (kind == 1 && (inside < first || inside >= end))) return;
      const uint32_t from_band = inside < first ? 0 : (inside < end ? inside : end) - first;
      s.indices[above + from_band] = static_cast<int32_t>(i);
      s.values[above + from_band] = value;
      if (key >= kNotFinite) return;
      if (s.residual) s.residual[i] = 0.0f;
      if (s.velocity) s.velocity[i] = 0.0f;
    });
    before += __shfl_sync(kAllLanes, up_to_here, 31);
  });
}

constexpr int64_t kBinsAt = 128;  // bytes, the state before it
constexpr int64_t kTalliesAt = kBinsAt + 4 * kBins;
constexpr int64_t kMarksAt = kTalliesAt + 8 * kMostBlocks * kWarps;

int64_t strips(int64_t n) { return (n + kStrip - 1) / kStrip; }

int64_t blocks(int64_t n) {
  int device = 0, processors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t most = processors * kBlocksPerProcessor < kMostBlocks
                           ? processors * kBlocksPerProcessor
                           : kMostBlocks;
  const int64_t enough = (strips(n) + kWarps - 1) / kWarps;
  return enough < most ? enough : most;
}

template <class T>
const char* run(const Selection& s, char* workspace, cudaStream_t stream) {
  const Job<T> job{s,
                   strips(s.n),
                   reinterpret_cast<State*>(workspace),
                   reinterpret_cast<uint32_t*>(workspace + kBinsAt),
                   reinterpret_cast<uint64_t*>(workspace + kTalliesAt),
                   reinterpret_cast<uint32_t*>(workspace + kMarksAt),
                   reinterpret_cast<uint8_t*>(workspace + kMarksAt + 128 * strips(s.n))};
  // The margin is three standard deviations of the number of drawn entries that reach the
  // threshold, as on CPUs.
  int64_t runs = s.n / (32 * kRun) < kMostRuns ? s.n / (32 * kRun) : kMostRuns;
  const double expected = static_cast<double>(runs * kRun) * s.k / s.n;
  const int64_t rank = static_cast<int64_t>(expected + 3 * std::sqrt(expected) + 4);
  if (rank > runs * kRun) runs = 0;

  cudaMemsetAsync(workspace, 0, kTalliesAt, stream);
  launch(sample<T>, runs * kRun / kThreads + 1, stream, job, runs, static_cast<uint32_t>(rank));
  launch(s.velocity ? (s.residual ? add_and_mark<T, true, true> : add_and_mark<T, false, true>)
                    : (s.residual ? add_and_mark<T, true, false> : add_and_mark<T, false, false>),
         blocks(s.n), stream, job);
  if (s.k == 0) return launch_error();
  for (int level = s.rule == Rule::exact ? 3 : 2; level > 0; --level)
    launch(narrow<T>, blocks(s.n), stream, job);
  launch(tally<T>, blocks(s.n), stream, job);
  launch(emit<T>, blocks(s.n), stream, job);
  return launch_error();
}

}  // namespace

int64_t select_cuda_workspace(int64_t n) { return kMarksAt + 129 * strips(n); }

const char* select_cuda(const Selection& s, void* workspace, CUstream_st* stream) {
  if (s.n == 0) return nullptr;
  switch (s.type) {
    case Float::float32:
      return run<float>(s, static_cast<char*>(workspace), stream);
    case Float::float16:
      return run<Half>(s, static_cast<char*>(workspace), stream);
    case Float::bfloat16:
      return run<Bfloat>(s, static_cast<char*>(workspace), stream);
  }
  return "unknown gradient type";
}

const char* copy_cuda(void* to, const void* from, int64_t bytes, CUstream_st* stream) {
  cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  return launch_error();
}

}  // namespace tfcommx
