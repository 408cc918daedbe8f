// Merging on CPUs: each turn owns a stretch of the dense vector, and adds from the whole list what
// falls into it. So every entry's sum is made by one thread in list order, and no lock, sort or
// copy is needed.
#include "kernels/merge.h"

#include <algorithm>

namespace tfcommx {

int64_t merge_cpu(const Merge& merge, const ParallelFor& parallel_for) {
  constexpr int64_t kStretch = 1 << 18;  // entries; below that, sharing costs more than it saves
  const int64_t turns = std::clamp<int64_t>(merge.n / kStretch, 1, 16);
  int64_t outside = -1;
  parallel_for(turns, [&](int64_t turn) {
    const int64_t first = merge.n * turn / turns, last = merge.n * (turn + 1) / turns;
    std::fill(merge.dense + first, merge.dense + last, 0.0f);
    for (int64_t j = 0; j < merge.pairs; ++j) {
      const int64_t index = merge.indices[j];
      if (index >= first && index < last) {
        merge.dense[index] += merge.values[j];
      } else if (turn == 0 && (index < 0 || index >= merge.n)) {
        outside = j;
        return;
      }
    }
  });
  return outside;
}

}  // namespace tfcommx
