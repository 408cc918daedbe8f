// What the CUDA kernels share: launching, and float32 arithmetic as TensorFlow's CPU threads have
// it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/device.h"

namespace tfcommx {

constexpr int kThreads = 256;  // of a block, in every kernel
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream,
            Arguments... arguments) {
#ifdef __CUDACC__
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arguments...);
#else  // tests/cuda_on_cpu has another cuda_runtime.h
  cuda_on_cpu::launch(blocks, kThreads, stream, [&] { kernel(arguments...); });
#endif
}

// Null, or what CUDA says of the launches since the last call.
inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Denormal operands and results are zero, and no product is fused with a sum, whatever the
// compiler's flags.
__device__ inline float add(float a, float b) {
#ifdef __CUDA_ARCH__
  asm("add.rn.ftz.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#else
  return flushed(flushed(a) + flushed(b));
#endif
}

__device__ inline float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  asm("mul.rn.ftz.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#else
  return flushed(flushed(a) * flushed(b));
#endif
}

__device__ inline int lane() { return threadIdx.x % 32; }

__device__ inline uint32_t ones(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

template <class Number>
__device__ Number inclusive_sum_of_warp(Number value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const Number other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane() >= distance) value += other;
  }
  return value;
}

template <class Number>
__device__ Number exclusive_sum_of_block(Number value) {
  __shared__ Number sums[kWarps];
  const Number inclusive = inclusive_sum_of_warp(value);
  if (lane() == 31) sums[threadIdx.x / 32] = inclusive;
  __syncthreads();
  Number before = 0;
  for (unsigned other = 0; other < threadIdx.x / 32; ++other) before += sums[other];
  __syncthreads();  // the sums may be written again
  return before + inclusive - value;
}

}  // namespace tfcommx
