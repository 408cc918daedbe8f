// TensorFlow's threads as the kernels' ParallelFor, for work that is short or uneven.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/synchronization/notification.h"
#include "kernels/parallel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace tfcommx {

// The caller takes turns too, and whoever is free takes the next. ThreadPool::ParallelFor hands all
// turns to the pool, in fixed halves: a thread that wakes up late, or on the caller's own core,
// then delays a whole half.
inline ParallelFor shared_with_pool(tensorflow::OpKernelContext* context) {
  tensorflow::thread::ThreadPool* pool =
      context->device()->tensorflow_cpu_worker_threads()->workers;
  return [pool](int64_t turns, const std::function<void(int64_t)>& body) {
    struct Work {
      // Used by who has a turn only: until all turns are done the caller waits.
      const std::function<void(int64_t)>& body;
      const int64_t turns;
      std::atomic<int64_t> next{0}, done{0};
      absl::Notification all_done;

      Work(const std::function<void(int64_t)>& body, int64_t turns) : body(body), turns(turns) {}
      void take_turns() {
        for (int64_t turn; (turn = next++) < turns;) {
          body(turn);
          if (++done == turns) all_done.Notify();
        }
      }
    };
    if (turns == 0) return;
    // A helper that wakes up too late finds it, and no turn in it.
    const auto work = std::make_shared<Work>(body, turns);
    const int64_t helpers = std::min<int64_t>(pool->NumThreads(), turns) - 1;
    for (int64_t i = 0; i < helpers; ++i) pool->Schedule([work] { work->take_turns(); });
    work->take_turns();
    work->all_done.WaitForNotification();
  };
}

}  // namespace tfcommx
