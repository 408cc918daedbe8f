// Selection on CPUs.
//
//   predict    a sample of the magnitudes gives a window of keys in which that of the k-th largest
//              should lie
//   gather     the pass that every call makes: r += g; what reaches the window's lower end is moved
//              from r to a list. If that is too much for a list, only what lies strictly inside the
//              window is copied; what lies above it or on one of its ends (many may be alike there)
//              is counted, block by block
//   find_band  count the listed keys inside the window in bins, go to the bin in which the k-th
//              largest lies; again inside it (select_band.h)
//   emit       write what is above that band, and from the band the rest of k; what was moved and
//              not chosen goes back to r. If entries were counted, they are read again from r, in
//              the blocks that hold a chosen one
//
// A wrong prediction costs time, never the result: all except the addition is done again with a
// wider window.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels/flush_denormals.h"
#include "kernels/late_stores.h"
#include "kernels/random.h"
#include "kernels/select.h"
#include "kernels/select_band.h"
#include "kernels/select_list.h"
#include "kernels/select_not_finite.h"
#include "kernels/select_predict.h"
#include "kernels/select_scan.h"

namespace tfcommx {
namespace {

// Entries that always fit a list; a shorter vector needs no sample.
constexpr int64_t kListed = 4096;

Blocks blocks_of(int64_t tiles) { return {tiles, std::clamp<int64_t>(tiles / 16, 1, 64)}; }

template <class T>
class Selector {
 public:
  Selector(const Selection& s, const ParallelFor& parallel_for)
      : s_(s),
        each_([&parallel_for](int64_t turns, const std::function<void(int64_t)>& body) {
          parallel_for(turns, [&](int64_t turn) {
            const FlushDenormals flush;
            body(turn);
          });
        }),
        gradient_(static_cast<const T*>(s.gradient)),
        add_((s.velocity   ? scans().with_velocity
              : s.residual ? scans().with_residual
                           : scans().plain)[static_cast<int>(s.type)]),
        scan_(scans().plain[static_cast<int>(s.residual ? Float::float32 : s.type)]),
        unit_(s.rule == Rule::mstopk ? kBandBits : 0),
        blocks_(blocks_of((s.n + kTile - 1) / kTile)),
        capacity_(
            std::max<int64_t>({s.n / 86, s.k * 7 / 6, std::min<int64_t>(2 * s.k, 65536), kListed})),
        not_finite_(s.k) {}

  void run() {
    double width = 3;  // standard deviations of the sample: wrong about once in 350 calls
    gather(window(width, [this](int64_t i) { return sum(i); }), true);
    const std::vector<int32_t>& bad = not_finite_.sorted();
    const int64_t need = s_.k - static_cast<int64_t>(bad.size());
    if (need > 0) {
      while (!find_band(gathered_, blocks_, need, unit_, each_, &found_)) {
        put_back();
        width *= 4;
        gather(window(width,
                      [this](int64_t i) { return not_finite_.contains(i) ? HUGE_VALF : entry(i); }),
               false);
      }
      emit();
    } else {
      put_back();
    }
    insert(bad);
  }

 private:
  // What the entry's acc will be, before it is added.
  float sum(int64_t i) const {
    float acc = widen(gradient_[i]);
    if (s_.velocity) acc = s_.momentum * s_.velocity[i] + acc;
    return s_.residual ? acc + s_.residual[i] : acc;
  }

  // The entry's acc after it was added, if it is finite and not moved to the list.
  float entry(int64_t i) const { return s_.residual ? s_.residual[i] : widen(gradient_[i]); }

  uint32_t length(int64_t tile) const {
    return static_cast<uint32_t>(std::min<int64_t>(kTile, s_.n - tile * kTile));
  }

  template <class Value>
  KeyWindow window(double width, const Value& value) {
    if (s_.k == 0) return {kNotFinite, kNotFinite, 0, 0};
    const double n = static_cast<double>(s_.n);
    if (s_.n <= kListed) return {0, kNotFinite, n, n};
    return predict(
        s_.n, s_.k, s_.seed + static_cast<uint64_t>(width), width, unit_, value,
        [this](int64_t i) {
          __builtin_prefetch(gradient_ + i);
          if (s_.residual) __builtin_prefetch(s_.residual + i);
          if (s_.velocity) __builtin_prefetch(s_.velocity + i);
        },
        each_);
  }

  // Adds (the first time), and lists or counts what the window says.
  void gather(const KeyWindow& window, bool first) {
    const uint32_t unit = uint32_t{1} << unit_;
    gathered_.low = {window.lower, window.lower + unit};
    gathered_.high = {window.upper, window.upper + unit};
    moves_ =
        s_.k <= std::max(s_.n / 8, kListed) && window.reached <= static_cast<double>(capacity_);
    gathered_.listed = moves_ ? Band{gathered_.low.lower, gathered_.high.upper}
                              : Band{gathered_.low.upper, gathered_.high.lower};
    const double room =
        moves_ ? static_cast<double>(capacity_) : std::min<double>(s_.n, window.between + kListed);
    gathered_.list = std::make_unique<CandidateList>(blocks_.tiles, static_cast<int64_t>(room));
    gathered_.counts.assign(blocks_.count, {});
    each_(blocks_.count, [&](int64_t block) {
      blocks_.each_tile(block, [&](int64_t tile) {
        uint16_t candidates[kRoom], bad[kRoom];
        const uint32_t threshold = moves_ ? gathered_.low.lower : gathered_.low.upper;
        const Found found = first ? add(tile, threshold, candidates, bad)
                                  : rescan(tile, threshold, candidates, bad);
        if (moves_) {
          move(tile, candidates, found.candidates, gathered_.counts[block]);
        } else {
          count(tile, candidates, bad, found, gathered_.counts[block]);
        }
      });
    });
  }

  Found add(int64_t tile, uint32_t threshold, uint16_t* candidates, uint16_t* bad) {
    const int64_t base = tile * kTile;
    const Found found = add_(gradient_ + base, s_.residual ? s_.residual + base : nullptr,
                             s_.velocity ? s_.velocity + base : nullptr, s_.momentum, length(tile),
                             threshold, candidates, bad);
    if (found.not_finite) not_finite_.add(base, bad, found.not_finite);
    return found;
  }

  // The same of what was added already. Only if all non-finite entries are known.
  Found rescan(int64_t tile, uint32_t threshold, uint16_t* candidates, uint16_t* bad) {
    const int64_t base = tile * kTile;
    const void* data =
        s_.residual ? static_cast<const void*>(s_.residual + base) : gradient_ + base;
    Found found = scan_(data, nullptr, nullptr, 0, length(tile), threshold, candidates, bad);
    // In these, r holds older values, which are not to be chosen.
    if (s_.residual && not_finite_.count() > 0) {
      found.not_finite = not_finite_.within(base, base + length(tile), bad);
      uint16_t* end = std::remove_if(candidates, candidates + found.candidates,
                                     [&](uint16_t j) { return not_finite_.contains(base + j); });
      found.candidates = static_cast<uint32_t>(end - candidates);
    }
    return found;
  }

  // Lists the tile's candidates if there is room; the tile is still in the cache.
  void copy(int64_t tile, const uint16_t* candidates, uint32_t count) {
    if (!gathered_.list->reserve(tile, count)) return;
    float* values = gathered_.list->values(tile);
    std::copy(candidates, candidates + count, gathered_.list->positions(tile));
    for (uint32_t j = 0; j < count; ++j) values[j] = entry(tile * kTile + candidates[j]);
  }

  void move(int64_t tile, const uint16_t* candidates, uint32_t count, Counts& counts) {
    copy(tile, candidates, count);
    const uint32_t listed = gathered_.list->length(tile);
    if (!listed) return;
    if (s_.residual)
      for (uint32_t j = 0; j < count; ++j) s_.residual[tile * kTile + candidates[j]] = 0.0f;
    const float* values = gathered_.list->values(tile);
    uint32_t above = 0;
    for (uint32_t j = 0; j < listed; ++j) above += key_of(values[j]) >= gathered_.listed.upper;
    counts.above += above;
    counts.inside += listed - above;
  }

  // Of the candidates, which are above the window's lower end: lists those inside, counts the
  // others; and counts its lower end.
  void count(int64_t tile, uint16_t* candidates, const uint16_t* bad, const Found& found,
             Counts& counts) {
    const int64_t base = tile * kTile;
    uint32_t inside = 0, above = 0, low = 0;
    for (uint32_t j = 0; j < found.candidates; ++j) {
      const uint32_t key = key_of(entry(base + candidates[j]));
      above += key >= gathered_.high.upper;
      candidates[inside] = candidates[j];
      inside += key < gathered_.high.lower;
    }
    copy(tile, candidates, inside);
    // A loop without a branch.
    for (uint32_t j = 0; j < length(tile); ++j) low += gathered_.low(key_of(entry(base + j)));
    for (uint32_t j = 0; j < found.not_finite; ++j)
      low -= gathered_.low(key_of(entry(base + bad[j])));
    counts.above += above;
    counts.high += found.candidates - inside - above;
    counts.low += low;
    counts.inside += inside;
  }

  // Calls body(index, value) for the listed entries, or, if they were counted, for those of the
  // tile that reach a threshold.
  template <class Body>
  void visit(int64_t tile, uint32_t threshold, const Body& body) {
    const int64_t base = tile * kTile;
    if (moves_) {
      const uint16_t* positions = gathered_.list->positions(tile);
      const float* values = gathered_.list->values(tile);
      for (uint32_t j = 0; j < gathered_.list->length(tile); ++j)
        body(base + positions[j], values[j]);
      return;
    }
    uint16_t positions[kRoom], bad[kRoom];
    const Found found = rescan(tile, threshold, positions, bad);
    for (uint32_t j = 0; j < found.candidates; ++j)
      body(base + positions[j], entry(base + positions[j]));
  }

  void put_back() {
    if (!moves_ || !s_.residual) return;
    each_(blocks_.count, [&](int64_t block) {
      LateStores late;
      blocks_.each_tile(block, [&](int64_t tile) {
        visit(tile, 0, [&](int64_t i, float value) { late.put(s_.residual + i, value); });
      });
    });
  }

  void emit() {
    std::vector<int64_t> outs(blocks_.count + 1), insides(blocks_.count + 1);
    const int64_t all_inside =
        std::accumulate(found_.inside.begin(), found_.inside.end(), int64_t{0});
    const int64_t first =
                      s_.rule == Rule::mstopk ? below(s_.seed, all_inside - found_.need + 1) : 0,
                  last = first + found_.need;
    for (int64_t block = 0, above = 0, inside = 0; block <= blocks_.count; ++block) {
      outs[block] = above + std::clamp(inside, first, last) - first;
      insides[block] = inside;
      if (block == blocks_.count) break;
      above += found_.above[block];
      inside += found_.inside[block];
    }
    each_(blocks_.count, [&](int64_t block) {
      int64_t out = outs[block], inside = insides[block];
      const bool window_here = inside < last && insides[block + 1] > first;
      LateStores late;
      blocks_.each_tile(block, [&](int64_t tile) {
        if (!moves_ && out == outs[block + 1]) return;
        visit(tile, window_here ? found_.band.lower : found_.band.upper,
              [&](int64_t i, float value) {
                const uint32_t key = key_of(value);
                bool chosen = key >= found_.band.upper;
                if (found_.band(key)) {
                  chosen = inside >= first && inside < last;
                  ++inside;
                }
                if (chosen) {
                  s_.indices[out] = static_cast<int32_t>(i);
                  s_.values[out++] = value;
                  if (s_.velocity) late.put(s_.velocity + i, 0.0f);
                }
                if (s_.residual && chosen != moves_)
                  late.put(s_.residual + i, chosen ? 0.0f : value);
              });
      });
    });
  }

  // Merges the non-finite entries into what emit() has written, from the back, so that indices
  // ascend.
  void insert(const std::vector<int32_t>& bad) {
    const FlushDenormals flush;
    int64_t out = s_.k, finite = s_.k - static_cast<int64_t>(bad.size()),
            rest = static_cast<int64_t>(bad.size());
    while (rest > 0) {
      --out;
      if (finite > 0 && s_.indices[finite - 1] > bad[rest - 1]) {
        --finite;
        s_.indices[out] = s_.indices[finite];
        s_.values[out] = s_.values[finite];
      } else {
        const int32_t i = bad[--rest];
        s_.indices[out] = i;
        s_.values[out] = sum(i);
      }
    }
  }

  const Selection& s_;
  const ParallelFor each_;  // with denormals flushed
  const T* const gradient_;
  const Scan add_, scan_;
  const int unit_;  // bits of a key that a band leaves open
  const Blocks blocks_;
  const int64_t capacity_;  // entries that may be moved to the list
  NotFinite not_finite_;
  // What reaches the window is moved from r to the list; else it is counted, and r stays complete.
  bool moves_ = true;
  Gathered gathered_;
  FoundBand found_;
};

}  // namespace

void select_cpu(const Selection& s, const ParallelFor& parallel_for) {
  if (s.n == 0) return;
  switch (s.type) {
    case Float::float32:
      return Selector<float>(s, parallel_for).run();
    case Float::float16:
      return Selector<Half>(s, parallel_for).run();
    case Float::bfloat16:
      return Selector<Bfloat>(s, parallel_for).run();
  }
}

}  // namespace tfcommx
