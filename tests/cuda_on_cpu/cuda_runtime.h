// Just enough of CUDA to run ops/kernels/*.cu on a CPU; README.md beside this says what that
// proves.
//
// Blocks run one after another, the threads of a block as fibers; both in an order that is drawn
// anew each time. A fiber runs until it waits for others: at __syncthreads for the block, at a
// ballot or a shuffle for its warp. If all wait for each other, the program ends and says so.
// "Device" memory is ordinary memory, filled with noise when it is handed out.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/flush_denormals.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct CUstream_st;

struct Place {
  unsigned x;
};
inline Place threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

inline std::mt19937 random{1};
inline int processors = 2;
inline int64_t atomics = 0;  // so far

[[noreturn]] inline void fail(const char* what) {
  std::printf("cuda_on_cpu: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::fflush(stdout);
  std::_Exit(3);
}

struct Barrier {
  unsigned members = 0, arrived = 0, turn = 0;
};

struct Fiber {
  static constexpr size_t kStack = 128 * 1024;
  std::unique_ptr<char[]> stack{new char[kStack]};
  ucontext_t start;
  jmp_buf here;
  bool started, done;
  const Barrier* waits_for;
  unsigned turn;

  bool may_run() const { return !done && (!waits_for || waits_for->turn != turn); }
};

struct Warp {
  Barrier barrier;
  uint64_t values[2][32];  // of this exchange and the one before, which others may still read
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> all_warps;
inline Barrier block_barrier;
inline jmp_buf scheduler;
inline const std::function<void()>* body;

inline void wait(Barrier& barrier) {
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.turn;
    return;
  }
  Fiber& fiber = fibers[threadIdx.x];
  fiber.waits_for = &barrier;
  fiber.turn = barrier.turn;
  if (!_setjmp(fiber.here)) _longjmp(scheduler, 1);
}

inline void run_fiber() {
  (*body)();
  fibers[threadIdx.x].done = true;
  _longjmp(scheduler, 1);
}

inline void resume(unsigned thread) {
  Fiber& fiber = fibers[thread];
  threadIdx.x = thread;
  fiber.waits_for = nullptr;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

// Lets the fibers of a warp run until none can.
inline bool run_warp(unsigned warp, unsigned threads) {
  unsigned lanes[32];
  const unsigned count = std::min(32u, threads - warp * 32);
  std::iota(lanes, lanes + count, warp * 32);
  std::shuffle(lanes, lanes + count, random);
  bool any = false;
  for (bool moved = true; moved;) {
    moved = false;
    for (unsigned j = 0; j < count; ++j) {
      if (!fibers[lanes[j]].may_run()) continue;
      resume(lanes[j]);
      any = moved = true;
    }
  }
  return any;
}

inline void run_block(unsigned threads) {
  block_barrier = {threads, 0, 0};
  for (unsigned warp = 0; warp < all_warps.size(); ++warp)
    all_warps[warp].barrier = {std::min(32u, threads - warp * 32), 0, 0};
  for (Fiber& fiber : fibers) {
    fiber.started = fiber.done = false;
    fiber.waits_for = nullptr;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = Fiber::kStack;
    makecontext(&fiber.start, run_fiber, 0);
  }
  std::vector<unsigned> order(all_warps.size());
  std::iota(order.begin(), order.end(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    std::shuffle(order.begin(), order.end(), random);
    for (const unsigned warp : order) moved |= run_warp(warp, threads);
  }
  for (const Fiber& fiber : fibers)
    if (!fiber.done) fail("threads wait for others that have ended or wait elsewhere");
}

inline void launch(int64_t blocks, int threads, CUstream_st*, const std::function<void()>& kernel) {
  const tfcommx::FlushDenormals flush;
  if (blocks < 1 || threads < 1 || threads > 1024)
    fail("a launch needs blocks, and 1 to 1024 threads in each");
  fibers.resize(threads);
  all_warps.resize((threads + 31) / 32);
  body = &kernel;
  gridDim.x = static_cast<unsigned>(blocks);
  blockDim.x = threads;
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const unsigned block : order) {
    blockIdx.x = block;
    run_block(threads);
  }
}

// Every lane's value, for every lane of the warp.
inline const uint64_t* exchange(unsigned mask, uint64_t value) {
  if (mask != 0xffffffffu) fail("only whole warps exchange values here");
  Warp& warp = all_warps[threadIdx.x / 32];
  uint64_t* values = warp.values[warp.barrier.turn % 2];
  values[threadIdx.x % 32] = value;
  wait(warp.barrier);
  return values;
}

template <class T>
T shuffled(unsigned mask, T value, unsigned from) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(mask, bits)[from];
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::block_barrier); }
inline void __syncwarp() { cuda_on_cpu::exchange(0xffffffffu, 0); }
inline void __threadfence() {}
inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  const uint64_t* values = cuda_on_cpu::exchange(mask, predicate);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(values[lane]) << lane;
  return bits;
}

inline bool __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate); }

template <class T>
T __shfl_sync(unsigned mask, T value, unsigned from) {
  return cuda_on_cpu::shuffled(mask, value, from);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return cuda_on_cpu::shuffled(mask, value, lane < distance ? lane : lane - distance);
}

inline unsigned atomicOr(unsigned* place, unsigned bits) {
  const unsigned before = *place;
  *place |= bits;
  return before;
}

template <class Number>
Number atomicAdd(Number* place, Number value) {
  const Number before = *place;
  *place += value;
  ++cuda_on_cpu::atomics;
  return before;
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
  *pointer = static_cast<T*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  std::memset(static_cast<void*>(*pointer), 0xa5, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
  std::memset(pointer, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  std::memcpy(to, from, bytes);
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
  *event =
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = static_cast<float>((*end - *begin) * 1e3);
  return cudaSuccess;
}
