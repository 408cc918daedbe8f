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

// Threads that a processor holds at once
#ifndef __CUDA_ARCH__
constexpr int kResidentThreads = 2048;  // of no meaning on the host
#elif __CUDA_ARCH__ == 750
constexpr int kResidentThreads = 1024;
#elif __CUDA_ARCH__ / 100 == 8 && __CUDA_ARCH__ != 800 || __CUDA_ARCH__ / 100 >= 11
constexpr int kResidentThreads = 1536;
#else
constexpr int kResidentThreads = 2048;
#endif

// Return the blocks a processor holds of `wanted`, for __launch_bounds__: ptxas warns of more.
constexpr int resident(int wanted) {
  return wanted * kThreads < kResidentThreads ? wanted : kResidentThreads / kThreads;
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream,
            Arguments... arguments) {
#ifdef __CUDACC__
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arguments...);
#else  // tests/cuda_on_cpu has another cuda_runtime.h
  cuda_on_cpu::launch(blocks, kThreads, stream, [&] { kernel(arguments...); });
#endif
}

// As `launch`, of a kernel that begins with `wait_for_previous_kernel`: its blocks are placed while
// those of the stream's previous kernel still run, if that kernel has called `let_next_kernel_wait`.
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream,
                  Arguments... arguments) {
#ifdef __CUDACC__
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &early;
  // Code that was made for older GPUs does not wait
  cudaFuncAttributes code;
  const bool waits = cudaFuncGetAttributes(&code, kernel) == cudaSuccess && code.ptxVersion >= 90;
  config.numAttrs = waits ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
#else
  launch(kernel, blocks, stream, arguments...);
#endif
}

// Waits until all that the stream's previous kernel writes can be read.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the blocks of the stream's next kernel be placed where there is room, to wait there.
__device__ inline void let_next_kernel_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
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

// a * b + c, of which the product must be exact and no denormal: so it makes no difference that only
// the sum is rounded.
__device__ inline float add_product(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  asm("fma.rn.ftz.f32 %0, %1, %2, %0;" : "+f"(c) : "f"(a), "f"(b));
  return c;
#else
  return add(multiply(a, b), c);
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

// The largest number of all lanes, which must call it.
__device__ inline uint32_t largest_of_warp(uint32_t number) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, number);
#else
  for (unsigned distance = 16; distance; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, number, distance);
    number = other > number ? other : number;
  }
  return number;
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
