// Rounding errors into a residual, on GPUs. Compiled by nvcc, and run on CPUs by tests/cuda_on_cpu.
#include "kernels/cuda.h"
#include "kernels/keep.h"

namespace tfcommx {
namespace {

__global__ void __launch_bounds__(kThreads) put(Keep keep) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < keep.k && !keep.outside(i)) keep.put(i);
}

}  // namespace

const char* keep_cuda(const Keep& keep, CUstream_st* stream) {
  if (keep.k) launch(put, (keep.k + kThreads - 1) / kThreads, stream, keep);
  return launch_error();
}

}  // namespace tfcommx
