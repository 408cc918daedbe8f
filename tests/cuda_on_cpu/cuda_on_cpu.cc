// The emulator behind cuda_runtime.h.
//
// Blocks run one after another, the threads of a block as fibers; both in an order that is drawn
// anew each time. A fiber runs until it waits for others: at __syncthreads for the block, at a
// ballot, a shuffle or __syncwarp for the lanes of its mask. If all wait for each other, the program
// ends and says so. "Device" memory is ordinary memory, filled with noise when it is handed out.
// Kernels compute by a GPU's rules: plain arithmetic keeps denormals, as nvcc's does without -ftz.
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "observer.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

Place threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

int processors = 2;
int64_t atomics = 0;
bool in_kernel = false;

namespace {

std::mt19937 generator{1};
Observer silent;

// Threads of the host may flush denormals, as TensorFlow's do.
class KeepDenormals {
#if defined(__x86_64__)
 public:
  KeepDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// While what a kernel has called runs.
class Emulating {
 public:
  Emulating() { in_kernel = false; }
  ~Emulating() { in_kernel = true; }
};

[[noreturn]] void fail(const char* what) {
  std::printf("cuda_on_cpu: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::fflush(stdout);
  std::_Exit(3);
}

struct Barrier {
  unsigned members = 0, arrived = 0, turn = 0;
};

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStack]};
  ucontext_t start;
  jmp_buf here;
  bool started, done;
  const Barrier* waits_for;
  unsigned turn;

  bool may_run() const { return !done && (!waits_for || waits_for->turn != turn); }
};

// Where the lanes of a mask meet.
struct Meeting {
  unsigned mask;
  Barrier barrier;
  // Of this exchange and the one before, which others may still read; the last value is noise
  uint64_t values[2][33];
  const void* at[2][32];
};

std::vector<Fiber> fibers;
std::vector<std::deque<Meeting>> meetings;  // by warp
Barrier block_barrier;
jmp_buf scheduler;
void (*body)(const void*);
const void* kernel;

// Waits for the others; last() is called when all have arrived, before any continues.
template <class Last>
void wait(Barrier& barrier, const Last& last) {
  const Emulating emulating;
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.turn;
    last();
  } else {
    Fiber& fiber = fibers[threadIdx.x];
    fiber.waits_for = &barrier;
    fiber.turn = barrier.turn;
    if (!_setjmp(fiber.here)) _longjmp(scheduler, 1);
  }
}

void run_fiber() {
  in_kernel = true;
  body(kernel);
  in_kernel = false;
  fibers[threadIdx.x].done = true;
  _longjmp(scheduler, 1);
}

void resume(unsigned thread) {
  Fiber& fiber = fibers[thread];
  threadIdx.x = thread;
  fiber.waits_for = nullptr;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

// Lets the fibers of a warp run until none can.
bool run_warp(unsigned warp, unsigned threads) {
  unsigned lanes[32];
  const unsigned count = std::min(32u, threads - warp * 32);
  std::iota(lanes, lanes + count, warp * 32);
  std::shuffle(lanes, lanes + count, generator);
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

void run_block(unsigned threads) {
  observer->block_begins(threads);
  block_barrier = {threads, 0, 0};
  for (auto& of_warp : meetings) of_warp.clear();
  for (Fiber& fiber : fibers) {
    fiber.started = fiber.done = false;
    fiber.waits_for = nullptr;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStack;
    makecontext(&fiber.start, run_fiber, 0);
  }
  std::vector<unsigned> order(meetings.size());
  std::iota(order.begin(), order.end(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    std::shuffle(order.begin(), order.end(), generator);
    for (const unsigned warp : order) moved |= run_warp(warp, threads);
  }
  for (const Fiber& fiber : fibers)
    if (!fiber.done) fail("threads wait for others that have ended or wait elsewhere");
}

Meeting& meeting(unsigned mask) {
  if (!(mask >> threadIdx.x % 32 & 1)) fail("a lane must be in the mask that it names");
  std::deque<Meeting>& of_warp = meetings[threadIdx.x / 32];
  for (Meeting& existing : of_warp)
    if (existing.mask == mask) return existing;
  of_warp.push_back({});
  Meeting& result = of_warp.back();
  result.mask = mask;
  const unsigned lanes = std::min(32u, blockDim.x - threadIdx.x / 32 * 32);
  const unsigned present = lanes == 32 ? mask : mask & ((1u << lanes) - 1);
  result.barrier.members = __builtin_popcount(present);
  for (auto& values : result.values) std::fill_n(values, 33, 0xa5a5a5a5a5a5a5a5u);
  return result;
}

}  // namespace

Observer* observer = &silent;

const char* stack() { return fibers[threadIdx.x].stack.get(); }

void launch(int64_t blocks, int threads, void (*body_of_kernel)(const void*),
            const void* kernel_with_arguments) {
  const KeepDenormals keep;
  if (blocks < 1 || blocks > INT32_MAX || threads < 1 || threads > 1024)
    fail("a launch needs 1 to 2^31 - 1 blocks, and 1 to 1024 threads in each");
  observer->kernel_begins();
  fibers.resize(threads);
  meetings.resize((threads + 31) / 32);
  body = body_of_kernel;
  kernel = kernel_with_arguments;
  gridDim.x = static_cast<unsigned>(blocks);
  blockDim.x = threads;
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), generator);
  for (const unsigned block : order) {
    blockIdx.x = block;
    run_block(threads);
  }
}

const uint64_t* meet(unsigned mask, uint64_t value, const void* at, bool orders_memory) {
  const Emulating emulating;
  Meeting& here = meeting(mask);
  const unsigned turn = here.barrier.turn % 2, warp = threadIdx.x / 32;
  here.values[turn][threadIdx.x % 32] = value;
  here.at[turn][threadIdx.x % 32] = at;
  wait(here.barrier, [&] {
    if (orders_memory) observer->lanes_met(warp, mask);
    for (unsigned lane = 0; lane < 32 && warp * 32 + lane < blockDim.x; ++lane)
      if (mask >> lane & 1 && here.at[turn][lane] != at)
        return observer->lanes_met_elsewhere(at, here.at[turn][lane]);
  });
  return here.values[turn];
}

void atomic(void* address, size_t bytes, const void* at) {
  const Emulating emulating;
  ++atomics;
  observer->atomic(address, bytes, at);
}

void* allocate(size_t bytes) {
  const size_t room = (bytes + 1024) / 1024 * 1024;
  void* base = std::aligned_alloc(1024, room);
  std::memset(base, kNoise, room);
  observer->allocated(base, bytes);
  return base;
}

void release(void* pointer) {
  observer->released(pointer);
  std::free(pointer);
}

void fill(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  observer->written(to, bytes, value != kNoise);
}

void copy(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  observer->written(to, bytes, true);
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace cuda_on_cpu

using cuda_on_cpu::meet;
using cuda_on_cpu::observer;

void __syncthreads() {
  cuda_on_cpu::wait(cuda_on_cpu::block_barrier, [] { observer->block_met(); });
}

void __syncwarp(unsigned mask) { meet(mask, 0, __builtin_return_address(0), true); }

void __threadfence() {
  const cuda_on_cpu::Emulating emulating;
  observer->fence();
}

namespace {

unsigned ballot(unsigned mask, bool predicate, const void* at) {
  const uint64_t* values = meet(mask, predicate, at, false);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && values[lane] == 1) bits |= 1u << lane;
  return bits;
}

}  // namespace

unsigned __ballot_sync(unsigned mask, bool predicate) {
  return ballot(mask, predicate, __builtin_return_address(0));
}

bool __any_sync(unsigned mask, bool predicate) {
  return ballot(mask, predicate, __builtin_return_address(0)) != 0;
}

bool __all_sync(unsigned mask, bool predicate) {
  return ballot(mask, !predicate, __builtin_return_address(0)) == 0;
}
