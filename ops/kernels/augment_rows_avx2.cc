// See augment_rows.h: two pixels of three channels at once.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "kernels/augment_rows.h"

#define TFCOMMX_AVX2 __attribute__((target("avx2,f16c")))

namespace tfcommx {
namespace {

TFCOMMX_AVX2 int64_t blend(const uint8_t* a, const uint8_t* b, int32_t weight, int64_t n,
                           int16_t* out) {
  const __m256i w = _mm256_set1_epi16(static_cast<int16_t>(weight));
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i x =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i)));
    const __m256i y =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i)));
    const __m256i step = _mm256_mulhrs_epi16(_mm256_slli_epi16(_mm256_sub_epi16(y, x), 6), w);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_add_epi16(_mm256_slli_epi16(x, 6), step));
  }
  return i;
}

// Two output pixels of three channels at a time; a store writes four values, so the last pair of a
// row is left to the caller.
template <Pixel kPixel>
TFCOMMX_AVX2 int32_t rows(const int16_t* blended, int64_t pitch, int32_t count,
                          const Columns& columns, const Target& target, uint8_t* out) {
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, -1, -1, -1, -1));
  const __m256i half = _mm256_set1_epi32(1 << 19);
  __m256 scale = _mm256_setzero_ps(), bias = _mm256_setzero_ps();
  if (kPixel != Pixel::kUint8) {
    const float* s = target.scale.data();
    const float* o = target.bias.data();
    scale = _mm256_setr_ps(s[0], s[1], s[2], 0, s[0], s[1], s[2], 0);
    bias = _mm256_setr_ps(o[0], o[1], o[2], 0, o[0], o[1], o[2], 0);
  }
  int32_t x = 0;
  for (int64_t y = 0; y < count; ++y, blended += pitch) {
    int64_t at = y * target.width * 3;
    for (x = 0; x + 2 < target.width; x += 2, at += 6) {
      const __m128i first =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(blended + columns.at[x]));
      const __m128i second =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(blended + columns.at[x + 1]));
      const __m256i weights =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns.pair.data() + 8 * x));
      const __m256i level =
          _mm256_madd_epi16(_mm256_shuffle_epi8(_mm256_set_m128i(second, first), order), weights);
      if (kPixel == Pixel::kUint8) {
        const __m256i rounded = _mm256_srai_epi32(_mm256_add_epi32(level, half), 20);
        const __m256i narrow =
            _mm256_packus_epi16(_mm256_packus_epi32(rounded, rounded), _mm256_setzero_si256());
        const int32_t a = _mm256_extract_epi32(narrow, 0), b = _mm256_extract_epi32(narrow, 4);
        std::memcpy(out + at, &a, 4);
        std::memcpy(out + at + 3, &b, 4);
        continue;
      }
      const __m256 value = _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(level), scale), bias);
      if (kPixel == Pixel::kFloat) {
        float* to = reinterpret_cast<float*>(out) + at;
        _mm_storeu_ps(to, _mm256_castps256_ps128(value));
        _mm_storeu_ps(to + 3, _mm256_extractf128_ps(value, 1));
        continue;
      }
      __m128i narrow;
      if (kPixel == Pixel::kHalf) {
        narrow = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
      } else {
        const __m256i bits = _mm256_castps_si256(value);
        const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i up = _mm256_srli_epi32(
            _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), even), 16);
        const __m256i packed = _mm256_packus_epi32(up, up);
        narrow =
            _mm_unpacklo_epi64(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
      }
      uint16_t* to = reinterpret_cast<uint16_t*>(out) + at;
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to), narrow);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 3), _mm_unpackhi_epi64(narrow, narrow));
    }
  }
  return x;
}

}  // namespace

const RowCode& rows_avx2() {
  static const RowCode code = {
      blend,
      {rows<Pixel::kUint8>, rows<Pixel::kHalf>, rows<Pixel::kBfloat16>, rows<Pixel::kFloat>}};
  return code;
}

}  // namespace tfcommx
#endif
