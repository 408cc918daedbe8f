// Checks every access of kernels on the emulated GPU; README.md beside this says what is reported.
// The compiler puts a call before each access in kernels (-fsanitize=thread; libtsan is not linked).
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <set>
#include <tuple>

#include "../cuda_on_cpu/cuda_runtime.h"
#include "../cuda_on_cpu/observer.h"
#include "clocks.h"
#include "shadow.h"

extern char __data_start, _end;  // static data: the kernels' __shared__ variables are there

namespace cuda_race {
namespace {

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// The program is linked at fixed addresses, which addr2line takes as they are. The call lies before
// the address to which it returns.
uint32_t pc_of(const void* at) { return static_cast<uint32_t>(number(at)) - 1; }

bool is_static(uintptr_t address) {
  return address >= number(&__data_start) && address < number(&_end);
}

// threadIdx and others: each thread has a copy, in registers. `flushed` reads whether a kernel runs.
bool is_register(uintptr_t address) {
  if (address == number(&cuda_on_cpu::in_kernel)) return true;
  for (const Place* place : {&threadIdx, &blockIdx, &blockDim, &gridDim})
    if (address - number(place) < sizeof *place) return true;
  return false;
}

class Checker : public cuda_on_cpu::Observer {
 public:
  Checker() {
    cuda_on_cpu::observer = this;
    pthread_attr_t attributes;
    void* low = nullptr;
    size_t bytes = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &low, &bytes);
    pthread_attr_destroy(&attributes);
    host_stack_ = number(low);
    host_stack_end_ = host_stack_ + bytes;
  }

  ~Checker() override {
    std::fprintf(stderr, "cuda_race: %zu findings in %u launches, %u blocks\n", said_.size(),
                 clocks_.launch(), clocks_.block());
    std::fflush(stdout);
    if (!said_.empty()) _exit(4);
  }

  void kernel_begins() override { clocks_.kernel_begins(); }
  void block_begins(unsigned threads) override { clocks_.block_begins(threads); }
  void block_met() override { clocks_.block_met(); }
  void lanes_met(unsigned warp, unsigned mask) override { clocks_.lanes_met(warp, mask); }
  void fence() override { clocks_.fence(threadIdx.x); }

  void lanes_met_elsewhere(const void* at, const void* other) override {
    Stamp stamp = clocks_.stamp(threadIdx.x, pc_of(other), false);
    report("lanes meet at different intrinsics", 0, pc_of(at), &stamp);
  }

  void atomic(const void* address, size_t bytes, const void* at) override {
    accessed(number(address), bytes, true, true, at);
    if (!is_static(number(address))) clocks_.atomic(threadIdx.x, number(address));
  }

  void allocated(const void* base, size_t bytes) override {
    arrays_[number(base)] = bytes;
    shadow_.each(number(base), (bytes + 3) / 4 * 4, [](Cell& cell, uintptr_t) { cell = {}; });
  }
  void released(const void* base) override {
    arrays_.erase(number(base));
    last_array_ = last_bytes_ = 0;
  }
  void written(const void* base, size_t bytes, bool content) override {
    if (!in_array(number(base), bytes)) return;  // a copy to the host
    shadow_.each(number(base), bytes, [&](Cell& cell, uintptr_t) {
      cell = {};
      cell.content = content;
    });
  }

  void accessed(uintptr_t address, size_t bytes, bool write, bool atomic, const void* at) {
    if (address - number(cuda_on_cpu::stack()) < cuda_on_cpu::kStack) return;  // a variable
    const bool shared = is_static(address);
    if (shared && is_register(address)) return;
    const uint32_t pc = pc_of(at);
    if (!shared && !in_array(address, bytes)) {
      // Arguments of the launch are on the host's stack, constants in the program
      const bool argument = address >= host_stack_ && address < host_stack_end_;
      if (write || !(argument || address < number(&__data_start)))
        report("access outside of device memory", address, pc, nullptr);
      return;
    }
    const Stamp now = clocks_.stamp(threadIdx.x, pc, atomic);
    const auto ordered = [&](const Stamp& before) {
      return !before.launch || clocks_.ordered(before, threadIdx.x, shared);
    };
    shadow_.each(address, bytes, [&](Cell& cell, uintptr_t place) {
      const bool content = shared ? cell.write.block == clocks_.block() : cell.content;
      if ((!write || atomic) && !content)
        report("read of memory that nothing wrote", place, pc, nullptr);
      if (!(atomic && cell.write.atomic) && !ordered(cell.write))
        report(write ? "write races with a write" : "read races with a write", place, pc,
               &cell.write);
      if (write) {
        for (const Stamp& read : cell.reads)
          if (!ordered(read)) report("write races with a read", place, pc, &read);
        cell = {now, {}, true};
      } else {
        cell.reads[ordered(cell.reads[0]) ? 0 : 1] = now;
      }
    });
  }

  void aligned(uintptr_t address, size_t bytes, const void* at) {
    if (address % bytes) report("misaligned access", address, pc_of(at), nullptr);
  }

 private:
  bool in_array(uintptr_t address, size_t bytes) {
    if (address - last_array_ >= last_bytes_) {
      const auto next = arrays_.upper_bound(address);
      if (next == arrays_.begin()) return false;
      std::tie(last_array_, last_bytes_) = *std::prev(next);
    }
    return address - last_array_ <= last_bytes_ && bytes <= last_bytes_ - (address - last_array_);
  }

  // Each pair of places once.
  void report(const char* what, uintptr_t address, uint32_t pc, const Stamp* other) {
    if (!said_.insert({what, pc, other ? other->pc : 0}).second) return;
    const char* memory = !address ? "no" : is_static(address) ? "shared" : "device";
    std::fprintf(stderr, "cuda_race: %s, %s memory; block %u thread %u at 0x%x", what, memory,
                 blockIdx.x, threadIdx.x, pc);
    if (other)
      std::fprintf(stderr, "; against %s block's thread %u at 0x%x",
                   other->block == clocks_.block() ? "the same" : "another", other->thread,
                   other->pc);
    std::fprintf(stderr, "\n");
  }

  Clocks clocks_;
  Shadow shadow_;
  std::map<uintptr_t, size_t> arrays_;  // of device memory: base, bytes
  uintptr_t last_array_ = 0;
  size_t last_bytes_ = 0;
  uintptr_t host_stack_, host_stack_end_;
  std::set<std::tuple<const char*, uint32_t, uint32_t>> said_;
};

Checker checker;

void accessed(const void* address, size_t bytes, bool write, bool aligned, const void* at) {
  if (!cuda_on_cpu::in_kernel) return;
  cuda_on_cpu::in_kernel = false;  // functions of the library that kernels use too have calls
  if (aligned) checker.aligned(number(address), bytes < 8 ? bytes : 8, at);
  checker.accessed(number(address), bytes, write, false, at);
  cuda_on_cpu::in_kernel = true;
}

}  // namespace
}  // namespace cuda_race

// What the compiler calls. Accesses that it calls unaligned are copies of bytes, which nvcc makes
// byte by byte where it must.
extern "C" {
#define HOOKS(BYTES)                                                          \
  void __tsan_read##BYTES(void* p) {                                          \
    cuda_race::accessed(p, BYTES, false, true, __builtin_return_address(0));  \
  }                                                                           \
  void __tsan_write##BYTES(void* p) {                                         \
    cuda_race::accessed(p, BYTES, true, true, __builtin_return_address(0));   \
  }                                                                           \
  void __tsan_unaligned_read##BYTES(void* p) {                                \
    cuda_race::accessed(p, BYTES, false, false, __builtin_return_address(0)); \
  }                                                                           \
  void __tsan_unaligned_write##BYTES(void* p) {                               \
    cuda_race::accessed(p, BYTES, true, false, __builtin_return_address(0));  \
  }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t bytes) {
  cuda_race::accessed(p, bytes, false, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t bytes) {
  cuda_race::accessed(p, bytes, true, false, __builtin_return_address(0));
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
