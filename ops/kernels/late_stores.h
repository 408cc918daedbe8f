// Stores to scattered addresses, each of which is a cache miss: the line is asked for now, and
// written when it is likely to have come.
#pragma once

#include <array>
#include <cstddef>

namespace tfcommx {

// What was put is in memory once the object is gone.
class LateStores {
 public:
  LateStores() { slots_.fill({&nowhere_, 0}); }
  LateStores(const LateStores&) = delete;
  LateStores& operator=(const LateStores&) = delete;
  ~LateStores() {
    for (const Slot& slot : slots_) *slot.to = slot.value;
  }

  // Each address once.
  void put(float* to, float value) {
    __builtin_prefetch(to, 1);
    Slot& slot = slots_[next_++ % slots_.size()];
    *slot.to = slot.value;
    slot = {to, value};
  }

 private:
  struct Slot {
    float* to;
    float value;
  };
  std::array<Slot, 32> slots_;
  std::size_t next_ = 0;
  float nowhere_ = 0;
};

}  // namespace tfcommx
