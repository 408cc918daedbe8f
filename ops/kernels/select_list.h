// The entries that reached the predicted threshold: six bytes each, in one pool that all threads
// fill.
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
      : capacity_(capacity),
        positions_(new uint16_t[capacity]),
        values_(new float[capacity]),
        start_(tiles),
        length_(tiles) {}

  // Room for the tile's candidates; each tile once, from any thread. False if none remains: then
  // the list is not complete.
  bool reserve(int64_t tile, uint32_t count) {
    const int64_t start = used_.fetch_add(count, std::memory_order_relaxed);
    if (start + count > capacity_) return false;
    start_[tile] = static_cast<uint32_t>(start);
    length_[tile] = static_cast<uint16_t>(count);
    return true;
  }

  bool complete() const { return used_ <= capacity_; }
  int64_t size() const { return used_; }
  uint32_t length(int64_t tile) const { return length_[tile]; }
  // In the tile, ascending.
  uint16_t* positions(int64_t tile) { return positions_.get() + start_[tile]; }
  float* values(int64_t tile) { return values_.get() + start_[tile]; }

 private:
  const int64_t capacity_;
  std::atomic<int64_t> used_{0};
  std::unique_ptr<uint16_t[]> positions_;
  std::unique_ptr<float[]> values_;
  std::vector<uint32_t> start_;   // by tile, in the pool
  std::vector<uint16_t> length_;  // by tile
};

}  // namespace tfcommx
