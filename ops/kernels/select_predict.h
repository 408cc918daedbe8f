// Prediction, from a sample of the magnitudes, of the keys between which the k-th largest lies.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <mutex>
#include <numeric>
#include <vector>

#include "kernels/random.h"
#include "kernels/select_scan.h"

namespace tfcommx {

struct KeyWindow {
  // Almost surely the k-th largest key lies between them; both are starts of bands.
  uint32_t lower = 0, upper = kNotFinite;
  double reached = 0;  // at most so many entries reach lower, almost surely
  // And so many lie strictly between the bands of lower and upper.
  double between = 0;
};

// value(i): acc of entry i, of which NaN and infinities count as the largest; fetch(i): brings it
// to the cache. Runs of sixteen neighbours are drawn (a cache line's worth), one from each of
// equally long stretches, at random: no order of the entries can mislead the sample more than
// rarely. Margins are `width` standard deviations of the number of drawn entries above, with
// neighbours as alike as the sample shows them. A band leaves `open` bits of a key open. Cost: at
// most n / 32 entries read, and at most 262,144. n >= 4096.
template <class Value, class Fetch, class Each>
KeyWindow predict(int64_t n, int64_t k, uint64_t seed, double width, int open, const Value& value,
                  const Fetch& fetch, const Each& each) {
  constexpr int64_t kRun = 16, kAhead = 16, kTurns = 8, kBins = 2048, kLook = 256;
  constexpr int kShift = 20;
  const int64_t runs = std::min<int64_t>(n / (32 * kRun), 16384), stretch = n / kRun / runs;

  // Calls body(its keys) for each of every step-th run, from the first-th of those to before the
  // end-th.
  const auto draw = [&](int64_t first, int64_t end, int64_t step, const auto& body) {
    const auto start_of = [=](int64_t turn) {
      const int64_t run = turn * step;
      return (run * stretch +
              static_cast<int64_t>((splitmix64(seed + run) >> 32) * stretch >> 32)) *
             kRun;
    };
    for (int64_t turn = first; turn < end; ++turn) {
      if (turn + kAhead < end) {  // every run is a cache miss: have several under way
        fetch(start_of(turn + kAhead));
        // If the vector begins inside a line, a run has two.
        fetch(start_of(turn + kAhead) + kRun - 1);
      }
      uint32_t keys[kRun];
      const int64_t start = start_of(turn);
      for (int64_t j = 0; j < kRun; ++j) keys[j] = std::min(key_of(value(start + j)), kNotFinite);
      body(keys);
    }
  };

  // A first look at few runs: keys below `least` are certainly too small to matter; `edge` is near
  // that of the k-th largest.
  const int64_t step = std::max<int64_t>(runs / kLook, 1), looks = runs / step;
  std::vector<int64_t> counts(kBins);
  draw(0, looks, step, [&](const uint32_t* keys) {
    for (int64_t j = 0; j < kRun; ++j) ++counts[keys[j] >> kShift];
  });
  const auto start_of_bin = [&](double rank) {  // of the bin that holds it
    uint32_t bin = kBins - 1;
    while (bin > 0 && (rank -= static_cast<double>(counts[bin])) >= 0) --bin;
    return bin << kShift;
  };
  const double looked = static_cast<double>(looks * kRun), expected_look = looked * k / n;
  const uint32_t edge = start_of_bin(expected_look), least = start_of_bin(1.5 * expected_look + 64);

  // Where many are kept, fewer runs tell as much, and need less memory.
  const double reaching_look = static_cast<double>(
      std::accumulate(counts.begin() + (least >> kShift), counts.end(), int64_t{0}));
  const int64_t thin = static_cast<int64_t>(std::ceil(8 * reaching_look / looked)),
                drawn = runs / thin, samples = drawn * kRun;
  const double expected = static_cast<double>(samples) * k / n,
               scale = static_cast<double>(n) / samples;

  std::mutex mutex;
  std::vector<uint32_t> keys;  // those >= least
  // How many reach the edge; the sum over runs of that number's square.
  int64_t reaching = 0, squares = 0;
  each(kTurns, [&](int64_t turn) {
    std::vector<uint32_t> mine;
    int64_t my_reaching = 0, my_squares = 0;
    draw(drawn * turn / kTurns, drawn * (turn + 1) / kTurns, thin, [&](const uint32_t* run) {
      int64_t count = 0;
      for (int64_t j = 0; j < kRun; ++j) {
        count += run[j] >= edge;
        if (run[j] >= least) mine.push_back(run[j]);
      }
      my_reaching += count;
      my_squares += count * count;
    });
    const std::lock_guard<std::mutex> lock(mutex);
    // In any order, because only ranks among the keys are asked for
    keys.insert(keys.end(), mine.begin(), mine.end());
    reaching += my_reaching;
    squares += my_squares;
  });
  const double kept = static_cast<double>(keys.size());
  const auto key_at = [&](double rank) {  // 0: the largest
    const auto position = keys.begin() + static_cast<int64_t>(rank);
    std::nth_element(keys.begin(), position, keys.end(), std::greater<uint32_t>());
    return *position >> open << open;
  };

  // Keys of one run may rise and fall together: then their number above varies as if so many fewer
  // had been drawn. 1: they are independent; kRun: all of a run are the same.
  const double alike = std::max(
      static_cast<double>(squares) / static_cast<double>(std::max<int64_t>(reaching, 1)), 1.0);
  const auto margin = [=](double count) { return width * (std::sqrt(count * alike) + alike); };

  const double low = expected + margin(expected), high = expected - margin(expected);
  KeyWindow window{0, kNotFinite, static_cast<double>(n), static_cast<double>(n)};
  if (high >= 0 && high < kept) window.upper = key_at(high);
  if (low < kept) {
    window.lower = key_at(low);
    const uint32_t inside = window.lower + (uint32_t{1} << open);
    double reached = 0, between = 0;
    for (const uint32_t key : keys) {
      reached += key >= window.lower;
      between += key >= inside && key < window.upper;
    }
    window.reached = std::min<double>(n, (reached + margin(reached)) * scale);
    window.between = std::min<double>(n, (between + margin(between)) * scale);
  }
  return window;
}

}  // namespace tfcommx
