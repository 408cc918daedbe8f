// Marks the functions that GPUs compute too, and lets an emulated GPU compute as they do.
#pragma once

#ifdef TFCOMMX_CUDA_ON_CPU
#include <cmath>
#endif

#ifdef __CUDACC__
#define TFCOMMX_DEVICE __host__ __device__
#else
#define TFCOMMX_DEVICE
#endif

#ifdef TFCOMMX_CUDA_ON_CPU
namespace cuda_on_cpu {
extern bool in_kernel;
}
#endif

namespace tfcommx {

// Operands and results of functions that are .ftz instructions on GPUs go through this elsewhere.
// Threads of CPUs flush denormals by themselves. The kernels that tests/cuda_on_cpu runs must not,
// because plain arithmetic keeps denormals on a GPU: there this flushes them, to zero of their sign.
TFCOMMX_DEVICE inline float flushed(float x) {
#ifdef TFCOMMX_CUDA_ON_CPU
  return cuda_on_cpu::in_kernel && std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
#else
  return x;
#endif
}

}  // namespace tfcommx
