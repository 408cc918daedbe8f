// How the kernels get their threads: whoever calls them brings a loop that may run its turns side
// by side.
#pragma once

#include <cstdint>
#include <functional>

namespace tfcommx {

// Calls body(0) ... body(turns - 1), in any order and on any threads, and returns when all are
// done.
using ParallelFor = std::function<void(int64_t turns, const std::function<void(int64_t)>& body)>;

}  // namespace tfcommx
