// What the emulator tells of a run: tests/cuda_race checks it.
#pragma once

#include <cstddef>

namespace cuda_on_cpu {

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void kernel_begins() {}
  virtual void block_begins(unsigned /*threads*/) {}
  virtual void block_met() {}  // all threads have reached a __syncthreads
  // All lanes of the mask have reached a __syncwarp.
  virtual void lanes_met(unsigned /*warp*/, unsigned /*mask*/) {}
  // The running lane has called an intrinsic at one address, and another of its mask elsewhere.
  virtual void lanes_met_elsewhere(const void* /*at*/, const void* /*other*/) {}
  virtual void fence() {}  // of the running thread
  virtual void atomic(const void* /*address*/, size_t /*bytes*/, const void* /*at*/) {}
  virtual void allocated(const void* /*base*/, size_t /*bytes*/) {}
  virtual void released(const void* /*base*/) {}
  // By the host; content: it means something, and is not noise.
  virtual void written(const void* /*base*/, size_t /*bytes*/, bool /*content*/) {}
};

extern Observer* observer;
extern bool in_kernel;  // false while the emulator or the host runs

constexpr size_t kStack = 256 * 1024;  // bytes, of a thread
const char* stack();                   // the running thread's

constexpr int kNoise = 0xa5;  // device memory that nothing has written

}  // namespace cuda_on_cpu
