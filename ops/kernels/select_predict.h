// Prediction, from a sample of the magnitudes, of the keys between which the k-th largest lies.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/random.h"
#include "kernels/select_scan.h"

namespace tfcommx {

struct Window {
  uint32_t lower = 0, upper = kNotFinite;  // almost surely the k-th largest key lies between them; both are starts of bands
  double reached = 0;                      // at most so many entries reach lower, almost surely
  double between = 0;                      // and so many lie strictly between the bands of lower and upper
};

// value(i): acc of entry i, of which NaN and infinities count as the largest; fetch(i): brings it to the cache.
// Runs of eight neighbours are drawn (they share a cache line), one from each of equally long stretches, at random: no order
// of the entries can mislead the sample more than rarely. Margins are `width` standard deviations of the number of drawn
// entries above, with neighbours as alike as the sample shows them. A band leaves `open` bits of a key open.
// Cost: n / 32 entries read, at most 131,072. n >= 4096.
template <class Value, class Fetch, class Each>
Window predict(int64_t n, int64_t k, uint64_t seed, double width, int open, const Value& value, const Fetch& fetch, const Each& each) {
  constexpr int64_t kRun = 8, kAhead = 16, kTurns = 8, kBins = 2048;
  constexpr int kShift = 20;
  const int64_t runs = std::min<int64_t>(n / (32 * kRun), 16384), stretch = n / kRun / runs, samples = runs * kRun;
  const double expected = static_cast<double>(samples) * k / n, scale = static_cast<double>(n) / samples;

  std::vector<uint32_t> keys(samples), counts(kTurns * kBins);
  each(kTurns, [&](int64_t turn) {
    const auto first_of = [=](int64_t run) { return (run * stretch + below(seed + run, stretch)) * kRun; };
    const int64_t end = runs * (turn + 1) / kTurns;
    for (int64_t run = runs * turn / kTurns; run < end; ++run) {
      if (run + kAhead < end) fetch(first_of(run + kAhead));  // every run is a cache miss: have several under way
      const int64_t first = first_of(run);
      for (int64_t j = 0; j < kRun; ++j) {
        const uint32_t key = std::min(key_of(value(first + j)), kNotFinite);
        keys[run * kRun + j] = key;
        ++counts[turn * kBins + (key >> kShift)];
      }
    }
  });
  // The bin that holds the key of a rank (0: the largest), and how many keys lie in the bins above it.
  const auto bin_of = [&](int64_t rank) {
    int64_t above = 0;
    for (uint32_t bin = kBins - 1;; --bin) {
      int64_t inside = 0;
      for (int64_t turn = 0; turn < kTurns; ++turn) inside += counts[turn * kBins + bin];
      if (above + inside > rank) return std::pair(bin, above);
      above += inside;
    }
  };

  // Keys of one run may rise and fall together: then their number above varies as if so many fewer had been drawn.
  const uint32_t edge = bin_of(std::min<int64_t>(static_cast<int64_t>(expected), samples - 1)).first << kShift;
  double reaching = 0, squares = 0;
  for (int64_t run = 0; run < runs; ++run) {
    const auto start = keys.begin() + run * kRun;
    const double count = static_cast<double>(std::count_if(start, start + kRun, [=](uint32_t key) { return key >= edge; }));
    reaching += count;
    squares += count * count;
  }
  const double alike = squares / reaching;  // 1: independent; kRun: all of a run are the same
  const auto margin = [=](double count) { return width * (std::sqrt(count * alike) + alike); };

  const double low = expected + margin(expected), high = expected - margin(expected);
  const int64_t low_rank = static_cast<int64_t>(std::min<double>(low, samples - 1));
  const int64_t high_rank = static_cast<int64_t>(std::max(high, 0.0));
  const uint32_t low_bin = bin_of(low_rank).first, high_bin = bin_of(high_rank).first;
  const int64_t above = bin_of(high_rank).second;
  const auto end = std::remove_if(keys.begin(), keys.end(),
                                  [=](uint32_t key) { return key >> kShift < low_bin || key >> kShift > high_bin; });
  const auto key_at = [&](int64_t rank) {
    const auto place = keys.begin() + (rank - above);
    std::nth_element(keys.begin(), place, end, std::greater<uint32_t>());
    return *place;
  };
  Window window{0, kNotFinite, static_cast<double>(n), static_cast<double>(n)};
  if (high >= 0) window.upper = key_at(high_rank) >> open << open;
  if (low < samples) {
    window.lower = key_at(low_rank) >> open << open;
    const double reached = above + std::count_if(keys.begin(), end, [&](uint32_t key) { return key >= window.lower; });
    window.reached = std::min<double>(n, (reached + margin(reached)) * scale);
  }
  const double drawn_between = low - std::max(high, 0.0);
  window.between = std::min<double>(n, (drawn_between + margin(drawn_between)) * scale);
  return window;
}

}  // namespace tfcommx
