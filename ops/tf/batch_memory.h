// Memory of large outputs, used again. The kernel clears fresh pages one fault at a time, which costs several times what
// the pixels of a batch do.
#pragma once

#include <sys/mman.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensorflow/core/framework/allocator.h"

namespace tfcommx {

class BatchMemory : public tensorflow::Allocator {
 public:
  static constexpr size_t kLeast = 1 << 20;  // bytes; what is smaller, malloc keeps

  // Lives for ever: tensors may outlive all else.
  static BatchMemory* instance() {
    static BatchMemory* const memory = new BatchMemory;
    return memory;
  }

  std::string Name() override { return "tfcommx_batches"; }

  void* AllocateRaw(size_t alignment, size_t bytes) override {  // pages are aligned enough for all that TensorFlow asks
    const size_t size = (bytes + kPage - 1) / kPage * kPage;
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = spare_.size(); i-- > 0;) {  // the latest first: its pages may be in a cache
      if (spare_[i].size < size || spare_[i].size > 2 * size) continue;
      const Block block = spare_[i];
      spare_.erase(spare_.begin() + i);
      used_[block.at] = block.size;
      return block.at;
    }
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    madvise(at, size, MADV_HUGEPAGE);  // advice: nothing is lost where it is not taken
    used_[at] = size;
    return at;
  }

  void DeallocateRaw(void* at) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(at);
    spare_.push_back({at, found->second});
    used_.erase(found);
    if (spare_.size() > kSpare) {
      munmap(spare_[0].at, spare_[0].size);
      spare_.erase(spare_.begin());
    }
  }

 private:
  struct Block {
    void* at;
    size_t size;
  };
  static constexpr size_t kPage = 4096;
  static constexpr size_t kSpare = 8;  // batches; more are rarely on their way at once, and a new size pushes the old ones out

  std::mutex mutex_;
  std::vector<Block> spare_;
  std::unordered_map<void*, size_t> used_;
};

}  // namespace tfcommx
