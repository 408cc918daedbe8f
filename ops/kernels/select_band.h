// The search for the band of keys in which the k-th largest lies, among what the first pass listed
// and counted.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/parallel.h"
#include "kernels/select_list.h"

namespace tfcommx {

// Bits of a key that mstopk's bands leave open: equal exponent, equal first twelve mantissa bits.
constexpr int kBandBits = 11;

// Keys in [lower, upper).
struct Band {
  uint32_t lower = 0, upper = 0;
  bool operator()(uint32_t key) const { return key - lower < upper - lower; }
};

// Entries of one block, by key.
struct Counts {
  int64_t above = 0, inside = 0;  // above the window; listed and inside it
  int64_t high = 0, low = 0;      // at its upper end, at its lower end, if those are not listed
};

// The tiles of a vector, in blocks of consecutive ones: the unit of counting and of reading again.
struct Blocks {
  int64_t tiles = 0, count = 0;

  // Calls body(tile) for the tiles of a block, in order.
  template <class Body>
  void each_tile(int64_t block, const Body& body) const {
    for (int64_t tile = tiles * block / count; tile < tiles * (block + 1) / count; ++tile)
      body(tile);
  }
};

// What the first pass leaves for the search.
struct Gathered {
  Band low, high;  // the bands at the window's ends
  Band listed;     // keys of the entries that are in the list
  std::unique_ptr<CandidateList> list;
  std::vector<Counts> counts;  // by block
};

// The band that holds the k-th largest: everything above it is chosen, and `need` entries of it.
struct FoundBand {
  Band band;
  int64_t need = 0;
  std::vector<int64_t> above, inside;  // by block: entries above the band, and in it
};

// Finds the band of the need-th largest finite entry, 1 <= need: of mstopk's width if unit is
// kBandBits, of one key if it is 0. False if the prediction of the window was wrong; then `found`
// is not written. Cost: a pass over the listed keys, and one over those inside the window for each
// factor of 2048 by which the band is narrower. Four bytes for each listed key inside the window.
bool find_band(const Gathered& gathered, const Blocks& blocks, int64_t need, int unit,
               const ParallelFor& each, FoundBand* found);

}  // namespace tfcommx
