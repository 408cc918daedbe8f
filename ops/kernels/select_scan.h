// The one loop over n-sized data on CPUs: add momentum and residual, and list the entries that
// reach a threshold. One tile a call.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/device.h"
#include "kernels/select.h"

namespace tfcommx {

// Entries; positions in a tile fit 16 bits, a tile's data fits the first cache.
constexpr uint32_t kTile = 4096;
// Entries of a list that a scan fills: it may write past the last one found.
constexpr uint32_t kRoom = kTile + 16;
constexpr uint32_t kNotFinite = 0x7f800000u;  // keys of infinities and NaNs start here
constexpr uint32_t kMagnitude = 0x7fffffffu;  // all bits but the sign

// The bits of |x|: ordered as the magnitudes are.
TFCOMMX_DEVICE inline uint32_t key_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & kMagnitude;
}

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

TFCOMMX_DEVICE inline float widen(float x) { return x; }

TFCOMMX_DEVICE inline float widen(Bfloat x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

TFCOMMX_DEVICE inline float widen(Half x) {
#ifdef __CUDA_ARCH__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#endif
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16,
                 exponent = (x.bits >> 10) & 31u;
  uint32_t fraction = x.bits & 1023u, bits;
  if (exponent == 31) {
    bits = sign | kNotFinite | (fraction << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else if (fraction == 0) {
    bits = sign;
  } else {  // denormal in half precision, normal in single
    uint32_t shift = 0;
    while (!(fraction & 1024u)) {
      fraction <<= 1;
      ++shift;
    }
    bits = sign | ((113 - shift) << 23) | ((fraction & 1023u) << 13);
  }
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

struct Found {
  uint32_t candidates;  // finite entries whose key is >= the threshold
  uint32_t not_finite;  // entries whose acc is NaN or infinite
};

// u = momentum * u + g, r += u in place (except for entries that would not be finite), and lists
// positions,
// ascending. Without a velocity r += g; without a residual nothing is written except the lists.
// threshold <= kNotFinite; count <= kTile; each list has kRoom entries.
using Scan = Found (*)(const void* gradient, float* residual, float* velocity, float momentum,
                       uint32_t count, uint32_t threshold, uint16_t* candidates,
                       uint16_t* not_finite);

struct Scans {
  Scan plain[3];          // by Float
  Scan with_residual[3];  // by Float
  Scan with_velocity[3];  // by Float
};

const Scans& scans_portable();
#if defined(__x86_64__)
const Scans& scans_avx2();
const Scans& scans_avx512();
#endif
const Scans& scans();  // the fastest that this processor runs

}  // namespace tfcommx
