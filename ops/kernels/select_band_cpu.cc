// See select_band.h.
#include "kernels/select_band.h"

#include <algorithm>
#include <array>
#include <mutex>

#include "kernels/select_scan.h"

namespace tfcommx {
namespace {

constexpr uint32_t kBins = 2048;
constexpr int kBinBits = 11;

struct Keys {
  std::vector<uint32_t> keys;   // those listed inside the window, block by block
  std::vector<int64_t> starts;  // by block, in `keys`
};

// Collects the listed keys inside the window: few if the window is narrow.
Keys collect_keys(const Gathered& gathered, const Blocks& blocks, const ParallelFor& each) {
  Keys all;
  all.starts.assign(blocks.count + 1, 0);
  for (int64_t block = 0; block < blocks.count; ++block)
    all.starts[block + 1] = all.starts[block] + gathered.counts[block].inside;
  all.keys.resize(all.starts[blocks.count]);
  each(blocks.count, [&](int64_t block) {
    auto out = all.keys.begin() + all.starts[block];
    blocks.each_tile(block, [&](int64_t tile) {
      const float* values = gathered.list->values(tile);
      const uint32_t length = gathered.list->length(tile);
      uint32_t keys[kTile], count = 0;
      // Without a branch: which are inside cannot be predicted.
      for (uint32_t j = 0; j < length; ++j) {
        keys[count] = key_of(values[j]);
        count += gathered.listed(keys[count]);
      }
      out = std::copy(keys, keys + count, out);
    });
  });
  return all;
}

// Counts the keys in the band in bins of 2^shift.
std::vector<int64_t> histogram(const std::vector<uint32_t>& keys, const Band& band, int shift,
                               const ParallelFor& each) {
  const int64_t count = static_cast<int64_t>(keys.size()),
                parts = std::clamp<int64_t>(count / 65536, 1, 16);
  std::vector<int64_t> totals(kBins);
  std::mutex mutex;
  each(parts, [&](int64_t part) {
    std::array<uint32_t, kBins> bins{};
    for (int64_t j = count * part / parts; j < count * (part + 1) / parts; ++j)
      if (band(keys[j])) ++bins[(keys[j] - band.lower) >> shift];
    // In any order, because sums of integers do not depend on it
    const std::lock_guard<std::mutex> lock(mutex);
    for (uint32_t bin = 0; bin < kBins; ++bin) totals[bin] += bins[bin];
  });
  return totals;
}

// Narrows the band to the one in which its need-th largest key lies, of 2^unit keys or more if all
// of it are to be chosen. Returns how many of it are.
int64_t narrow(const std::vector<uint32_t>& keys, int64_t need, int unit, const ParallelFor& each,
               Band* band) {
  for (;;) {
    const uint32_t width = band->upper - band->lower;
    const int shift = std::max(unit, 32 - __builtin_clz((width - 1) | 1) - kBinBits);
    const std::vector<int64_t> totals = histogram(keys, *band, shift, each);
    uint32_t bin = kBins - 1;
    for (; totals[bin] < need; --bin) need -= totals[bin];
    *band = {band->lower + (bin << shift),
             std::min(band->upper, band->lower + ((bin + 1) << shift))};
    if (shift == unit || totals[bin] == need) return need;
  }
}

// Counts, block by block, the entries above the band and in it.
void count_blocks(const Gathered& gathered, const Blocks& blocks, const Keys& all,
                  FoundBand* found) {
  const Band band = found->band;
  found->above.assign(blocks.count, 0);
  found->inside.assign(blocks.count, 0);
  for (int64_t block = 0; block < blocks.count; ++block) {
    const Counts& counts = gathered.counts[block];
    int64_t above = counts.above, inside = 0;
    const auto put = [&](uint32_t key, int64_t count) {
      above += key >= band.upper ? count : 0;
      inside += band(key) ? count : 0;
    };
    put(gathered.high.lower, counts.high);
    put(gathered.low.lower, counts.low);
    for (int64_t j = all.starts[block]; j < all.starts[block + 1]; ++j) put(all.keys[j], 1);
    found->above[block] = above;
    found->inside[block] = inside;
  }
}

}  // namespace

bool find_band(const Gathered& gathered, const Blocks& blocks, int64_t need, int unit,
               const ParallelFor& each, FoundBand* found) {
  Counts all;
  for (const Counts& counts : gathered.counts) {
    all.above += counts.above;
    all.high += counts.high;
    all.low += counts.low;
    all.inside += counts.inside;
  }
  if (!gathered.list->complete() || need <= all.above) return false;
  need -= all.above;
  const int64_t after = need - all.high - all.inside;  // to be chosen at the window's lower end
  if (after > all.low) return false;
  const Keys keys = collect_keys(gathered, blocks, each);
  if (need <= all.high) {
    found->band = gathered.high;
  } else if (after > 0) {
    found->band = gathered.low;
    need = after;
  } else {
    found->band = gathered.listed;
    need = narrow(keys.keys, need - all.high, unit, each, &found->band);
  }
  found->need = need;
  count_blocks(gathered, blocks, keys, found);
  return true;
}

}  // namespace tfcommx
