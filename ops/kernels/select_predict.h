// Prediction of a threshold from a sample of the magnitudes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/random.h"
#include "kernels/select_scan.h"

namespace tfcommx {

struct Prediction {
  uint32_t key = 0;    // almost surely at least k entries reach it, and few more
  double reached = 0;  // the number of entries that should
};

// value(i): acc of entry i; fetch(i): brings it to the cache. Runs of eight neighbours are drawn (they share a cache line), one from each of equally long
// stretches, at random: no order of the entries can mislead the sample more than rarely. The margin is three standard
// deviations of the number of drawn entries that reach the threshold. Cost: n / 32 entries read, at most 131,072.
template <class Value, class Fetch, class Each>
Prediction predict(int64_t n, int64_t k, uint64_t seed, const Value& value, const Fetch& fetch, const Each& each) {
  constexpr int64_t kRun = 8, kAhead = 16, kTurns = 16, kBins = 2048;
  constexpr int kShift = 20;
  const int64_t runs = std::clamp<int64_t>(n / (32 * kRun), 8, 16384), stretch = n / kRun / runs, samples = runs * kRun;
  if (stretch == 0) return {};
  const double expected = static_cast<double>(samples) * k / n;
  const int64_t rank = static_cast<int64_t>(expected + 3 * std::sqrt(expected) + 3);  // of the drawn key that is returned
  if (rank >= samples) return {};

  std::vector<uint32_t> keys(samples), counts(kTurns * kBins);
  each(kTurns, [&](int64_t turn) {
    const auto first_of = [=](int64_t run) { return (run * stretch + below(seed + run, stretch)) * kRun; };
    const int64_t end = runs * (turn + 1) / kTurns;
    for (int64_t run = runs * turn / kTurns; run < end; ++run) {
      if (run + kAhead < end) fetch(first_of(run + kAhead));  // every run is a cache miss: have several under way
      const int64_t first = first_of(run);
      for (int64_t j = 0; j < kRun; ++j) {
        const uint32_t key = key_of(value(first + j));
        keys[run * kRun + j] = key < kNotFinite ? key : 0;
        ++counts[turn * kBins + (keys[run * kRun + j] >> kShift)];
      }
    }
  });
  int64_t bin = kBins, above = 0, inside = 0;
  do {  // find the bin of the drawn key of that rank, then the key in the bin
    above += inside;
    inside = 0;
    --bin;
    for (int64_t turn = 0; turn < kTurns; ++turn) inside += counts[turn * kBins + bin];
  } while (above + inside <= rank);
  const auto end = std::remove_if(keys.begin(), keys.end(), [=](uint32_t key) { return key >> kShift != bin; });
  const auto place = keys.begin() + (rank - above);
  std::nth_element(keys.begin(), place, end, std::greater<uint32_t>());
  const uint32_t key = *place;
  const int64_t reached = above + std::count_if(keys.begin(), end, [=](uint32_t other) { return other >= key; });
  return {key, static_cast<double>(reached) * n / samples};
}

}  // namespace tfcommx
