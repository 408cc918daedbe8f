// Memory of large outputs, used again. The kernel clears fresh pages one fault at a time, which
// costs several times what the pixels of a batch do.
//
// Spare memory is bounded, and while no User is alive the kernel may take its pages wherever it is
// short of them. Where this process uses a GPU the pages are locked for it until then.
#pragma once

#include <sys/mman.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensorflow/core/framework/allocator.h"
#include "tf/page_lock.h"

namespace tfcommx {

class BatchMemory : public tensorflow::Allocator {
 public:
  static constexpr size_t kLeast = 1 << 20;  // bytes; what is smaller, malloc keeps
  // Bytes, or one block; a new size of batches pushes the old ones out.
  static constexpr size_t kSpare = 256 << 20;

  // Lives for ever: tensors may outlive all else.
  static BatchMemory* instance() {
    static BatchMemory* const memory = new BatchMemory;
    return memory;
  }

  // Whoever is going to ask for batches: an op of a pipeline that is there.
  class User {
   public:
    User() { instance()->count_users(1); }
    ~User() { instance()->count_users(-1); }
    User(const User&) = delete;
    User& operator=(const User&) = delete;
  };

  std::string Name() override { return "tfcommx_batches"; }

  // No huge pages: a virtual machine has to ask its host for each, at a seventh of the rate, and
  // batches are no faster in them. pages are aligned enough for all that TensorFlow asks
  void* AllocateRaw(size_t alignment, size_t bytes) override {
    Block block = take((bytes + kPage - 1) / kPage * kPage);
    if (block.at == nullptr) return nullptr;
    if (!block.locked) block.locked = PageLock::lock(block.at, block.size);
    std::lock_guard<std::mutex> lock(mutex_);
    used_[block.at] = block;
    return block.at;
  }

  void DeallocateRaw(void* at) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(at);
    spare_.push_back(found->second);
    used_.erase(found);
    spare_bytes_ += spare_.back().size;
    if (users_ == 0) offer(&spare_.back());
    while (spare_bytes_ > kSpare && spare_.size() > 1 && unlocked(&spare_[0])) {
      munmap(spare_[0].at, spare_[0].size);
      spare_bytes_ -= spare_[0].size;
      spare_.erase(spare_.begin());
    }
  }

 private:
  struct Block {
    void* at;
    size_t size;
    bool locked;
  };
  static constexpr size_t kPage = 4096;

  // Spare memory, or else fresh; at: null if there is none.
  Block take(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = spare_.size(); i-- > 0;) {  // the latest first: its pages may be in a cache
      if (spare_[i].size < size || spare_[i].size > 2 * size) continue;
      const Block block = spare_[i];
      spare_.erase(spare_.begin() + i);
      spare_bytes_ -= block.size;
      return block;
    }
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return {at == MAP_FAILED ? nullptr : at, size, false};
  }

  void count_users(int change) {
    std::lock_guard<std::mutex> lock(mutex_);
    users_ += change;
    if (users_ > 0) return;
    for (Block& block : spare_) offer(&block);
  }

  // True if the block's pages may be given back. Under a lock a GPU would go on reading those that
  // were there.
  static bool unlocked(Block* block) {
    if (block->locked) block->locked = !PageLock::unlock(block->at);
    return !block->locked;
  }

  // Not unmapped: the pipeline of the next epoch will probably want it, and has it for nothing
  // if memory was not short.
  static void offer(Block* block) {
    if (unlocked(block)) madvise(block->at, block->size, MADV_FREE);
  }

  std::mutex mutex_;
  std::vector<Block> spare_;
  size_t spare_bytes_ = 0;
  int users_ = 0;
  std::unordered_map<void*, Block> used_;
};

}  // namespace tfcommx
