// Prediction of a threshold from a sample of the magnitudes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/random.h"
#include "kernels/select_scan.h"

namespace tfcommx {

struct Prediction {
  uint32_t key = 0;   // almost surely at least k entries reach it, and few more
  double reached = 0; // the number of entries that should
};

// value(i): acc of entry i. Runs of eight neighbours are drawn (they share a cache line), one from each of equally long
// stretches, at random: no order of the entries can mislead the sample more than rarely. The margin is three standard
// deviations of the number of drawn entries that reach the threshold.
template <class Value, class Each>
Prediction predict(int64_t n, int64_t k, uint64_t seed, const Value& value, const Each& each) {
  constexpr int64_t kRun = 8, kTurns = 16;
  constexpr int kShift = 16;
  const int64_t runs = std::clamp<int64_t>(n / (32 * kRun), 8, 16384), stretch = n / kRun / runs, samples = runs * kRun;
  if (stretch == 0) return {};
  std::vector<uint16_t> drawn(samples);
  each(kTurns, [&](int64_t turn) {
    for (int64_t run = runs * turn / kTurns; run < runs * (turn + 1) / kTurns; ++run) {
      const int64_t first = (run * stretch + below(seed + run, stretch)) * kRun;
      for (int64_t j = 0; j < kRun; ++j) {
        const uint32_t key = key_of(value(first + j));
        drawn[run * kRun + j] = static_cast<uint16_t>(key < kNotFinite ? key >> kShift : 0);
      }
    }
  });
  std::vector<uint32_t> counts(kNotFinite >> kShift);
  for (const uint16_t bin : drawn) ++counts[bin];
  const double expected = static_cast<double>(samples) * k / n;
  const int64_t rank = static_cast<int64_t>(expected + 3 * std::sqrt(expected) + 3);
  if (rank >= samples) return {};
  uint32_t bin = static_cast<uint32_t>(counts.size());
  int64_t reached = 0;
  while (reached < rank) reached += counts[--bin];
  return {bin << kShift, static_cast<double>(reached) * n / samples};
}

}  // namespace tfcommx
