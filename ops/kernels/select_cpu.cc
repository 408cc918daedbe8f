// Selection on CPUs.
//
//   predict   a sample of the magnitudes gives a threshold that a little more than k entries should reach
//   add       the only pass that every call makes: r += g; what reaches the threshold is moved from r to a list
//   narrow    count the listed magnitudes in bins, go to the bin where the k-th largest lies; `exact` again inside it
//   emit      write what is above that band, and from the band the rest of k; the others go back to r
//
// Where no list is possible (k is large, or too many entries are alike), add leaves r complete and counts every entry, and
// emit makes a second pass and zeroes what it chooses. A wrong prediction costs time, never the result.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/flush_denormals.h"
#include "kernels/random.h"
#include "kernels/select.h"
#include "kernels/select_list.h"
#include "kernels/select_not_finite.h"
#include "kernels/select_predict.h"
#include "kernels/select_scan.h"

namespace tfcommx {
namespace {

constexpr uint32_t kBins = 2048;
constexpr int kBandShift = 11;    // a band of mstopk: equal exponent, equal first twelve mantissa bits; the rest make kBins
constexpr int kCoarseShift = 20;  // bins that cover all magnitudes
constexpr int kCopies = 4;        // of a histogram: neighbours often fall in one bin, and an increment must wait for the last

struct Band {  // keys in [lower, upper)
  uint32_t lower = 0, upper = uint32_t{1} << 31;
  int64_t inside = 0;  // entries in the band
  int64_t need = 0;    // of them to be chosen; all above the band are
};

struct Histogram {
  uint32_t bins[kCopies][kBins];
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
        capacity_(std::max<int64_t>({s.n / 84, s.k * 6 / 5, std::min<int64_t>(2 * s.k, 65536)})),
        not_finite_(s.k) {}

  void run() {
    Prediction predicted;
    if (s_.k == 0) predicted.key = kNotFinite;
    if (s_.k > 0) {
      predicted = predict(
          s_.n, s_.k, s_.seed, [this](int64_t i) { return widen(gradient_[i]) + (s_.residual ? s_.residual[i] : 0.0f); },
          [this](int64_t i) {
            __builtin_prefetch(gradient_ + i);
            if (s_.residual) __builtin_prefetch(s_.residual + i);
          },
          [this](int64_t turns, const std::function<void(int64_t)>& body) { each(turns, body); });
    }
    // Bins as fine as mstopk's bands, where the prediction says that they are needed: they span half an octave.
    uint32_t lower = predicted.key >> kBandShift << kBandShift;
    if (predicted.key && s_.k <= s_.n / 8 && predicted.reached <= capacity_) {
      blocks_ = std::clamp<int64_t>(tiles_ / 64, 1, 16);
      list_ = std::make_unique<CandidateList>(tiles_, capacity_);
      add_and_list(s_.rule == Rule::mstopk ? lower : predicted.key);  // mstopk's band must be listed whole
    } else {
      blocks_ = std::clamp<int64_t>(tiles_ / 64, 1, 64);
      lower -= std::min(lower, kBins / 2 << kBandShift);
      add_and_count(lower);
    }
    const std::vector<int32_t>& bad = not_finite_.sorted();
    const int64_t need = s_.k - static_cast<int64_t>(bad.size());
    if (need > 0) {
      band_.need = need;
      find_band(lower);
      if (s_.rule == Rule::exact) refine();
      emit();
    } else if (list_) {
      put_back();
    }
    insert(bad);
  }

 private:
  // The entry's acc after it was added, where it is finite and not listed.
  float entry(int64_t i) const { return s_.residual ? s_.residual[i] : widen(gradient_[i]); }

  uint32_t length(int64_t tile) const { return static_cast<uint32_t>(std::min<int64_t>(kTile, s_.n - tile * kTile)); }

  void each(int64_t turns, const std::function<void(int64_t)>& body) {
    parallel_for_(turns, [&](int64_t turn) {
      const FlushDenormals flush;
      body(turn);
    });
  }

  // Calls body(tile) for the tiles of the block, in order.
  template <class Body>
  void each_tile(int64_t block, int64_t blocks, const Body& body) {
    for (int64_t tile = tiles_ * block / blocks; tile < tiles_ * (block + 1) / blocks; ++tile) body(tile);
  }

  Found add_tile(int64_t tile, uint32_t threshold, uint16_t* candidates) {
    uint16_t bad[kTile];
    const int64_t base = tile * kTile;
    float* residual = s_.residual ? s_.residual + base : nullptr;
    const Found found = add_(gradient_ + base, residual, length(tile), threshold, candidates, bad);
    if (found.not_finite) not_finite_.add(base, bad, found.not_finite);
    return found;
  }

  // Moves the tile's candidates from the residual to the list, where there is room; the tile is still in the cache.
  void move(CandidateList& list, int64_t tile, const uint16_t* candidates, uint32_t count) {
    if (!list.reserve(tile, count)) return;
    const int64_t base = tile * kTile;
    float* values = list.values(tile);
    std::copy(candidates, candidates + count, list.positions(tile));
    for (uint32_t j = 0; j < count; ++j) values[j] = entry(base + candidates[j]);
    if (s_.residual)
      for (uint32_t j = 0; j < count; ++j) s_.residual[base + candidates[j]] = 0.0f;
  }

  void add_and_list(uint32_t threshold) {
    const int64_t turns = std::clamp<int64_t>(tiles_ / 16, 1, 512);
    each(turns, [&](int64_t turn) {
      each_tile(turn, turns, [&](int64_t tile) {
        uint16_t candidates[kTile];
        const Found found = add_tile(tile, threshold, candidates);
        move(*list_, tile, candidates, found.candidates);
      });
    });
  }

  static void tally(Histogram& histogram, uint32_t turn, uint32_t bin) {
    ++histogram.bins[turn % kCopies][std::min(bin, kBins - 1)];
  }

  void keep(int64_t block, const Histogram& histogram) {
    for (uint32_t bin = 0; bin < kBins; ++bin) {
      uint32_t sum = 0;
      for (const auto& copy : histogram.bins) sum += copy[bin];
      counts_[block * kBins + bin] = sum;
    }
  }

  void add_and_count(uint32_t lower) {
    counts_.resize(blocks_ * kBins);
    each(blocks_, [&](int64_t block) {
      Histogram histogram{};
      each_tile(block, blocks_, [&](int64_t tile) {
        uint16_t candidates[kTile];
        const Found found = add_tile(tile, lower, candidates);
        for (uint32_t j = 0; j < found.candidates; ++j)
          tally(histogram, j, (key_of(entry(tile * kTile + candidates[j])) - lower) >> kBandShift);
      });
      keep(block, histogram);
    });
  }

  // Calls body(index, value) for the tile's finite entries from the band upwards (perhaps some below it too), ascending.
  template <class Body>
  void visit(int64_t tile, const Body& body) {
    const int64_t base = tile * kTile;
    if (list_) {
      const uint16_t* positions = list_->positions(tile);
      const float* values = list_->values(tile);
      for (uint32_t j = 0; j < list_->length(tile); ++j) body(base + positions[j], values[j]);
      return;
    }
    uint16_t positions[kTile], bad[kTile];
    const void* data = s_.residual ? static_cast<const void*>(s_.residual + base) : gradient_ + base;
    const uint32_t found = scan_(data, nullptr, length(tile), band_.lower, positions, bad).candidates;
    for (uint32_t j = 0; j < found; ++j) {
      const int64_t i = base + positions[j];
      if (!not_finite_.contains(i)) body(i, entry(i));  // else r holds an older value there, which is not to be chosen
    }
  }

  // Counts the band's entries in bins of 2^shift keys from `lower` on; the last bin holds all that follows.
  void count(uint32_t lower, int shift) {
    counts_.resize(blocks_ * kBins);
    each(blocks_, [&](int64_t block) {
      Histogram histogram{};
      uint32_t turn = 0;
      each_tile(block, blocks_, [&](int64_t tile) {
        visit(tile, [&](int64_t, float value) {
          const uint32_t key = key_of(value);
          if (key >= lower && key < band_.upper) tally(histogram, turn++, (key - lower) >> shift);
        });
      });
      keep(block, histogram);
    });
  }

  // Makes the band the bin, of those counted from `lower` on, in which the last entry to be chosen lies. False where that bin
  // was not counted by itself.
  bool narrow(uint32_t lower, int shift) {
    std::vector<int64_t> totals(kBins);
    for (int64_t block = 0; block < blocks_; ++block)
      for (uint32_t bin = 0; bin < kBins; ++bin) totals[bin] += counts_[block * kBins + bin];
    uint32_t bin = kBins - 1;
    int64_t need = band_.need;
    for (; totals[bin] < need; --bin) {
      if (bin == 0) return false;
      need -= totals[bin];
    }
    const uint64_t upper = lower + (static_cast<uint64_t>(bin + 1) << shift);
    if (bin == kBins - 1 && upper < band_.upper) return false;
    above_.resize(blocks_);
    inside_.resize(blocks_);
    for (int64_t block = 0; block < blocks_; ++block) {
      const uint32_t* counts = &counts_[block * kBins];
      inside_[block] = counts[bin];
      for (uint32_t other = bin + 1; other < kBins; ++other) above_[block] += counts[other];
    }
    band_ = {lower + (bin << shift), static_cast<uint32_t>(std::min<uint64_t>(upper, band_.upper)), totals[bin], need};
    return true;
  }

  // Narrows to mstopk's band: at once where the bins from `lower` on hold it, else from the coarse bins.
  void find_band(uint32_t lower) {
    if (list_ && (!list_->complete() || list_->size() < band_.need)) {  // a wrong prediction
      put_back();
    } else {
      if (list_) count(lower, kBandShift);  // else counted while adding
      if (narrow(lower, kBandShift)) return;
    }
    for (const int shift : {kCoarseShift, kBandShift}) {
      count(band_.lower, shift);
      narrow(band_.lower, shift);
    }
  }

  void put_back() {
    if (s_.residual) {
      each(blocks_, [&](int64_t block) {
        each_tile(block, blocks_, [&](int64_t tile) { visit(tile, [&](int64_t i, float value) { s_.residual[i] = value; }); });
      });
    }
    list_.reset();
  }

  // Narrows the band until all that it holds is chosen or alike.
  void refine() {
    const int64_t reached = s_.k - band_.need + band_.inside;
    if (!list_ && band_.inside > band_.need && reached <= capacity_ * 3 / 4) {  // then no more passes over everything
      auto list = std::make_unique<CandidateList>(tiles_, reached);
      each(blocks_, [&](int64_t block) {
        each_tile(block, blocks_, [&](int64_t tile) {
          uint16_t positions[kTile];
          uint32_t found = 0;
          visit(tile, [&](int64_t i, float) { positions[found++] = static_cast<uint16_t>(i - tile * kTile); });
          move(*list, tile, positions, found);
        });
      });
      list_ = std::move(list);
    }
    if (band_.inside == band_.need) return;
    count(band_.lower, 0);
    narrow(band_.lower, 0);
  }

  void emit() {
    const int64_t first = s_.rule == Rule::mstopk ? below(s_.seed, band_.inside - band_.need + 1) : 0, last = first + band_.need;
    std::vector<int64_t> outs(blocks_), insides(blocks_);
    for (int64_t block = 0, above = 0, inside = 0; block < blocks_; ++block) {
      outs[block] = above + std::clamp(inside, first, last) - first;
      insides[block] = inside;
      above += above_[block];
      inside += inside_[block];
    }
    each(blocks_, [&](int64_t block) {
      int64_t out = outs[block], inside = insides[block];
      each_tile(block, blocks_, [&](int64_t tile) {
        visit(tile, [&](int64_t i, float value) {
          const uint32_t key = key_of(value);
          bool chosen = key >= band_.upper;
          if (!chosen && key >= band_.lower) {
            chosen = inside >= first && inside < last;
            ++inside;
          }
          if (chosen) {
            s_.indices[out] = static_cast<int32_t>(i);
            s_.values[out++] = value;
          }
          if (s_.residual && chosen != (list_ != nullptr)) s_.residual[i] = chosen ? 0.0f : value;
        });
      });
    });
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
  const int64_t capacity_;  // candidates that may be listed
  int64_t blocks_ = 1;      // of consecutive tiles: the unit of counting; fewer where there is a list, to keep both small
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
