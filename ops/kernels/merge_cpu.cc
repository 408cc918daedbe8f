// Merging on CPUs: each turn owns a stretch of the dense vector, and adds what falls into it, run by
// run. So every entry's sum is made by one thread in list order, and no lock, sort or copy is needed.
#include "kernels/merge.h"

#include <algorithm>

#include "kernels/clones.h"
#include "kernels/flush_denormals.h"

namespace tfcommx {
namespace {

// Entries; below that, sharing costs more than it saves.
constexpr int64_t kStretch = 1 << 18;

// Whether indices are in [0, n), each above the one before it.
TFCOMMX_CLONES
bool ascend(const int32_t* indices, int64_t count, int64_t n) {
  int wrong = indices[0] < 0 || indices[count - 1] >= n;
  for (int64_t j = 1; j < count; ++j) wrong |= indices[j] <= indices[j - 1];
  return !wrong;
}

// What a rule selects is ascending. Then a stretch is a part of each run, which is found by halving.
bool all_ascend(const Merge& merge, int64_t run) {
  if (run == 0) return false;
  for (int64_t start = 0; start < merge.pairs; start += run)
    if (!ascend(merge.indices + start, run, merge.n)) return false;
  return true;
}

void add_parts(const Merge& merge, int64_t run, int64_t first, int64_t last) {
  const int32_t* const end = merge.indices + merge.pairs;
  for (const int32_t* start = merge.indices; start < end; start += run) {
    const int32_t* index = std::lower_bound(start, start + run, first);
    const int32_t* const stop = std::lower_bound(index, start + run, last);
    for (const float* value = merge.values + (index - merge.indices); index < stop; ++index)
      merge.dense[*index] += *value++;
  }
}

// Reads the whole list. Returns the position of the first index outside [0, n), or -1.
int64_t add_any(const Merge& merge, int64_t first, int64_t last) {
  for (int64_t j = 0; j < merge.pairs; ++j) {
    const int64_t index = merge.indices[j];
    if (index >= first && index < last)
      merge.dense[index] += merge.values[j];
    else if (index < 0 || index >= merge.n)
      return j;
  }
  return -1;
}

}  // namespace

int64_t merge_cpu(const Merge& merge, int64_t run, const ParallelFor& parallel_for) {
  const int64_t turns = std::clamp<int64_t>(merge.n / kStretch, 1, 16);
  const bool ascending = all_ascend(merge, run);
  int64_t outside = -1;
  parallel_for(turns, [&](int64_t turn) {
    const FlushDenormals flush;
    const int64_t first = merge.n * turn / turns, last = merge.n * (turn + 1) / turns;
    std::fill(merge.dense + first, merge.dense + last, 0.0f);
    if (ascending) return add_parts(merge, run, first, last);
    const int64_t found = add_any(merge, first, last);
    // Each turn reads the whole list, and finds the same
    if (turn == 0) outside = found;
  });
  return outside;
}

}  // namespace tfcommx
