// Elias-Fano coding of ascending indices, on CPUs.
//
// Eight low parts of `width` bits fill `width` bytes. Up to 8 bits, they are put together and taken
// apart in a register; wider ones, of densities below 1 / 512, one by one.
#include "kernels/wire_elias.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/clones.h"

namespace tfcommx {
namespace {

constexpr int kBlock = 64, kWidest = 8;

// Of each byte: how many bits are set, and which, from the lowest.
struct SetBits {
  std::array<uint8_t, 256> count{};
  std::array<std::array<uint8_t, 8>, 256> places{};

  constexpr SetBits() {
    for (int byte = 0; byte < 256; ++byte)
      for (int bit = 0; bit < 8; ++bit)
        if (byte >> bit & 1) places[byte][count[byte]++] = bit;
  }
};
constexpr SetBits kSetBits;

// Between eight bytes that hold `width` bits each and 8 * width bits without gaps, width <= 8:
// pairs of parts move together, or apart, in three steps.
class Gaps {
 public:
  explicit Gaps(int width) : width_(width) {
    for (int step = 0; step < 3; ++step) {
      const int bits = width << step, lane = 16 << step;
      low_[step] = 0;
      for (int at = 0; at < 64; at += lane) low_[step] |= ((uint64_t{1} << bits) - 1) << at;
    }
  }

  uint64_t closed(uint64_t x) const {
    for (int step = 0; step < 3; ++step) x = (x & low_[step]) | (x >> shift(step) & high(step));
    return x;
  }

  uint64_t opened(uint64_t x) const {
    for (int step = 2; step >= 0; --step) x = (x & low_[step]) | (x & high(step)) << shift(step);
    return x;
  }

 private:
  int shift(int step) const { return (8 - width_) << step; }
  uint64_t high(int step) const { return low_[step] << (width_ << step); }

  int width_;
  uint64_t low_[3];  // the lower part of each pair
};

// Returns the position of the first index that is refused; -1: none.
int64_t first_refused(const EliasLayout& layout, const int32_t* indices) {
  if (layout.k == 0) return -1;
  // Without a branch, for vector instructions; which one it is matters only after a refusal
  int refused = indices[0] < 0 || indices[layout.k - 1] >= layout.size;
  for (int64_t i = 1; i < layout.k; ++i) refused |= indices[i] <= indices[i - 1];
  if (!refused) return -1;
  int64_t i = 0;
  for (int64_t before = -1; indices[i] > before && indices[i] < layout.size; ++i)
    before = indices[i];
  return i;
}

void write_bitmap(const EliasLayout& layout, const int32_t* indices, uint32_t* bitmap) {
  std::fill_n(bitmap, layout.bitmap(), 0u);
  // Neighbours set bits of the same word, which must be written before it is read again. So four
  // places of the vector take turns
  constexpr int kTurns = 4;
  const int64_t part = layout.k / kTurns;
  const EliasLayout mine = layout;  // which no store can change
  const auto set = [=](int64_t i) {
    const uint64_t bit = mine.bit(i, indices[i]);
    bitmap[bit / 32] |= 1u << (bit % 32);
  };
  for (int64_t i = 0; i < part; ++i)
    for (int turn = 0; turn < kTurns; ++turn) set(turn * part + i);
  for (int64_t i = kTurns * part; i < layout.k; ++i) set(i);
}

void write_lows(const EliasLayout& layout, const int32_t* indices, char* lows) {
  const Gaps gaps(layout.low_bits);
  char* const end = lows + 4 * layout.lows();
  for (int64_t i = 0; i < layout.k; i += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, layout.k - i);
    uint8_t bytes[kBlock] = {};
    if (count == kBlock)
      for (int j = 0; j < kBlock; ++j) bytes[j] = static_cast<uint8_t>(indices[i + j]);
    else
      for (int j = 0; j < count; ++j) bytes[j] = static_cast<uint8_t>(indices[i + j]);
    for (int64_t j = 0; j < count; j += 8, lows += layout.low_bits) {
      uint64_t group;
      std::memcpy(&group, bytes + j, 8);
      group = gaps.closed(group);
      // What is too long is overwritten by the next group
      std::memcpy(lows, &group, std::min<int64_t>(8, end - lows));
    }
  }
}

void write_wide_lows(const EliasLayout& layout, const int32_t* indices, uint32_t* lows) {
  const int width = layout.low_bits;
  uint64_t waiting = 0;  // low bits that do not fill a word yet
  int filled = 0;
  for (int64_t i = 0; i < layout.k; ++i) {
    waiting |= static_cast<uint64_t>(indices[i] & ((1 << width) - 1)) << filled;
    filled += width;
    if (filled >= 32) {
      *lows++ = static_cast<uint32_t>(waiting);
      waiting >>= 32;
      filled -= 32;
    }
  }
  if (filled) *lows = static_cast<uint32_t>(waiting);
}

// Writes the places of the bitmap's k ones, ascending. Returns whether there are k.
bool read_bitmap(const EliasLayout& layout, const uint8_t* bitmap, int32_t* places) {
  int64_t i = 0, byte = 0;
  const int64_t bytes = 4 * layout.bitmap();
  for (; byte < bytes && i + 8 <= layout.k; ++byte) {
    const uint8_t bits = bitmap[byte];
    // All eight, because a loop of varying length is mispredicted; the next byte overwrites the
    // places beyond this one's ones
    for (int j = 0; j < 8; ++j)
      places[i + j] = static_cast<int32_t>(8 * byte) + kSetBits.places[bits][j];
    i += kSetBits.count[bits];
  }
  for (; byte < bytes; ++byte) {
    const uint8_t bits = bitmap[byte], count = kSetBits.count[bits];
    if (count > layout.k - i) return false;
    for (int j = 0; j < count; ++j)
      places[i++] = static_cast<int32_t>(8 * byte) + kSetBits.places[bits][j];
  }
  return i == layout.k;
}

// Reads `count` low parts from number i on, i a multiple of kBlock.
void read_lows(const EliasLayout& layout, const Gaps& gaps, const uint32_t* words, int64_t i,
               int64_t count, uint32_t* lows) {
  const int width = layout.low_bits;
  if (width > kWidest) {
    for (int64_t at = i * width; count; --count, at += width) {
      const uint64_t two = words[at / 32] | static_cast<uint64_t>(words[at / 32 + 1]) << 32;
      *lows++ = static_cast<uint32_t>(two >> at % 32) & ((1u << width) - 1);
    }
    return;
  }
  const char* from = reinterpret_cast<const char*>(words) + i / 8 * width;
  const char* const end = reinterpret_cast<const char*>(words + layout.lows());
  uint8_t bytes[kBlock];
  for (int64_t j = 0; j < count; j += 8, from += width) {
    uint64_t group = 0;
    std::memcpy(&group, from, std::min<int64_t>(8, end - from));
    group = gaps.opened(group);
    std::memcpy(bytes + j, &group, 8);
  }
  for (int64_t j = 0; j < count; ++j) lows[j] = bytes[j];
}

// Makes an index of each place and its low part. Returns whether they ascend and are in [0, size).
bool join(const EliasLayout& layout, const uint32_t* words, int64_t first, int32_t* places) {
  const int width = layout.low_bits;
  // Places ascend, so the last high part is the largest; within this limit no index overflows
  const uint32_t highest =
      static_cast<uint32_t>(places[layout.k - 1]) - static_cast<uint32_t>(layout.k - 1);
  if (highest > (layout.size - 1) >> width) return false;
  const Gaps gaps(std::min(width, kWidest));
  uint32_t wrong = 0, lows[kBlock];
  for (int64_t i = 0; i < layout.k; i += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, layout.k - i);
    read_lows(layout, gaps, words, i, count, lows);
    for (int64_t j = 0; j < count; ++j) {
      const uint32_t high = static_cast<uint32_t>(places[i + j]) - static_cast<uint32_t>(i + j);
      const uint32_t index = high << width | lows[j];
      places[i + j] = static_cast<int32_t>(static_cast<uint32_t>(first) + index);
    }
  }
  for (int64_t i = 1; i < layout.k; ++i) wrong |= places[i] <= places[i - 1];
  return !wrong &&
         static_cast<uint32_t>(places[layout.k - 1]) - static_cast<uint32_t>(first) < layout.size;
}

}  // namespace

TFCOMMX_CLONES
int64_t elias_encode_cpu(const EliasLayout& layout, const int32_t* indices, int32_t* words) {
  const int64_t refused = first_refused(layout, indices);
  if (refused >= 0) return refused;
  write_bitmap(layout, indices, reinterpret_cast<uint32_t*>(words));
  int32_t* lows = words + layout.bitmap();
  if (layout.low_bits > kWidest)
    write_wide_lows(layout, indices, reinterpret_cast<uint32_t*>(lows));
  else if (layout.low_bits)
    write_lows(layout, indices, reinterpret_cast<char*>(lows));
  return -1;
}

TFCOMMX_CLONES
bool elias_decode_cpu(const EliasLayout& layout, const int32_t* words, int64_t first,
                      int32_t* indices) {
  if (layout.k == 0) return true;  // also of an empty vector, which has no highest index
  if (!read_bitmap(layout, reinterpret_cast<const uint8_t*>(words), indices)) return false;
  return join(layout, reinterpret_cast<const uint32_t*>(words + layout.bitmap()), first, indices);
}

}  // namespace tfcommx
