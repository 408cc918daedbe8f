// Values as codes of 8 or 4 bits, on CPUs. Loops over whole blocks have a fixed length, so that the
// compiler makes vector instructions of them.
#include "kernels/wire_codes.h"

#include <algorithm>
#include <cstring>

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

  void pack(int32_t* words) const {
    constexpr int kPerWord = 32 / kBits;
    for (int i = 0; i < kBits; ++i) {  // kBits words hold 32 codes
      uint32_t word = 0;
      for (int j = 0; j < kPerWord; ++j)
        word |= (static_cast<uint32_t>(codes[i * kPerWord + j]) & ((1u << kBits) - 1))
                << (j * kBits);
      words[i] = static_cast<int32_t>(word);
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
    std::copy_n(packed, std::min<int64_t>(kBits, end - to), to);
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
    std::copy_n(sent, count, written + number * kCodeBlock);
    std::copy_n(left, count, errors + number * kCodeBlock);
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

void codes_write_cpu(const CodeLayout& layout, const float* values, int32_t* words) {
  return layout.bits == 8 ? write<8>(layout, values, words) : write<4>(layout, values, words);
}

void codes_round_cpu(const CodeLayout& layout, const float* values, float* written, float* errors) {
  return layout.bits == 8 ? round<8>(layout, values, written, errors)
                          : round<4>(layout, values, written, errors);
}

void codes_read_cpu(const CodeLayout& layout, const int32_t* words, float* values) {
  return layout.bits == 8 ? read<8>(layout, words, values) : read<4>(layout, words, values);
}

}  // namespace tfcommx
