// A dense vector on the wire in codes of 8, 4, 2 or 1 bits; a residual keeps what they lose.
//
// The vector is cut into shards of equal length, and a shard into blocks, of which the last may be
// shorter. The entries of a block share a step:
//
//   bits   entries   step                  an entry is written as
//   8      128       largest |x| / 127     the nearest multiple of the step, ties to even
//   4      128       largest |x| / 7       likewise
//   2      128       5/8 of the mean |x|   the nearest of -3, -1, 1 and 3 steps
//   1      512       the mean |x|          -1 or 1 step, by its sign
//
// Codes of 8 and 4 bits cut nothing off, so an error is at most half a step. The mean magnitude is
// the step with which signs have the least squared error, whatever the entries. Four equidistant
// levels have it for a normal distribution at .9957 standard deviations apart (Max, "Quantizing for
// Minimum Distortion", 1960): then the step is .624 of the mean magnitude. 12 % of the squares are
// left then, and 36 % by signs. Error feedback needs no more than that what is left of a block has
// smaller squares than the block, and it does, whatever the entries. Blocks of 1 bit are longer,
// because a step for 128 entries would add an eighth to their bytes, and a mean changes less with the
// length than a largest magnitude does.
//
// Steps are rounded to bfloat16, which reaches as far as float32. A step is 0, and so is what is
// written, if the largest or mean magnitude is below 2^-100. If an entry is NaN or infinite, the step
// is NaN, and so is the whole block; its residuals stay as they are. Padding at the end of the vector
// takes no part: its codes are 0 and it has no residual.
//
// Results are the same on CPUs and GPUs: sums have a fixed order, and denormals are zero.
#pragma once

#include <cstdint>

#include "kernels/dense.h"
#include "kernels/parallel.h"
#include "kernels/wire_codes.h"

namespace tfcommx {

// Entries of a block, and their logarithm: a shift takes less time than a division.
TFCOMMX_DEVICE constexpr int low_bits_log2(int bits) { return bits == 1 ? 9 : 7; }
TFCOMMX_DEVICE constexpr int low_bits_block(int bits) { return 1 << low_bits_log2(bits); }

// int32 words of the codes of a block.
TFCOMMX_DEVICE constexpr int low_bits_words(int bits) { return low_bits_block(bits) * bits / 32; }

// The int32 words of a shard: the steps, as bfloat16, ending in zero bits, then the codes of each
// block. The code of entry i of a block of `words` words is in its word i % words, from bit
// i / words * bits on: so neighbours are in different words, which are made and read together.
struct LowBits {
  int bits;         // of a code: 8, 4, 2 or 1
  int64_t entries;  // of a shard

  TFCOMMX_DEVICE int block() const { return low_bits_block(bits); }
  TFCOMMX_DEVICE int64_t blocks() const { return (entries + block() - 1) >> low_bits_log2(bits); }
  TFCOMMX_DEVICE int64_t steps() const { return (blocks() + 1) / 2; }
  TFCOMMX_DEVICE int64_t words() const { return steps() + blocks() * low_bits_words(bits); }
  // Entries of a block that are not padding: of the shard these are the first `real`.
  TFCOMMX_DEVICE int count(int64_t block_number, int64_t real) const {
    const int64_t end = real < entries ? real : entries, left = end - block_number * block();
    return left < 0 ? 0 : left < block() ? static_cast<int>(left) : block();
  }
};

// The largest multiple of the step that is written.
TFCOMMX_DEVICE constexpr int largest_multiple(int bits) {
  return bits >= 4 ? largest_code(bits) : bits == 2 ? 3 : 1;
}

// The mean magnitude of `count` entries. sum: of magnitudes / the block's length, in pairs of entries
// half a block apart, then of sums a quarter apart, and so on.
template <int bits>
TFCOMMX_DEVICE float mean_of(float sum, int count) {
  constexpr float kBlock = low_bits_block(bits);
  return count ? product(sum, divided(kBlock, static_cast<float>(count))) : 0.0f;
}

// size: the largest magnitude of a block, or the mean.
template <int bits>
TFCOMMX_DEVICE float low_bits_step(float size) {
  constexpr float kMost = 0x1.fffffep127f, kLargest = static_cast<float>(largest_multiple(bits));
  if (size < 0x1p-100f) return 0;
  const float step = bits >= 4 ? divided(size, kLargest) : bits == 2 ? product(size, 0.625f) : size;
  const uint32_t nearest = to_bfloat16(step);
  // Not above: kLargest steps must be finite. A quotient that the compiler knows
  const uint32_t limit = bits_of(kMost / kLargest) >> 16;
  return from_bfloat16(static_cast<uint16_t>(nearest < limit ? nearest : limit));
}

// What low_bits_code compares entries with: 1 / step; for 2 bits two steps.
template <int bits>
TFCOMMX_DEVICE float low_bits_scale(float step) {
  if (bits == 2) return step > 0 ? product(step, 2.0f) : float_of(kInfinite);
  return step > 0 ? divided(1.0f, step) : 0.0f;
}

// The code of a finite entry.
template <int bits>
TFCOMMX_DEVICE uint32_t low_bits_code(float x, float scale) {
  const uint32_t negative = bits_of(x) >> 31;
  if (bits == 1) return negative;
  if (bits == 2) {
    const float size = float_of(bits_of(x) & 0x7fffffff);
    return negative | (mask_if(size >= scale) & 2);
  }
  // Added to a number below 2^22 it leaves the nearest integer in the low bits
  constexpr float kInteger = 0x1.8p23f;
  return (bits_of(product(x, scale) + kInteger) - bits_of(kInteger)) & ((1u << bits) - 1);
}

// What a code stands for, exactly: a multiple of at most 7 bits of a step of 8 bits. Only the lowest
// `bits` bits of `code` count.
template <int bits>
TFCOMMX_DEVICE float low_bits_value(uint32_t code, float step) {
  if (bits >= 4) {  // Shifted to the top and back, so that the sign fills the rest
    const int32_t number = static_cast<int32_t>(code << (32 - bits)) >> (32 - bits);
    return product(static_cast<float>(number), step);
  }
  const uint32_t three = bits == 2 ? mask_if(code & 2) : 0;
  const uint32_t size = (bits_of(product(step, 3.0f)) & three) | (bits_of(step) & ~three);
  return float_of(size ^ code << 31);  // The step's sign counts, too, if a damaged one has one
}

// Writes gradient + residual, of shards * layout.entries entries each, to words[shards *
// layout.words()]; the residual keeps what is not written. real: entries that are no padding. Cost:
// one pass, 12 bytes an entry and the words.
void low_bits_write_cpu(const LowBits& layout, int64_t shards, const float* gradient,
                        float* residual, int64_t real, int32_t* words,
                        const ParallelFor& parallel_for);

// Adds a shard as `parts` ranks wrote it, in their order and in float32, and then the residual;
// writes the sum to words[layout.words()]. Cost: one pass, the parts, 8 bytes an entry and the words.
void low_bits_add_cpu(const LowBits& layout, int64_t parts, const int32_t* written, float* residual,
                      int64_t real, int32_t* words, const ParallelFor& parallel_for);

// Reads shards, times a factor, to total[shards * layout.entries]. Cost: one pass.
void low_bits_read_cpu(const LowBits& layout, int64_t shards, const int32_t* words, float factor,
                       float* total, const ParallelFor& parallel_for);

// The same on a GPU, queued on the stream. Null, or CUDA's message.
const char* low_bits_write_cuda(const LowBits& layout, int64_t shards, const float* gradient,
                                float* residual, int64_t real, int32_t* words, CUstream_st* stream);
const char* low_bits_add_cuda(const LowBits& layout, int64_t parts, const int32_t* written,
                              float* residual, int64_t real, int32_t* words, CUstream_st* stream);
const char* low_bits_read_cuda(const LowBits& layout, int64_t shards, const int32_t* words,
                               float factor, float* total, CUstream_st* stream);

}  // namespace tfcommx
