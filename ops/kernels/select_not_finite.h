// The entries that are NaN or infinite, met in any order by any thread: how many, and which k have
// the lowest indices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

namespace tfcommx {

class NotFinite {
 public:
  explicit NotFinite(int64_t k) : k_(k) {}

  // positions: ascending, relative to base. Rare: only then is a lock taken, so a healthy gradient
  // pays nothing.
  void add(int64_t base, const uint16_t* positions, uint32_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint32_t j = 0; j < count; ++j) {
      const int32_t index = static_cast<int32_t>(base + positions[j]);
      if (static_cast<int64_t>(lowest_.size()) == k_) {
        if (k_ == 0 || index > lowest_.front()) break;  // so are all that follow
        std::pop_heap(lowest_.begin(), lowest_.end());
        lowest_.pop_back();
      }
      lowest_.push_back(index);
      std::push_heap(lowest_.begin(), lowest_.end());
    }
    count_ += count;
  }

  // The chosen ones, ascending; after the last add.
  const std::vector<int32_t>& sorted() {
    std::sort_heap(lowest_.begin(), lowest_.end());
    return lowest_;
  }

  int64_t count() const { return count_; }

  // After sorted(), if count() <= k: then all are known.
  bool contains(int64_t index) const {
    return !lowest_.empty() &&
           std::binary_search(lowest_.begin(), lowest_.end(), static_cast<int32_t>(index));
  }

  // Likewise: writes those in [first, last), relative to first; returns how many.
  uint32_t within(int64_t first, int64_t last, uint16_t* positions) const {
    uint32_t count = 0;
    for (auto i = std::lower_bound(lowest_.begin(), lowest_.end(), first);
         i != lowest_.end() && *i < last; ++i)
      positions[count++] = static_cast<uint16_t>(*i - first);
    return count;
  }

 private:
  const int64_t k_;
  std::mutex mutex_;
  std::vector<int32_t> lowest_;  // a heap, the highest index in front, until sorted() is called
  int64_t count_ = 0;
};

}  // namespace tfcommx
