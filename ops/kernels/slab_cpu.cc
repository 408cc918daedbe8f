// See slab.h.
#include "kernels/slab.h"

#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tfcommx {

bool fits(const SlabHeader& header, int64_t length) {
  return header.length == length && header.index_at >= static_cast<int64_t>(sizeof(SlabHeader)) &&
         header.index_at % 8 == 0 && header.index_at <= length && header.count >= 0 &&
         header.count <= (length - header.index_at) / 8 &&
         header.data_at >= header.index_at + 8 * header.count && header.data_at % 64 == 0 &&
         header.data_at <= length;
}

bool record_at(const uint8_t* base, int64_t low, int64_t length, int64_t at, int64_t sample,
               Sample* out) {
  const int64_t head = static_cast<int64_t>(sizeof(Record));
  if (at < low || at % 64 || at > length - head) return false;
  // Copied before it is checked: the close of the slab may empty the record at any moment.
  Record& record = out->record;
  std::memcpy(&record, base + at, sizeof(Record));
  out->pixels = base + at + head;
  if (record.sample != sample || record.height < 1 || record.height > kMostSide ||
      record.width < 1 || record.width > kMostSide || record.channels < 1 || record.channels > 4 ||
      record.bytes < 1 || record.bytes > length - head - at)
    return false;
  const int64_t area = static_cast<int64_t>(record.height) * record.width;
  // Compared by a division, because four times the area may not fit 64 bits.
  return area <= record.bytes / record.channels && area * record.channels == record.bytes;
}

void foresee(const Slab& slab, int64_t sample) {
  // Relaxed, because an old offset only wastes a prefetch
  const int64_t at =
      __atomic_load_n(reinterpret_cast<const int64_t*>(slab.base + slab.header.index_at) + sample,
                      __ATOMIC_RELAXED);
  if (at >= slab.header.data_at && at < slab.header.length) __builtin_prefetch(slab.base + at);
}

bool find(const Slab& slab, int64_t sample, Sample* out) {
  // Pairs with the release in `put`, after which the record is complete
  const int64_t at =
      __atomic_load_n(reinterpret_cast<const int64_t*>(slab.base + slab.header.index_at) + sample,
                      __ATOMIC_ACQUIRE);
  return at && record_at(slab.base, slab.header.data_at, slab.header.length, at, sample, out);
}

#if defined(__x86_64__)
// Reduces n >= 64 bytes, a multiple of 16, to the 16 that leave the same remainder. `crc` is not
// inverted here.
// Source: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"
// (2009), reflected.
__attribute__((target("pclmul,sse4.1"))) void fold(uint32_t crc, const uint8_t* bytes, size_t n,
                                                   uint8_t* rest) {
  const __m128i by_four = _mm_set_epi64x(0x1c6e41596, 0x154442bd4),
                by_one = _mm_set_epi64x(0xccaa009e, 0x1751997d0);
  const auto load = [](const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  };
  __m128i x[4];
  for (int i = 0; i < 4; ++i) x[i] = load(bytes + 16 * i);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  size_t at = 64;
  for (; at + 64 <= n; at += 64) {
    for (int i = 0; i < 4; ++i) {
      const __m128i high = _mm_clmulepi64_si128(x[i], by_four, 0x11),
                    low = _mm_clmulepi64_si128(x[i], by_four, 0x00);
      x[i] = _mm_xor_si128(_mm_xor_si128(high, low), load(bytes + at + 16 * i));
    }
  }
  __m128i one = x[0];
  for (int i = 1; i < 4 || at < n; ++i) {
    const __m128i high = _mm_clmulepi64_si128(one, by_one, 0x11),
                  low = _mm_clmulepi64_si128(one, by_one, 0x00);
    one = _mm_xor_si128(_mm_xor_si128(high, low), i < 4 ? x[i] : load(bytes + at));
    if (i >= 4) at += 16;
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), one);
}
#endif

uint32_t crc32(uint32_t crc, const uint8_t* bytes, size_t length) {
  struct Tables {
    uint32_t t[8][256];
    Tables() {
      for (uint32_t i = 0; i < 256; ++i) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit)
          value = value & 1 ? 0xEDB88320u ^ (value >> 1) : value >> 1;
        t[0][i] = value;
      }
      for (uint32_t i = 0; i < 256; ++i) {
        for (int k = 1; k < 8; ++k) t[k][i] = t[0][t[k - 1][i] & 255] ^ (t[k - 1][i] >> 8);
      }
    }
  };
  static const Tables tables;
  const auto& t = tables.t;
  crc = ~crc;
#if defined(__x86_64__)
  static const bool folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (folds && length >= 64) {
    uint8_t rest[16];
    fold(crc, bytes, length / 16 * 16, rest);
    bytes += length / 16 * 16;
    length %= 16;
    crc = ~crc32(~0u, rest, sizeof(rest));
  }
#endif
  for (; length >= 8; bytes += 8, length -= 8) {  // little-endian
    uint32_t low, high;
    std::memcpy(&low, bytes, 4);
    std::memcpy(&high, bytes + 4, 4);
    low ^= crc;
    crc = t[7][low & 255] ^ t[6][(low >> 8) & 255] ^ t[5][(low >> 16) & 255] ^ t[4][low >> 24] ^
          t[3][high & 255] ^ t[2][(high >> 8) & 255] ^ t[1][(high >> 16) & 255] ^ t[0][high >> 24];
  }
  for (; length; ++bytes, --length) crc = t[0][(crc ^ *bytes) & 255] ^ (crc >> 8);
  return ~crc;
}

bool intact(const Sample& sample) {
  const uint8_t* head = reinterpret_cast<const uint8_t*>(&sample.record);
  return crc32(crc32(0, head, offsetof(Record, crc)), sample.pixels, sample.record.bytes) ==
         sample.record.crc;
}

}  // namespace tfcommx
