// Selection on CPUs.
//
//   predict   a sample of the magnitudes gives a threshold that a little more than k entries should reach
//   add       the only pass that every call makes: r += g, and the positions that reach the threshold are listed
//   narrow    count the listed magnitudes in 2048 bins, go to the bin where the k-th largest lies; `exact` again inside it
//   emit      write what is above that band, and from the band the rest of k; zero their residual
//
// Where no threshold could be predicted (k is large, or too many entries are alike to list them), add counts every entry
// instead of listing some, and emit makes the second pass. A wrong prediction costs time, never the result.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/flush_denormals.h"
#include "kernels/random.h"
#include "kernels/select.h"
#include "kernels/select_list.h"
#include "kernels/select_not_finite.h"
#include "kernels/select_scan.h"

namespace tfcommx {
namespace {

constexpr uint32_t kBins = 2048;
constexpr int kBandShift = 20;  // a band of mstopk: equal exponent, equal first three mantissa bits
constexpr int kCopies = 4;      // of a histogram: neighbours often fall in one bin, and an increment must wait for the last

struct Band {            // keys in [lower, lower + 2^shift)
  uint32_t lower = 0;
  int shift = 31;
  int64_t inside = 0;    // entries in the band
  int64_t need = 0;      // of them to be chosen; all above the band are
  uint32_t upper() const { return lower + (uint32_t{1} << shift); }
};

template <class T>
class Selector {
 public:
  Selector(const Selection& s, const ParallelFor& parallel_for)
      : s_(s),
        parallel_for_(parallel_for),
        gradient_(static_cast<const T*>(s.gradient)),
        add_((s.residual ? scans().with_residual : scans().plain)[static_cast<int>(s.type)]),
        scan_(scans().plain[static_cast<int>(s.residual ? Float::float32 : s.type)]),
        tiles_((s.n + kTile - 1) / kTile),
        blocks_(std::clamp<int64_t>(tiles_ / 64, 1, 64)),
        capacity_(std::max<int64_t>({2 * s.k, s.n / 64, kTile})),
        not_finite_(s.k),
        above_(blocks_, 0),
        inside_(blocks_, 0) {}

  void run() {
    const uint32_t threshold = s_.k == 0 ? kNotFinite : predict();
    if (threshold) list_ = std::make_unique<CandidateList>(tiles_, capacity_);
    add(threshold);
    const std::vector<int32_t>& bad = not_finite_.sorted();
    band_.need = s_.k - static_cast<int64_t>(bad.size());
    if (band_.need > 0) {
      if (threshold && (!list_->complete() || list_->size() < band_.need)) list_.reset();  // a wrong prediction
      if (list_ || threshold) count(kBandShift);  // else add() has counted
      narrow(kBandShift);
      if (s_.rule == Rule::exact) refine();
      emit();
    }
    insert(bad);
  }

 private:
  // The entry's acc after add(), where it is finite.
  float entry(int64_t i) const { return s_.residual ? s_.residual[i] : widen(gradient_[i]); }

  uint32_t length(int64_t tile) const { return static_cast<uint32_t>(std::min<int64_t>(kTile, s_.n - tile * kTile)); }

  void each(int64_t turns, const std::function<void(int64_t)>& body) {
    parallel_for_(turns, [&](int64_t turn) {
      const FlushDenormals flush;
      body(turn);
    });
  }

  // Calls body(block, tile) for every tile of every block, the tiles of a block in order on one thread.
  template <class Start, class Body, class End>
  void each_block(const Start& start, const Body& body, const End& end) {
    each(blocks_, [&](int64_t block) {
      auto state = start(block);
      for (int64_t tile = tiles_ * block / blocks_; tile < tiles_ * (block + 1) / blocks_; ++tile) body(state, tile);
      end(block, state);
    });
  }

  // A key that between k and capacity_ entries should reach; 0 where none is in sight. The positions are drawn at random, one
  // from each of equally long stretches: no order of the entries can mislead it more than rarely.
  uint32_t predict() {
    if (s_.n < kTile || s_.k > s_.n / 8) return 0;
    const int64_t samples = std::clamp<int64_t>(s_.n / 512, 64, 65536), stretch = s_.n / samples, turns = 16;
    const double expected = static_cast<double>(samples) * s_.k / s_.n;
    const int64_t rank = static_cast<int64_t>(expected + 4 * std::sqrt(expected) + 4);  // 4 standard deviations to the safe side
    if (rank >= samples) return 0;
    std::vector<uint32_t> keys(samples);
    each(turns, [&](int64_t turn) {
      for (int64_t j = samples * turn / turns; j < samples * (turn + 1) / turns; ++j) {
        const int64_t i = j * stretch + below(s_.seed + j, stretch);
        const uint32_t key = key_of(widen(gradient_[i]) + (s_.residual ? s_.residual[i] : 0.0f));
        keys[j] = key < kNotFinite ? key : 0;
      }
    });
    std::nth_element(keys.begin(), keys.begin() + rank, keys.end(), std::greater<uint32_t>());
    uint32_t threshold = keys[rank];
    if (s_.rule == Rule::mstopk) threshold = threshold >> kBandShift << kBandShift;  // the whole band must be listed
    const int64_t reached = std::count_if(keys.begin(), keys.end(), [=](uint32_t key) { return key >= threshold; });
    return static_cast<double>(reached) * s_.n / samples > 0.95 * capacity_ ? 0 : threshold;
  }

  struct Histogram {
    uint32_t bins[kCopies][kBins];
  };

  static void tally(Histogram& histogram, uint32_t turn, uint32_t bin) { ++histogram.bins[turn % kCopies][bin]; }

  void keep(int64_t block, const Histogram& histogram) {
    for (uint32_t bin = 0; bin < kBins; ++bin) {
      uint32_t sum = 0;
      for (const auto& copy : histogram.bins) sum += copy[bin];
      counts_[block * kBins + bin] = sum;
    }
  }

  void add(uint32_t threshold) {
    if (!threshold) counts_.resize(blocks_ * kBins);
    each_block([](int64_t) { return Histogram{}; },
               [&](Histogram& histogram, int64_t tile) {
                 uint16_t candidates[kTile], bad[kTile];
                 const int64_t base = tile * kTile;
                 const Found found = add_(gradient_ + base, s_.residual ? s_.residual + base : nullptr, length(tile), threshold,
                                          candidates, bad);
                 if (found.not_finite) not_finite_.add(base, bad, found.not_finite);
                 if (threshold) return list_->put(tile, candidates, found.candidates);
                 for (uint32_t j = 0; j < found.candidates; ++j)
                   tally(histogram, j, key_of(entry(base + candidates[j])) >> kBandShift);
               },
               [&](int64_t block, const Histogram& histogram) {
                 if (!threshold) keep(block, histogram);
               });
  }

  // Calls body(index, key) for the tile's finite entries from the band upwards (perhaps some below it too), ascending.
  template <class Body>
  void visit(int64_t tile, const Body& body) {
    uint16_t buffer[kTile], bad[kTile];
    const int64_t base = tile * kTile;
    const uint16_t* positions = buffer;
    uint32_t found;
    if (list_) {
      positions = list_->positions(tile);
      found = list_->length(tile);
    } else {
      const void* data = s_.residual ? static_cast<const void*>(s_.residual + base) : gradient_ + base;
      found = scan_(data, nullptr, length(tile), band_.lower, buffer, bad).candidates;
    }
    for (uint32_t j = 0; j < found; ++j) {
      const int64_t i = base + positions[j];
      if (!list_ && not_finite_.contains(i)) continue;  // its residual holds an older value, which does not count
      body(i, key_of(entry(i)));
    }
  }

  // Counts the band's entries in bins of 2^shift keys.
  void count(int shift) {
    counts_.resize(blocks_ * kBins);
    const uint32_t lower = band_.lower, width = uint32_t{1} << band_.shift;
    each_block([](int64_t) { return Histogram{}; },
               [&](Histogram& histogram, int64_t tile) {
                 uint32_t turn = 0;
                 visit(tile, [&](int64_t, uint32_t key) {
                   if (key - lower < width) tally(histogram, turn++, (key - lower) >> shift);
                 });
               },
               [&](int64_t block, const Histogram& histogram) { keep(block, histogram); });
  }

  // Makes the band the bin, of 2^shift keys, in which the last entry to be chosen lies.
  void narrow(int shift) {
    uint32_t bin = kBins;
    int64_t found = 0;
    do {
      band_.need -= found;
      --bin;
      found = 0;
      for (int64_t block = 0; block < blocks_; ++block) {
        inside_[block] = counts_[block * kBins + bin];
        found += inside_[block];
      }
    } while (found < band_.need);
    for (int64_t block = 0; block < blocks_; ++block)
      for (uint32_t other = bin + 1; other < kBins; ++other) above_[block] += counts_[block * kBins + other];
    band_.lower += bin << shift;
    band_.shift = shift;
    band_.inside = found;
  }

  // Narrows the band until all that it holds is chosen or alike.
  void refine() {
    if (!list_ && band_.inside > band_.need) {
      auto list = std::make_unique<CandidateList>(tiles_, capacity_);
      if (s_.k - band_.need + band_.inside <= capacity_) {
        relist(*list);
        list_ = std::move(list);
      }
    }
    while (band_.inside > band_.need && band_.shift > 0) {
      const int shift = std::max(0, band_.shift - 11);
      count(shift);
      narrow(shift);
    }
  }

  // Lists what is in the band and above it: the second pass, after which no other is needed.
  void relist(CandidateList& list) {
    each(blocks_, [&](int64_t block) {
      uint16_t positions[kTile];
      for (int64_t tile = tiles_ * block / blocks_; tile < tiles_ * (block + 1) / blocks_; ++tile) {
        uint32_t count = 0;
        visit(tile, [&](int64_t i, uint32_t) { positions[count++] = static_cast<uint16_t>(i - tile * kTile); });
        list.put(tile, positions, count);
      }
    });
  }

  void emit() {
    struct Cursor {
      int64_t out, inside;
    };
    const int64_t first = s_.rule == Rule::mstopk ? below(s_.seed, band_.inside - band_.need + 1) : 0, last = first + band_.need;
    std::vector<Cursor> cursors(blocks_);
    for (int64_t block = 0, above = 0, inside = 0; block < blocks_; ++block) {
      cursors[block] = {above + std::clamp(inside, first, last) - first, inside};
      above += above_[block];
      inside += inside_[block];
    }
    each_block([&](int64_t block) { return cursors[block]; },
               [&](Cursor& at, int64_t tile) {
                 visit(tile, [&](int64_t i, uint32_t key) {
                   if (key < band_.lower) return;
                   if (key < band_.upper()) {
                     const int64_t place = at.inside++;
                     if (place < first || place >= last) return;
                   }
                   s_.indices[at.out] = static_cast<int32_t>(i);
                   s_.values[at.out++] = entry(i);
                   if (s_.residual) s_.residual[i] = 0.0f;
                 });
               },
               [](int64_t, const Cursor&) {});
  }

  // Merges the non-finite entries into what emit() has written, from the back, so that indices ascend.
  void insert(const std::vector<int32_t>& bad) {
    const FlushDenormals flush;
    int64_t out = s_.k, finite = s_.k - static_cast<int64_t>(bad.size()), rest = static_cast<int64_t>(bad.size());
    while (rest > 0) {
      --out;
      if (finite > 0 && s_.indices[finite - 1] > bad[rest - 1]) {
        --finite;
        s_.indices[out] = s_.indices[finite];
        s_.values[out] = s_.values[finite];
      } else {
        const int32_t i = bad[--rest];
        s_.indices[out] = i;
        s_.values[out] = s_.residual ? widen(gradient_[i]) + s_.residual[i] : widen(gradient_[i]);
      }
    }
  }

  const Selection& s_;
  const ParallelFor& parallel_for_;
  const T* const gradient_;
  const Scan add_, scan_;
  const int64_t tiles_;
  const int64_t blocks_;    // of consecutive tiles: the unit of parallel work; their histograms stay below 1 % of the gradient
  const int64_t capacity_;  // candidates that may be listed
  NotFinite not_finite_;
  std::unique_ptr<CandidateList> list_;
  std::vector<uint32_t> counts_;         // [blocks][kBins]
  std::vector<int64_t> above_, inside_;  // by block: entries above the band, and in it
  Band band_;
};

}  // namespace

void select_cpu(const Selection& s, const ParallelFor& parallel_for) {
  if (s.n == 0) return;
  switch (s.type) {
    case Float::float32: return Selector<float>(s, parallel_for).run();
    case Float::float16: return Selector<Half>(s, parallel_for).run();
    case Float::bfloat16: return Selector<Bfloat>(s, parallel_for).run();
  }
}

}  // namespace tfcommx
