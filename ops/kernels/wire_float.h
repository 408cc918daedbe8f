// Between float32 and the narrower floats of the wire. No arithmetic on denormal numbers, which
// threads may flush to zero.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/device.h"

namespace tfcommx {

TFCOMMX_DEVICE inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

TFCOMMX_DEVICE inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

TFCOMMX_DEVICE inline uint16_t to_float16(float x) {
  const uint32_t bits = bits_of(x), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  if (size > 0x7f800000) return sign | 0x7e00 | (size >> 13 & 0x3ff);  // NaN
#ifdef __CUDA_ARCH__
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
#endif
  if (size >= 0x47800000) return sign | 0x7c00;  // 65536 and beyond
  // normal: rebias, round, drop 13 bits
  if (size >= 0x38800000) {
    const uint32_t rebiased = size - (112u << 23);
    return sign | (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13;
  }
  const int exponent = size >> 23;
  // Below half of the smallest denormal.
  if (exponent < 102) return sign;
  const uint32_t mantissa = (size & 0x7fffff) | 0x800000, drop = 126 - exponent;
  const uint32_t kept = mantissa >> drop, rest = mantissa & ((1u << drop) - 1),
                 tie = 1u << (drop - 1);
  return sign | (kept + (rest > tie || (rest == tie && (kept & 1))));
}

TFCOMMX_DEVICE inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

TFCOMMX_DEVICE inline float from_float16(uint16_t half) {
#ifdef __CUDA_ARCH__
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
#endif
  const uint32_t shifted = (half & 0x7fffu) << 13, exponent = shifted & (31u << 23),
                 sign = (half & 0x8000u) << 16;
  const uint32_t rebiased = shifted + (112u << 23);
  // 1.m * 2^-14 - 2^-14, both normal
  const float denormal = float_of(rebiased + (1u << 23)) - float_of(113u << 23);
  const uint32_t size = exponent == 0             ? bits_of(denormal)
                        : exponent == (31u << 23) ? rebiased + (112u << 23)
                                                  : rebiased;
  return float_of(size | sign);
}

TFCOMMX_DEVICE inline float from_bfloat16(uint16_t bits) {
  return float_of(static_cast<uint32_t>(bits) << 16);
}

}  // namespace tfcommx
