// Merging on GPUs. Compiled by nvcc, and run on CPUs by tests/cuda_on_cpu.
//
// A tile of the dense vector is summed by a block of threads in its own memory, run after run, and
// written once. So every entry's sum is made in the order of the list, without atomics.
#include <cmath>

#include "kernels/cuda.h"
#include "kernels/merge.h"

namespace tfcommx {
namespace {

constexpr int64_t kTile = 4096;  // entries: 16 KB
// Pairs of a thread that are under way together: of so many runs, so many of each.
constexpr int kRuns = 4, kRounds = 2;
constexpr int kSearchers = 8;  // lanes that search together

int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }

// Where the pairs of each tile start, in each run; the end of the last tile's ones is the run's.
// Each step divides what is left by nine, so that it is a third as long as a search by halves.
__global__ void __launch_bounds__(kThreads)
    find_starts(Merge merge, int64_t run, int64_t tiles, int32_t* starts) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kSearchers,
                each = tiles + 1, which = i / each, tile = i % each;
  const bool searches = which < merge.pairs / run;
  const int32_t* indices = merge.indices + which * run;
  const int me = lane() % kSearchers;
  // All pairs of a run are in some tile's share, also those that are outside or out of order: the
  // more of the probed ones are below the tile, the later it starts
  int64_t first = !searches || tile == tiles ? run : 0, end = !searches || tile ? run : 0;
  while (__any_sync(kAllLanes, first < end)) {
    const int64_t step = (end - first) / (kSearchers + 1) + 1, probe = first + step * (me + 1) - 1;
    const bool below = probe < end && indices[probe] < tile * kTile;
    const int64_t passed =
        ones(__ballot_sync(kAllLanes, below) >> (lane() - me) & ((1u << kSearchers) - 1));
    const int64_t last = first + step * (passed + 1) - 1;
    first += step * passed;
    if (last < end) end = last;
  }
  if (searches && me == 0) starts[i] = static_cast<int32_t>(first);
}

__global__ void __launch_bounds__(kThreads)
    add_runs(Merge merge, int64_t run, int64_t tiles, const int32_t* starts) {
  __shared__ float sums[kTile];
  const int64_t base = blockIdx.x * kTile, runs = merge.pairs / run;
  const int32_t start = static_cast<int32_t>(base);
  const uint32_t length = static_cast<uint32_t>(merge.n - base < kTile ? merge.n - base : kTile);
  for (uint32_t i = threadIdx.x; i < kTile; i += kThreads) sums[i] = 0;
  starts += blockIdx.x;
  bool good = true;
  const auto put = [&](int32_t index, int32_t before, float value) {
    const uint32_t place = static_cast<uint32_t>(index) - static_cast<uint32_t>(start);
    if (place < length && before < index) {
      sums[place] = add(sums[place], value);
    } else {
      good = false;
    }
  };
  for (int64_t which = 0; which < runs; which += kRuns) {
    int32_t begin[kRuns], end[kRuns], index[kRuns][kRounds], before[kRuns][kRounds];
    float value[kRuns][kRounds];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const bool is_run = which + r < runs;
      const int32_t* of_run = starts + (which + r) * (tiles + 1);
      begin[r] = is_run ? of_run[0] : 0;
      end[r] = is_run ? of_run[1] : 0;
    }
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const int32_t* indices = merge.indices + (which + r) * run;
      const float* values = merge.values + (which + r) * run;
#pragma unroll
      for (int j = 0; j < kRounds; ++j) {
        const int32_t i = begin[r] + static_cast<int32_t>(threadIdx.x) + j * kThreads;
        if (i >= end[r]) continue;
        index[r][j] = indices[i];
        before[r][j] = i > begin[r] ? indices[i - 1] : -1;
        value[r][j] = values[i];
      }
    }
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      if (which + r >= runs) continue;
      __syncthreads();
      int32_t i = begin[r] + static_cast<int32_t>(threadIdx.x);
#pragma unroll
      for (int j = 0; j < kRounds; ++j, i += kThreads)
        if (i < end[r]) put(index[r][j], before[r][j], value[r][j]);
      const int32_t* indices = merge.indices + (which + r) * run;
      for (; i < end[r]; i += kThreads)
        put(indices[i], indices[i - 1], merge.values[(which + r) * run + i]);
    }
  }
  __syncthreads();
  float* dense = merge.dense + base;
  for (uint32_t i = threadIdx.x; i < length; i += kThreads)
    if (i > 0 || base > 0) dense[i] = sums[i];
  // Added, because any block may spoil it
  if (base == 0 && threadIdx.x == 0) atomicAdd(&merge.dense[0], sums[0]);
  if (!good) atomicAdd(&merge.dense[0], NAN);
}

}  // namespace

int64_t merge_cuda_workspace(const Merge& merge, int64_t run) {
  return merge.pairs ? merge.pairs / run * (tiles_of(merge.n) + 1) : 0;
}

const char* merge_cuda(const Merge& merge, int64_t run, int32_t* workspace, CUstream_st* stream) {
  if (merge.n == 0) return nullptr;
  if (merge.pairs == 0) {
    cudaMemsetAsync(merge.dense, 0, 4 * merge.n, stream);
    return launch_error();
  }
  const int64_t tiles = tiles_of(merge.n), starts = merge_cuda_workspace(merge, run);
  cudaMemsetAsync(merge.dense, 0, 4, stream);
  launch(find_starts, (starts * kSearchers + kThreads - 1) / kThreads, stream, merge, run, tiles,
         workspace);
  launch(add_runs, tiles, stream, merge, run, tiles, static_cast<const int32_t*>(workspace));
  return launch_error();
}

}  // namespace tfcommx
