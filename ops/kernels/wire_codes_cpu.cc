// Values as codes of 8 or 4 bits, on CPUs. Loops over whole blocks have a fixed length, so that the
// compiler makes vector instructions of them.
#include "kernels/wire_codes.h"

#include "kernels/flush_denormals.h"

#include <algorithm>
#include <cstring>

#include "kernels/clones.h"

namespace tfcommx {
namespace {

template <int kBits>
struct Block {
  static constexpr int kLargest = largest_code(kBits);
  float step;
  int codes[kCodeBlock];

  explicit Block(const float* values) {
    uint32_t size = 0;
    for (int i = 0; i < kCodeBlock; ++i) size = std::max(size, finite_size(values[i]));
    step = step_of(size, kLargest);
    for (int i = 0; i < kCodeBlock; ++i) codes[i] = code_of(values[i], step, kLargest);
  }

  void pack(int32_t* words) const {  // kBits words hold 32 codes
    uint8_t bytes[kCodeBlock];
    for (int i = 0; i < kCodeBlock; ++i)
      bytes[i] = static_cast<uint8_t>(codes[i] & ((1 << kBits) - 1));
    if (kBits == 8) {
      std::memcpy(words, bytes, sizeof bytes);
      return;
    }
    for (int i = 0; i < kBits; ++i) {  // the low halves of eight bytes become one word
      uint64_t halves;
      std::memcpy(&halves, bytes + 8 * i, 8);
      halves = (halves | halves >> 4) & 0x00ff00ff00ff00ff;
      halves = (halves | halves >> 8) & 0x0000ffff0000ffff;
      words[i] = static_cast<int32_t>(halves | halves >> 16);
    }
  }
};

// Calls body(values of a whole block, its number, how many of them there are): of the last block a
// copy that ends in zeros.
template <class Body>
void each_block(int64_t k, const float* values, const Body& body) {
  const int64_t whole = k / kCodeBlock;
  for (int64_t block = 0; block < whole; ++block)
    body(values + block * kCodeBlock, block, kCodeBlock);
  if (const int rest = static_cast<int>(k % kCodeBlock)) {
    float last[kCodeBlock] = {};
    std::copy_n(values + whole * kCodeBlock, rest, last);
    body(last, whole, rest);
  }
}

template <int kBits>
void write(const CodeLayout& layout, const float* values, int32_t* words) {
  uint16_t* steps = reinterpret_cast<uint16_t*>(words);
  int32_t *codes = words + layout.steps(), *end = codes + layout.codes();
  if (layout.blocks() % 2) steps[layout.blocks()] = 0;
  each_block(layout.k, values, [&](const float* from, int64_t number, int) {
    const Block<kBits> block(from);
    steps[number] = static_cast<uint16_t>(bits_of(block.step) >> 16);
    int32_t packed[kBits], *to = codes + number * kBits;
    block.pack(packed);
    std::memcpy(to, packed, end - to >= kBits ? sizeof packed : 4 * (end - to));
  });
}

template <int kBits>
void round(const CodeLayout& layout, const float* values, float* written, float* errors) {
  each_block(layout.k, values, [&](const float* from, int64_t number, int count) {
    const Block<kBits> block(from);
    float sent[kCodeBlock], left[kCodeBlock];
    for (int i = 0; i < kCodeBlock; ++i) {
      sent[i] = value_of(block.codes[i], block.step, block.kLargest);
      left[i] = rounding_error(from[i], sent[i]);
    }
    const size_t bytes = count == kCodeBlock ? sizeof sent : 4 * count;
    std::memcpy(written + number * kCodeBlock, sent, bytes);
    std::memcpy(errors + number * kCodeBlock, left, bytes);
  });
}

template <int kBits>
void read(const CodeLayout& layout, const int32_t* words, float* values) {
  constexpr int kPerWord = 32 / kBits;
  const uint16_t* steps = reinterpret_cast<const uint16_t*>(words);
  const int64_t whole = layout.k / kCodeBlock;
  for (int64_t block = 0; block < whole; ++block) {
    const float step = from_bfloat16(steps[block]);
    const int32_t* codes = words + layout.steps() + block * kBits;
    float* to = values + block * kCodeBlock;
    for (int i = 0; i < kBits; ++i) {
      for (int j = 0; j < kPerWord; ++j) {
        const uint32_t top = static_cast<uint32_t>(codes[i]) << (32 - kBits * (j + 1));
        const int code = static_cast<int32_t>(top) >> (32 - kBits);
        to[i * kPerWord + j] = value_of(code, step, largest_code(kBits));
      }
    }
  }
  for (int64_t i = whole * kCodeBlock; i < layout.k; ++i) values[i] = coded_value(layout, words, i);
}

}  // namespace

TFCOMMX_CLONES
void codes_write_cpu(const CodeLayout& layout, const float* values, int32_t* words) {
  const FlushDenormals flush;
  return layout.bits == 8 ? write<8>(layout, values, words) : write<4>(layout, values, words);
}

TFCOMMX_CLONES
void codes_round_cpu(const CodeLayout& layout, const float* values, float* written, float* errors) {
  const FlushDenormals flush;
  return layout.bits == 8 ? round<8>(layout, values, written, errors)
                          : round<4>(layout, values, written, errors);
}

TFCOMMX_CLONES
void codes_read_cpu(const CodeLayout& layout, const int32_t* words, float* values) {
  return layout.bits == 8 ? read<8>(layout, words, values) : read<4>(layout, words, values);
}

}  // namespace tfcommx
