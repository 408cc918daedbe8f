// Merging on GPUs. Compiled by nvcc, and run on CPUs by tests/cuda_on_cpu; no GPU has run it yet.
//
// One launch for each run of the list, in order: in a run no index repeats, so its additions need
// no atomics, and every entry's sum is made in the order of the list.
#include <cmath>

#include "kernels/cuda.h"
#include "kernels/merge.h"

namespace tfcommx {
namespace {

__global__ void __launch_bounds__(kThreads) add_run(Merge merge, int64_t first, int64_t end) {
  const int64_t j = first + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= end) return;
  const int64_t index = merge.indices[j];
  if (index >= 0 && index < merge.n) merge.dense[index] = add(merge.dense[index], merge.values[j]);
}

__global__ void __launch_bounds__(kThreads) spoil_where_outside(Merge merge) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j < merge.pairs && (merge.indices[j] < 0 || merge.indices[j] >= merge.n))
    merge.dense[0] = NAN;
}

int64_t blocks(int64_t pairs) { return (pairs + kThreads - 1) / kThreads; }

}  // namespace

const char* merge_cuda(const Merge& merge, int64_t run, CUstream_st* stream) {
  if (merge.n == 0) return nullptr;
  cudaMemsetAsync(merge.dense, 0, 4 * merge.n, stream);
  for (int64_t first = 0; first < merge.pairs; first += run)
    launch(add_run, blocks(run), stream, merge, first, first + run);
  if (merge.pairs) launch(spoil_where_outside, blocks(merge.pairs), stream, merge);
  return launch_error();
}

}  // namespace tfcommx
