// Selection on CPUs.
//
//   predict   a sample of the magnitudes gives a window of keys in which that of the k-th largest
//   should lie
//   gather    the pass that every call makes: r += g; what reaches the window's lower end is moved
//             from r to a list. Where that is too much for a list, only what lies strictly inside
//             the window is copied; what lies above it or on one of its ends (many may be alike
//             there) is counted, stretch by stretch
//   find_band count the listed keys inside the window in bins, go to the bin where the k-th largest
//   lies; again inside it
//   emit      write what is above that band, and from the band the rest of k; what was moved and
//             not chosen goes back to r. Where entries were counted, they are read again from r, in
//             the stretches that hold a chosen one
//
// A wrong prediction costs time, never the result: all but the addition is done again with a wider
// window.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "kernels/flush_denormals.h"
#include "kernels/late_stores.h"
#include "kernels/random.h"
#include "kernels/select.h"
#include "kernels/select_list.h"
#include "kernels/select_not_finite.h"
#include "kernels/select_predict.h"
#include "kernels/select_scan.h"

namespace tfcommx {
namespace {

constexpr uint32_t kBins = 2048;
constexpr int kBinBits = 11;
// of a key, that mstopk's bands leave open: equal exponent, equal first twelve mantissa bits
constexpr int kBandBits = 11;
// entries that always fit a list; a shorter vector needs no sample
constexpr int64_t kListed = 4096;

struct Band {  // keys in [lower, upper)
  uint32_t lower = 0, upper = 0;
  bool operator()(uint32_t key) const { return key - lower < upper - lower; }
};

struct Counts {                   // of one block, by key
  int64_t above = 0, inside = 0;  // above the window; listed and inside it
  int64_t high = 0, low = 0;      // at its upper end, at its lower end, where those are not listed
};

template <class T>
class Selector {
 public:
  Selector(const Selection& s, const ParallelFor& parallel_for)
      : s_(s),
        parallel_for_(parallel_for),
        gradient_(static_cast<const T*>(s.gradient)),
        add_((s.velocity   ? scans().with_velocity
              : s.residual ? scans().with_residual
                           : scans().plain)[static_cast<int>(s.type)]),
        scan_(scans().plain[static_cast<int>(s.residual ? Float::float32 : s.type)]),
        unit_(s.rule == Rule::mstopk ? kBandBits : 0),
        tiles_((s.n + kTile - 1) / kTile),
        blocks_(std::clamp<int64_t>(tiles_ / 16, 1, 64)),
        capacity_(
            std::max<int64_t>({s.n / 86, s.k * 7 / 6, std::min<int64_t>(2 * s.k, 65536), kListed})),
        not_finite_(s.k) {}

  void run() {
    double width = 3;  // standard deviations of the sample: wrong about once in 350 calls
    gather(window(width, [this](int64_t i) { return sum(i); }), true);
    const std::vector<int32_t>& bad = not_finite_.sorted();
    const int64_t need = s_.k - static_cast<int64_t>(bad.size());
    if (need > 0) {
      while (!find_band(need)) {
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

  // The entry's acc after it was added, where it is finite and not moved to the list.
  float entry(int64_t i) const { return s_.residual ? s_.residual[i] : widen(gradient_[i]); }

  uint32_t length(int64_t tile) const {
    return static_cast<uint32_t>(std::min<int64_t>(kTile, s_.n - tile * kTile));
  }

  void each(int64_t turns, const std::function<void(int64_t)>& body) {
    parallel_for_(turns, [&](int64_t turn) {
      const FlushDenormals flush;
      body(turn);
    });
  }

  // Calls body(tile) for the tiles of the part of all, in order.
  template <class Body>
  void each_tile(int64_t part, int64_t parts, const Body& body) {
    for (int64_t tile = tiles_ * part / parts; tile < tiles_ * (part + 1) / parts; ++tile)
      body(tile);
  }

  template <class Value>
  Window window(double width, const Value& value) {
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
        [this](int64_t turns, const std::function<void(int64_t)>& body) { each(turns, body); });
  }

  // Adds (the first time), and lists or counts what the window says.
  void gather(const Window& window, bool first) {
    const uint32_t unit = uint32_t{1} << unit_;
    low_ = {window.lower, window.lower + unit};
    high_ = {window.upper, window.upper + unit};
    moves_ =
        s_.k <= std::max(s_.n / 8, kListed) && window.reached <= static_cast<double>(capacity_);
    window_ = moves_ ? Band{low_.lower, high_.upper} : Band{low_.upper, high_.lower};
    const double room =
        moves_ ? static_cast<double>(capacity_) : std::min<double>(s_.n, window.between + kListed);
    list_ = std::make_unique<CandidateList>(tiles_, static_cast<int64_t>(room));
    counts_.assign(blocks_, {});
    each(blocks_, [&](int64_t block) {
      each_tile(block, blocks_, [&](int64_t tile) {
        uint16_t candidates[kRoom], bad[kRoom];
        const uint32_t threshold = moves_ ? low_.lower : low_.upper;
        const Found found = first ? add(tile, threshold, candidates, bad)
                                  : rescan(tile, threshold, candidates, bad);
        if (moves_) {
          move(tile, candidates, found.candidates, counts_[block]);
        } else {
          count(tile, candidates, bad, found, counts_[block]);
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

  // The same of what was added already. Only where all non-finite entries are known.
  Found rescan(int64_t tile, uint32_t threshold, uint16_t* candidates, uint16_t* bad) {
    const int64_t base = tile * kTile;
    const void* data =
        s_.residual ? static_cast<const void*>(s_.residual + base) : gradient_ + base;
    Found found = scan_(data, nullptr, nullptr, 0, length(tile), threshold, candidates, bad);
    // r holds older values there, which are not to be chosen
    if (s_.residual && not_finite_.count() > 0) {
      found.not_finite = not_finite_.within(base, base + length(tile), bad);
      uint16_t* end = std::remove_if(candidates, candidates + found.candidates,
                                     [&](uint16_t j) { return not_finite_.contains(base + j); });
      found.candidates = static_cast<uint32_t>(end - candidates);
    }
    return found;
  }

  // Lists the tile's candidates, where there is room; the tile is still in the cache.
  void copy(int64_t tile, const uint16_t* candidates, uint32_t count) {
    if (!list_->reserve(tile, count)) return;
    float* values = list_->values(tile);
    std::copy(candidates, candidates + count, list_->positions(tile));
    for (uint32_t j = 0; j < count; ++j) values[j] = entry(tile * kTile + candidates[j]);
  }

  void move(int64_t tile, const uint16_t* candidates, uint32_t count, Counts& counts) {
    copy(tile, candidates, count);
    const uint32_t listed = list_->length(tile);
    if (!listed) return;
    if (s_.residual)
      for (uint32_t j = 0; j < count; ++j) s_.residual[tile * kTile + candidates[j]] = 0.0f;
    const float* values = list_->values(tile);
    uint32_t above = 0;
    for (uint32_t j = 0; j < listed; ++j) above += key_of(values[j]) >= window_.upper;
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
      above += key >= high_.upper;
      candidates[inside] = candidates[j];
      inside += key < high_.lower;
    }
    copy(tile, candidates, inside);
    // a loop without a branch
    for (uint32_t j = 0; j < length(tile); ++j) low += low_(key_of(entry(base + j)));
    for (uint32_t j = 0; j < found.not_finite; ++j) low -= low_(key_of(entry(base + bad[j])));
    counts.above += above;
    counts.high += found.candidates - inside - above;
    counts.low += low;
    counts.inside += inside;
  }

  // Finds the band that holds the need-th largest of what is finite, and how many of each block are
  // above and in it. False where the prediction was wrong.
  bool find_band(int64_t need) {
    Counts all;
    for (const Counts& counts : counts_) {
      all.above += counts.above;
      all.high += counts.high;
      all.low += counts.low;
      all.inside += counts.inside;
    }
    if (!list_->complete() || need <= all.above) return false;
    need -= all.above;
    const int64_t after = need - all.high - all.inside;  // to be chosen at the window's lower end
    if (after > all.low) return false;
    collect_keys();
    if (need <= all.high) {
      band_ = high_;
    } else if (after > 0) {
      band_ = low_;
      need = after;
    } else {
      need = narrow(need - all.high);
    }
    need_ = need;
    above_.assign(blocks_, 0);
    inside_.assign(blocks_, 0);
    for (int64_t block = 0; block < blocks_; ++block) {
      const Counts& counts = counts_[block];
      int64_t above = counts.above, inside = 0;
      const auto put = [&](uint32_t key, int64_t count) {
        above += key >= band_.upper ? count : 0;
        inside += band_(key) ? count : 0;
      };
      put(high_.lower, counts.high);
      put(low_.lower, counts.low);
      for (int64_t j = starts_[block]; j < starts_[block + 1]; ++j) put(keys_[j], 1);
      above_[block] = above;
      inside_[block] = inside;
    }
    return true;
  }

  // Collects the listed keys inside the window, block by block: few where the window is narrow.
  void collect_keys() {
    starts_.assign(blocks_ + 1, 0);
    for (int64_t block = 0; block < blocks_; ++block)
      starts_[block + 1] = starts_[block] + counts_[block].inside;
    keys_.resize(starts_[blocks_]);
    each(blocks_, [&](int64_t block) {
      auto out = keys_.begin() + starts_[block];
      each_tile(block, blocks_, [&](int64_t tile) {
        const float* values = list_->values(tile);
        const uint32_t length = list_->length(tile);
        uint32_t keys[kTile], count = 0;
        // without a branch: which are inside cannot be predicted
        for (uint32_t j = 0; j < length; ++j) {
          keys[count] = key_of(values[j]);
          count += window_(keys[count]);
        }
        out = std::copy(keys, keys + count, out);
      });
    });
  }

  // Makes the band the one in which the need-th largest inside the window lies: of mstopk's width,
  // or of one key. Returns how many of it are to be chosen.
  int64_t narrow(int64_t need) {
    band_ = window_;
    for (;;) {
      const uint32_t width = band_.upper - band_.lower;
      const int shift = std::max(unit_, 32 - __builtin_clz((width - 1) | 1) - kBinBits);
      const std::vector<int64_t> totals = histogram(shift);
      uint32_t bin = kBins - 1;
      for (; totals[bin] < need; --bin) need -= totals[bin];
      band_ = {band_.lower + (bin << shift),
               std::min(band_.upper, band_.lower + ((bin + 1) << shift))};
      if (shift == unit_ || totals[bin] == need) return need;
    }
  }

  // Counts the keys in the band in bins of 2^shift.
  std::vector<int64_t> histogram(int shift) {
    const int64_t count = static_cast<int64_t>(keys_.size()),
                  parts = std::clamp<int64_t>(count / 65536, 1, 16);
    std::vector<int64_t> totals(kBins);
    std::mutex mutex;
    each(parts, [&](int64_t part) {
      std::array<uint32_t, kBins> bins{};
      for (int64_t j = count * part / parts; j < count * (part + 1) / parts; ++j)
        if (band_(keys_[j])) ++bins[(keys_[j] - band_.lower) >> shift];
      const std::lock_guard<std::mutex> lock(mutex);
      for (uint32_t bin = 0; bin < kBins; ++bin) totals[bin] += bins[bin];
    });
    return totals;
  }

  // Calls body(index, value) for the listed entries, or, where they were counted, for those of the
  // tile that reach a threshold.
  template <class Body>
  void visit(int64_t tile, uint32_t threshold, const Body& body) {
    const int64_t base = tile * kTile;
    if (moves_) {
      const uint16_t* positions = list_->positions(tile);
      const float* values = list_->values(tile);
      for (uint32_t j = 0; j < list_->length(tile); ++j) body(base + positions[j], values[j]);
      return;
    }
    uint16_t positions[kRoom], bad[kRoom];
    const Found found = rescan(tile, threshold, positions, bad);
    for (uint32_t j = 0; j < found.candidates; ++j)
      body(base + positions[j], entry(base + positions[j]));
  }

  void put_back() {
    if (!moves_ || !s_.residual) return;
    each(blocks_, [&](int64_t block) {
      LateStores late;
      each_tile(block, blocks_, [&](int64_t tile) {
        visit(tile, 0, [&](int64_t i, float value) { late.put(s_.residual + i, value); });
      });
    });
  }

  void emit() {
    std::vector<int64_t> outs(blocks_ + 1), insides(blocks_ + 1);
    const int64_t all_inside = std::accumulate(inside_.begin(), inside_.end(), int64_t{0});
    const int64_t first = s_.rule == Rule::mstopk ? below(s_.seed, all_inside - need_ + 1) : 0,
                  last = first + need_;
    for (int64_t block = 0, above = 0, inside = 0; block <= blocks_; ++block) {
      outs[block] = above + std::clamp(inside, first, last) - first;
      insides[block] = inside;
      if (block == blocks_) break;
      above += above_[block];
      inside += inside_[block];
    }
    each(blocks_, [&](int64_t block) {
      int64_t out = outs[block], inside = insides[block];
      const bool window_here = inside < last && insides[block + 1] > first;
      LateStores late;
      each_tile(block, blocks_, [&](int64_t tile) {
        if (!moves_ && out == outs[block + 1]) return;
        visit(tile, window_here ? band_.lower : band_.upper, [&](int64_t i, float value) {
          const uint32_t key = key_of(value);
          bool chosen = key >= band_.upper;
          if (band_(key)) {
            chosen = inside >= first && inside < last;
            ++inside;
          }
          if (chosen) {
            s_.indices[out] = static_cast<int32_t>(i);
            s_.values[out++] = value;
            if (s_.velocity) late.put(s_.velocity + i, 0.0f);
          }
          if (s_.residual && chosen != moves_) late.put(s_.residual + i, chosen ? 0.0f : value);
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
  const ParallelFor& parallel_for_;
  const T* const gradient_;
  const Scan add_, scan_;
  const int unit_;  // bits of a key that a band leaves open
  const int64_t tiles_;
  const int64_t blocks_;    // of consecutive tiles: the unit of counting, and of reading again
  const int64_t capacity_;  // entries that may be moved to the list
  NotFinite not_finite_;
  Band low_, high_;  // the bands at the window's ends
  // what reaches the window is moved from r to the list; else it is counted, and r stays complete
  bool moves_ = true;
  std::unique_ptr<CandidateList> list_;
  Band window_;                          // what lies in it is listed
  std::vector<Counts> counts_;           // by block
  std::vector<uint32_t> keys_;           // those listed inside the window, block by block
  std::vector<int64_t> starts_;          // by block, in keys_
  Band band_;                            // holds the k-th largest; all above are chosen
  int64_t need_ = 0;                     // entries of the band to be chosen
  std::vector<int64_t> above_, inside_;  // by block: entries above the band, and in it
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
