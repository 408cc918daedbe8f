// Just enough of CUDA to run ops/kernels/*.cu on a CPU; README.md beside this says what that
// proves. The functions are in cuda_on_cpu.cc, so that tests/cuda_race can compile kernels with
// checks of their accesses, and the emulator without.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifndef TFCOMMX_CUDA_ON_CPU
#error "Compile all sources with -DTFCOMMX_CUDA_ON_CPU: kernels/device.h flushes denormals by it."
#endif

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct CUstream_st;

struct Place {
  unsigned x;
};
extern Place threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace cuda_on_cpu {

extern int processors;
extern int64_t atomics;  // so far

void launch(int64_t blocks, int threads, void (*body)(const void*), const void* kernel);
// Waits for the lanes of the mask, and returns every lane's value. at: address of the call in the
// kernel. orders_memory: what a lane did before is done for the others after, as by __syncwarp only.
const uint64_t* meet(unsigned mask, uint64_t value, const void* at, bool orders_memory);
void atomic(void* address, size_t bytes, const void* at);  // is about to access these
void* allocate(size_t bytes);
void release(void* pointer);
void fill(void* to, int value, size_t bytes);
void copy(void* to, const void* from, size_t bytes);
double seconds();

template <class Kernel>
void launch(int64_t blocks, int threads, CUstream_st*, const Kernel& kernel) {
  launch(blocks, threads, [](const void* body) { (*static_cast<const Kernel*>(body))(); }, &kernel);
}

}  // namespace cuda_on_cpu

// Functions that kernels call and that are compiled with them: tests/cuda_race must see neither what
// they access nor the address of their own calls instead of the kernel's.
#define OF_EMULATOR __attribute__((no_sanitize_thread, noinline))

void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);
void __threadfence();
unsigned __ballot_sync(unsigned mask, bool predicate);
bool __any_sync(unsigned mask, bool predicate);
bool __all_sync(unsigned mask, bool predicate);

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selected) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (bytes >> (selected >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
template <class T>
T __ldg(const T* address) {
  return *address;
}

namespace cuda_on_cpu {

template <class T>
OF_EMULATOR T shuffled(unsigned mask, T value, unsigned from, const void* at) {
  static_assert(sizeof value <= 8, "a lane's value must fit 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = meet(mask, bits, at, false)[mask >> from % 32 & 1 ? from % 32 : 32];  // [32]: noise
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
struct Given {  // not deduced from: an int is an unsigned where that is added to
  using Type = T;
};

template <class T, class Change>
OF_EMULATOR T changed(T* address, const Change& change, const void* at) {
  atomic(address, sizeof *address, at);
  const T before = *address;
  *address = change(before);
  return before;
}

}  // namespace cuda_on_cpu

template <class T>
OF_EMULATOR T __shfl_sync(unsigned mask, T value, unsigned from) {
  return cuda_on_cpu::shuffled(mask, value, from, __builtin_return_address(0));
}

template <class T>
OF_EMULATOR T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return cuda_on_cpu::shuffled(mask, value, lane < distance ? lane : lane - distance,
                               __builtin_return_address(0));
}

template <class T>
OF_EMULATOR T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return cuda_on_cpu::shuffled(mask, value, lane + distance > 31 ? lane : lane + distance,
                               __builtin_return_address(0));
}

template <class T>
OF_EMULATOR T __shfl_xor_sync(unsigned mask, T value, unsigned bits) {
  return cuda_on_cpu::shuffled(mask, value, threadIdx.x % 32 ^ bits, __builtin_return_address(0));
}

template <class T>
OF_EMULATOR T atomicAdd(T* address, typename cuda_on_cpu::Given<T>::Type value) {
  return cuda_on_cpu::changed(
      address, [value](T before) { return before + value; }, __builtin_return_address(0));
}

template <class T>
OF_EMULATOR T atomicMax(T* address, typename cuda_on_cpu::Given<T>::Type value) {
  return cuda_on_cpu::changed(
      address, [value](T before) { return before < value ? value : before; },
      __builtin_return_address(0));
}

template <class T>
OF_EMULATOR T atomicMin(T* address, typename cuda_on_cpu::Given<T>::Type value) {
  return cuda_on_cpu::changed(
      address, [value](T before) { return value < before ? value : before; },
      __builtin_return_address(0));
}

template <class T>
OF_EMULATOR T atomicOr(T* address, typename cuda_on_cpu::Given<T>::Type value) {
  return cuda_on_cpu::changed(
      address, [value](T before) { return before | value; }, __builtin_return_address(0));
}

template <class T>
OF_EMULATOR T atomicExch(T* address, typename cuda_on_cpu::Given<T>::Type value) {
  return cuda_on_cpu::changed(address, [value](T) { return value; }, __builtin_return_address(0));
}

template <class T>
OF_EMULATOR T atomicCAS(T* address, typename cuda_on_cpu::Given<T>::Type expected,
                        typename cuda_on_cpu::Given<T>::Type value) {
  return cuda_on_cpu::changed(
      address, [=](T before) { return before == expected ? value : before; },
      __builtin_return_address(0));
}

// The runtime's functions that the kernels and scripts/verify/check_cuda.cu call.
using cudaStream_t = CUstream_st*;
using cudaEvent_t = double*;
enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
struct cudaDeviceProp {
  char name[16] = "cuda_on_cpu";
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = cuda_on_cpu::processors;
  return cudaSuccess;
}
template <class T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  *pointer = static_cast<T*>(cuda_on_cpu::allocate(bytes));
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* pointer) {
  cuda_on_cpu::release(pointer);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
  cuda_on_cpu::fill(pointer, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  cuda_on_cpu::copy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new double;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *event = cuda_on_cpu::seconds();
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = static_cast<float>((*end - *begin) * 1e3);
  return cudaSuccess;
}
