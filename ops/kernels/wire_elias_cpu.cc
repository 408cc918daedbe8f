// Elias-Fano coding of ascending indices, on CPUs.
#include "kernels/wire_elias.h"

#include <algorithm>

namespace tfcommx {

int64_t elias_encode_cpu(const EliasLayout& layout, const int32_t* indices, int32_t* words) {
  const int width = layout.low_bits;
  const int32_t mask = (1 << width) - 1;
  uint32_t* bitmap = reinterpret_cast<uint32_t*>(words);
  uint32_t* lows = bitmap + layout.bitmap();
  std::fill_n(bitmap, layout.bitmap(), 0u);
  uint64_t waiting = 0;  // low bits that do not fill a word yet
  int filled = 0;
  int64_t before = -1;
  for (int64_t i = 0; i < layout.k; ++i) {
    const int64_t index = indices[i];
    if (index <= before || index >= layout.size) return i;
    before = index;
    const int64_t bit = layout.bit(i, indices[i]);
    bitmap[bit / 32] |= 1u << (bit % 32);
    waiting |= static_cast<uint64_t>(indices[i] & mask) << filled;
    filled += width;
    if (filled >= 32) {
      *lows++ = static_cast<uint32_t>(waiting);
      waiting >>= 32;
      filled -= 32;
    }
  }
  if (filled) *lows = static_cast<uint32_t>(waiting);
  return -1;
}

bool elias_decode_cpu(const EliasLayout& layout, const int32_t* words, int64_t first,
                      int32_t* indices) {
  const int width = layout.low_bits;
  const int64_t k = layout.k, mask = (1 << width) - 1;
  const uint32_t* bitmap = reinterpret_cast<const uint32_t*>(words);
  const uint32_t* lows = bitmap + layout.bitmap();
  int64_t i = 0, largest = -1, at = 0;  // at: the index's first bit in the low part
  for (int64_t word = 0; word < layout.bitmap(); ++word) {
    uint32_t bits = bitmap[word];
    if (__builtin_popcount(bits) > k - i) return false;
    for (; bits; bits &= bits - 1, ++i, at += width) {
      const int64_t high = word * 32 + __builtin_ctz(bits) - i;
      int64_t index = high << width;
      if (width) {
        const uint32_t* low = lows + at / 32;
        index |= static_cast<int64_t>((low[0] | static_cast<uint64_t>(low[1]) << 32) >> (at % 32)) &
                 mask;
      }
      largest = std::max(largest, index);
      indices[i] = static_cast<int32_t>(first + index);
    }
  }
  return i == k && largest < layout.size;
}

}  // namespace tfcommx
