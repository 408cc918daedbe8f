// The entries that reached the predicted threshold: two bytes each, in one pool that all threads fill.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace tfcommx {

class CandidateList {
 public:
  CandidateList(int64_t tiles, int64_t capacity)
      : capacity_(capacity), pool_(new uint16_t[capacity]), start_(tiles), length_(tiles) {}

  // Each tile once, from any thread. What does not fit is dropped, and complete() turns false.
  void put(int64_t tile, const uint16_t* positions, uint32_t count) {
    const int64_t start = used_.fetch_add(count, std::memory_order_relaxed);
    if (start + count > capacity_) return;
    std::copy(positions, positions + count, pool_.get() + start);
    start_[tile] = static_cast<uint32_t>(start);
    length_[tile] = static_cast<uint16_t>(count);
  }

  bool complete() const { return used_ <= capacity_; }
  int64_t size() const { return used_; }
  const uint16_t* positions(int64_t tile) const { return pool_.get() + start_[tile]; }
  uint32_t length(int64_t tile) const { return length_[tile]; }

 private:
  const int64_t capacity_;
  std::atomic<int64_t> used_{0};
  std::unique_ptr<uint16_t[]> pool_;  // positions within their tile
  std::vector<uint32_t> start_;       // by tile, in the pool
  std::vector<uint16_t> length_;      // by tile
};

}  // namespace tfcommx
