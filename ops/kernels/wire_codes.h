// Values as codes of 8 or 4 bits, in blocks that share a step.
//
// A block is kCodeBlock consecutive values, the last may be shorter. largest = 127 or 7.
//   step    = max |value| / largest, over the finite ones, rounded to bfloat16
//   code    = value / step, to the nearest integer in [-largest, largest], ties to even
//   written = code * step, exactly: it has at most 15 bits
// The code -largest - 1 is NaN: of every value that is not finite. The step is 0, and so are the
// codes of finite values, if it would be denormal. Written values are written as they are: their
// block's largest has the code `largest`, so that the step comes out again.
//
// Results are the same on CPUs and GPUs: no operation has a denormal result that counts. Choices
// are made by masks of bits, so that compilers make vector instructions of loops over values.
#pragma once

#include <cstdint>

#include "kernels/device.h"
#include "kernels/wire_float.h"

struct CUstream_st;  // what CUDA's cudaStream_t points to

namespace tfcommx {

constexpr int kCodeBlock = 32;
constexpr uint32_t kInfinite = 0x7f800000, kNan = 0x7fc00000;  // as bits

TFCOMMX_DEVICE constexpr int largest_code(int bits) { return (1 << (bits - 1)) - 1; }

// All bits, or none.
TFCOMMX_DEVICE inline uint32_t mask_if(bool holds) { return -static_cast<uint32_t>(holds); }

TFCOMMX_DEVICE inline uint32_t mask_if_finite(float value) {
  const int32_t size = static_cast<int32_t>(bits_of(value) & 0x7fffffff);
  return static_cast<uint32_t>((size - static_cast<int32_t>(kInfinite)) >> 31);
}

// Bits of |value|; 0 if it is not finite. These bits are in the order of the magnitudes.
TFCOMMX_DEVICE inline uint32_t finite_size(float value) {
  return bits_of(value) & 0x7fffffff & mask_if_finite(value);
}

TFCOMMX_DEVICE inline float divided(float a, float b) {
#ifdef __CUDA_ARCH__
  asm("div.rn.ftz.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#else
  return flushed(flushed(a) / flushed(b));
#endif
}

// Denormal operands and results are zero, as in TensorFlow's threads.
TFCOMMX_DEVICE inline float subtracted(float a, float b) {
#ifdef __CUDA_ARCH__
  asm("sub.rn.ftz.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#else
  return flushed(flushed(a) - flushed(b));
#endif
}

// The step of a block, from the largest finite_size in it.
TFCOMMX_DEVICE inline float step_of(uint32_t size, int largest) {
  constexpr float kSmallest = 0x1p-126f, kMost = 0x1.fffffep127f;
  const float most = float_of(size);
  if (most < static_cast<float>(largest) * kSmallest) return 0;
  const uint32_t rounded = to_bfloat16(divided(most, static_cast<float>(largest)));
  // Not above: largest * step must be finite. A quotient that the compiler knows
  const uint32_t limit = bits_of(kMost / static_cast<float>(largest)) >> 16;
  return from_bfloat16(static_cast<uint16_t>(rounded < limit ? rounded : limit));
}

TFCOMMX_DEVICE inline int code_of(float value, float step, int largest) {
  // Added to a number below 2^22 it leaves the nearest integer in the low bits. That is at most
  // `largest`, because rounding moves the step by less than 2^-8 of it
  constexpr float kInteger = 0x1.8p23f;
  const uint32_t finite = mask_if_finite(value), kept = finite & mask_if(step > 0);
  const float steps = divided(float_of(bits_of(value) & kept), step > 0 ? step : 1.0f);
  const uint32_t code = bits_of(steps + kInteger) - bits_of(kInteger);
  return static_cast<int>((code & finite) | (static_cast<uint32_t>(-largest - 1) & ~finite));
}

TFCOMMX_DEVICE inline float value_of(int code, float step, int largest) {
  const uint32_t bad = static_cast<uint32_t>((code + largest) >> 31);
  return float_of((bits_of(static_cast<float>(code) * step) & ~bad) | (kNan & bad));
}

// What `written` leaves of a value: exactly the difference. Nothing of one that is not finite.
TFCOMMX_DEVICE inline float rounding_error(float value, float written) {
  const uint32_t all = mask_if((bits_of(written) & 0x7fffffff) == 0);
  const uint32_t left = (bits_of(value) & all) | (bits_of(subtracted(value, written)) & ~all);
  return float_of(left & mask_if_finite(value));
}

// The int32 words of k values: the steps, as bfloat16, then the codes, the first in the lowest
// bits; both end in zero bits.
struct CodeLayout {
  int64_t k;
  int bits;  // of a code: 8 or 4

  TFCOMMX_DEVICE int64_t blocks() const { return (k + kCodeBlock - 1) / kCodeBlock; }
  TFCOMMX_DEVICE int64_t steps() const { return (blocks() + 1) / 2; }
  TFCOMMX_DEVICE int64_t codes() const { return (k * bits + 31) / 32; }
};

// Value i of what was written.
TFCOMMX_DEVICE inline float coded_value(const CodeLayout& layout, const int32_t* words, int64_t i) {
  const uint16_t step = reinterpret_cast<const uint16_t*>(words)[i / kCodeBlock];
  const int per_word = 32 / layout.bits, low = static_cast<int>(i % per_word) * layout.bits;
  const int32_t word = words[layout.steps() + i / per_word];
  // Shifted to the top and back, so that the sign fills the rest
  const int code = static_cast<int32_t>(static_cast<uint32_t>(word) << (32 - layout.bits - low)) >>
                   (32 - layout.bits);
  return value_of(code, from_bfloat16(step), largest_code(layout.bits));
}

// Writes k values to words[layout.steps() + layout.codes()]. Cost: one pass.
void codes_write_cpu(const CodeLayout& layout, const float* values, int32_t* words);
// Reads them. Cost: one pass.
void codes_read_cpu(const CodeLayout& layout, const int32_t* words, float* values);
// What codes_write_cpu would write, and what that leaves: written[k] + errors[k] == values[k],
// except where a difference is denormal, and then flushed. Cost: one pass.
void codes_round_cpu(const CodeLayout& layout, const float* values, float* written, float* errors);

// The same on a GPU, queued on the stream. Null, or CUDA's message.
// Reading is coded_value.
const char* codes_write_cuda(const CodeLayout& layout, const float* values, int32_t* words,
                             CUstream_st* stream);
const char* codes_round_cuda(const CodeLayout& layout, const float* values, float* written,
                             float* errors, CUstream_st* stream);

}  // namespace tfcommx
