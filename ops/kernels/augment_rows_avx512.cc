// See augment_rows.h: 16 values at once. A group's neighbours lie within 64 elements, so one
// permutation of two registers fetches them, whatever the scale, the mirroring and the number of
// channels.
#if defined(__x86_64__)
// GCC 12 says it of its own <immintrin.h> (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "kernels/augment_rows.h"

#define TFCOMMX_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

namespace tfcommx {
namespace {

TFCOMMX_AVX512 int64_t blend(const uint8_t* a, const uint8_t* b, int32_t weight, int64_t n,
                             int16_t* out) {
  const __m512i w = _mm512_set1_epi16(static_cast<int16_t>(weight));
  for (int64_t i = 0; i < n; i += 32) {
    const __mmask32 some = n - i >= 32 ? ~__mmask32{0} : (__mmask32{1} << (n - i)) - 1;
    const __m512i x = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(some, a + i));
    const __m512i y = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(some, b + i));
    const __m512i step = _mm512_mulhrs_epi16(_mm512_slli_epi16(_mm512_sub_epi16(y, x), 6), w);
    // `out` has kSlack
    _mm512_storeu_si512(out + i, _mm512_add_epi16(_mm512_slli_epi16(x, 6), step));
  }
  return n;
}

template <Pixel kPixel>
TFCOMMX_AVX512 int32_t rows(const int16_t* blended, int64_t pitch, int32_t count,
                            const Columns& columns, const Target& target, uint8_t* out) {
  const int64_t values = static_cast<int64_t>(target.width) * target.channels;
  const __m512i half = _mm512_set1_epi32(1 << 19), one = _mm512_set1_epi32(1),
                most = _mm512_set1_epi32(0x7FFF);
  const bool stream =
      target.past_caches && values % kGroup == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0;
  for (int64_t v = 0, group = 0; v < values; v += kGroup, ++group) {
    const __mmask16 some = values - v >= kGroup ? 0xFFFF : (1u << (values - v)) - 1;
    const __m512i from = _mm512_loadu_si512(columns.from.data() + 2 * v),
                  weight = _mm512_loadu_si512(columns.weight.data() + 2 * v);
    __m512 scale = _mm512_setzero_ps(), bias = _mm512_setzero_ps();
    if (kPixel != Pixel::kUint8) {
      scale = _mm512_loadu_ps(columns.scale.data() + v);
      bias = _mm512_loadu_ps(columns.bias.data() + v);
    }
    const int16_t* start = blended + columns.first[group];
    for (int64_t y = 0, at = v; y < count; ++y, start += pitch, at += values) {
      const __m512i neighbours = _mm512_permutex2var_epi16(_mm512_loadu_si512(start), from,
                                                           _mm512_loadu_si512(start + 32));
      const __m512i level = _mm512_madd_epi16(neighbours, weight);
      if (kPixel == Pixel::kUint8) {
        const __m128i narrow =
            _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(level, half), 20));
        _mm_mask_storeu_epi8(out + at, some, narrow);
        continue;
      }
      __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(level), scale);
      // Or the compiler fuses it with the sum, which rounds once less than the other codes do.
      asm("" : "+v"(scaled));
      const __m512 value = _mm512_add_ps(scaled, bias);
      if (kPixel == Pixel::kFloat) {
        float* to = reinterpret_cast<float*>(out) + at;
        if (stream) {
          _mm512_stream_ps(to, value);
        } else {
          _mm512_mask_storeu_ps(to, some, value);
        }
        continue;
      }
      __m256i narrow;
      if (kPixel == Pixel::kHalf) {
        narrow = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
      } else {
        const __m512i bits = _mm512_castps_si512(value);
        const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
        narrow = _mm512_cvtepi32_epi16(
            _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, most), even), 16));
      }
      _mm256_mask_storeu_epi16(reinterpret_cast<uint16_t*>(out) + at, some, narrow);
    }
  }
  if (stream) _mm_sfence();
  return target.width;
}

}  // namespace

const RowCode& rows_avx512() {
  static const RowCode code = {
      blend,
      {rows<Pixel::kUint8>, rows<Pixel::kHalf>, rows<Pixel::kBfloat16>, rows<Pixel::kFloat>}};
  return code;
}

}  // namespace tfcommx
#endif
