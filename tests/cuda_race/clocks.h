// What threads know of each other's accesses: the part of CUDA's memory model that kernels here use.
//
// In a block, __syncthreads orders all accesses before it with all after it, and __syncwarp those of
// the lanes of its mask. Shuffles and ballots order none. Between blocks of a launch an access is
// ordered by fence, atomic operation, and then, in who reads the atomic's value, a fence. Barriers
// and __syncwarp hand on both: what a thread has fenced, and what it has learnt of other blocks.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

namespace cuda_race {

// When something was accessed, and by which thread.
struct Stamp {
  uint32_t launch = 0;  // 0: never
  uint32_t block = 0;   // number of a block that ran, over all launches
  uint32_t pc = 0;      // of the access
  uint16_t thread = 0;
  uint16_t barriers = 0;  // __syncthreads of the block before
  uint16_t syncs = 0;     // __syncwarp of the thread before
  uint16_t fences = 0;    // of the thread before
  bool atomic = false;
};

// How much of a block is visible: accesses before one of these numbers of barriers, __syncwarps or
// fences.
struct Visible {
  uint16_t barriers = 0;
  std::vector<uint16_t> syncs, fences;  // by thread

  bool has(const Stamp& access) const {
    return access.barriers < barriers || access.syncs < syncs[access.thread] ||
           access.fences < fences[access.thread];
  }
};

// Blocks of which something is visible. Shared by all who know the same, because a barrier gives all
// threads of a block one clock.
using Clock = std::shared_ptr<const std::map<uint32_t, Visible>>;

inline void raise(std::vector<uint16_t>& mine, const std::vector<uint16_t>& other) {
  if (mine.size() < other.size()) mine.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) mine[i] = std::max(mine[i], other[i]);
}

inline Clock both(const Clock& a, const Clock& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  auto result = std::make_shared<std::map<uint32_t, Visible>>(*a);
  for (const auto& [block, visible] : *b) {
    Visible& mine = (*result)[block];
    mine.barriers = std::max(mine.barriers, visible.barriers);
    raise(mine.syncs, visible.syncs);
    raise(mine.fences, visible.fences);
  }
  return result;
}

// What a running thread knows.
struct Thread {
  // By lane: __syncwarps of it that are ordered before this thread; its own are the count
  std::array<uint16_t, 32> syncs{};
  uint16_t fences = 0;
  std::array<uint16_t, 32> fences_of_lanes{};  // as a __syncwarp has told
  // At its last fence: all that was visible to it, which its atomics hand on
  uint16_t fenced_barriers = 0;
  std::array<uint16_t, 32> fenced_syncs{};
  Clock fenced;
  Clock seen, acquired;  // in values of atomics; and since a fence after them
};

class Clocks {
 public:
  void kernel_begins() {
    ++launch_;
    published_.clear();
  }

  void block_begins(unsigned threads) {
    ++block_;
    barriers_ = 0;
    threads_.assign(threads, {});
    fences_at_barrier_.assign(threads, 0);
  }

  Stamp stamp(unsigned thread, uint32_t pc, bool atomic) const {
    const Thread& mine = threads_[thread];
    return {
        launch_,     block_, pc, static_cast<uint16_t>(thread), barriers_, mine.syncs[thread % 32],
        mine.fences, atomic};
  }

  // Did `before` happen before what this thread does now?
  bool ordered(const Stamp& before, unsigned thread, bool shared_memory) const {
    if (before.launch != launch_) return true;  // kernels of a stream follow each other
    const Thread& mine = threads_[thread];
    if (before.block == block_)
      return before.thread == thread || before.barriers < barriers_ ||
             (before.thread / 32 == thread / 32 && before.syncs < mine.syncs[before.thread % 32]);
    if (shared_memory) return true;  // another block has a copy of its own
    if (!mine.acquired) return false;
    const auto visible = mine.acquired->find(before.block);
    return visible != mine.acquired->end() && visible->second.has(before);
  }

  void block_met() {
    count(barriers_);
    Clock seen, acquired;
    for (size_t i = 0; i < threads_.size(); ++i) {
      seen = both(seen, threads_[i].seen);
      acquired = both(acquired, threads_[i].acquired);
      fences_at_barrier_[i] = threads_[i].fences;
    }
    for (Thread& thread : threads_) thread.seen = seen, thread.acquired = acquired;
  }

  void lanes_met(unsigned warp, unsigned mask) {
    Thread all;
    const unsigned first = warp * 32;
    for (unsigned lane = 0; lane < 32 && first + lane < threads_.size(); ++lane) {
      if (!(mask >> lane & 1)) continue;
      Thread& thread = threads_[first + lane];
      count(thread.syncs[lane]);
      thread.fences_of_lanes[lane] = thread.fences;
      for (int other = 0; other < 32; ++other) {
        all.syncs[other] = std::max(all.syncs[other], thread.syncs[other]);
        all.fences_of_lanes[other] =
            std::max(all.fences_of_lanes[other], thread.fences_of_lanes[other]);
      }
      all.seen = both(all.seen, thread.seen);
      all.acquired = both(all.acquired, thread.acquired);
    }
    for (unsigned lane = 0; lane < 32 && first + lane < threads_.size(); ++lane) {
      if (!(mask >> lane & 1)) continue;
      Thread& thread = threads_[first + lane];
      thread.syncs = all.syncs;
      thread.fences_of_lanes = all.fences_of_lanes;
      thread.seen = all.seen;
      thread.acquired = all.acquired;
    }
  }

  void fence(unsigned thread) {
    Thread& mine = threads_[thread];
    count(mine.fences);
    mine.acquired = both(mine.acquired, mine.seen);
    mine.fenced_barriers = barriers_;
    mine.fenced_syncs = mine.syncs;
    mine.fenced = mine.acquired;
  }

  // The thread reads and writes an atomic of device memory.
  void atomic(unsigned thread, uintptr_t address) {
    Thread& mine = threads_[thread];
    const auto published = published_.find(address);
    if (published != published_.end()) mine.seen = both(mine.seen, published->second);
    const unsigned first = thread / 32 * 32;
    Visible visible{mine.fenced_barriers, std::vector<uint16_t>(threads_.size()),
                    fences_at_barrier_};
    bool any = mine.fences > 0;
    for (unsigned lane = 0; lane < 32 && first + lane < threads_.size(); ++lane) {
      visible.syncs[first + lane] = mine.fenced_syncs[lane];
      uint16_t& fences = visible.fences[first + lane];
      fences = std::max(fences, mine.fences_of_lanes[lane]);
    }
    visible.fences[thread] = mine.fences;
    for (const uint16_t fences : visible.fences) any = any || fences;
    if (!any) return;
    Clock mine_now = std::make_shared<std::map<uint32_t, Visible>>(
        std::map<uint32_t, Visible>{{block_, visible}});
    Clock& here = published_[address];
    here = both(here, both(mine.fenced, mine_now));
  }

  uint32_t block() const { return block_; }
  uint32_t launch() const { return launch_; }
  uint16_t barriers() const { return barriers_; }

 private:
  static void count(uint16_t& number) {
    if (++number == 0) {
      std::fprintf(stderr, "cuda_race: a thread met others 65,536 times: use smaller cases\n");
      std::_Exit(3);
    }
  }

  uint32_t launch_ = 0, block_ = 0;
  uint16_t barriers_ = 0;  // of the running block
  std::vector<Thread> threads_;
  std::vector<uint16_t> fences_at_barrier_;
  std::map<uintptr_t, Clock> published_;  // by atomic
};

}  // namespace cuda_race
