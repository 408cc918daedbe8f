// A dense vector in 16 bits, on CPUs: eight entries at once where the processor can.
#include "kernels/dense.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/chunks.h"

namespace tfcommx {
namespace {

void write_one(const Rounding& how, float gradient, float* residual, uint16_t* written) {
  const float whole = gradient + *residual;
  float back;
  *written = narrowed(how, whole, &back);
  if ((bits_of(whole) & 0x7fffffffu) < 0x7f800000u) *residual = whole - back;
}

float widened(Float type, uint16_t bits) {
  return type == Float::float16 ? from_float16(bits) : from_bfloat16(bits);
}

float sum_of_parts(Float type, const uint16_t* written, int64_t parts, int64_t n) {
  float sum = widened(type, written[0]);
  for (int64_t part = 1; part < parts; ++part) sum += widened(type, written[part * n]);
  return sum;
}

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,f16c")

template <bool half>
__m256 widen(__m128i bits) {
  if (half) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

template <bool half>
__m128i narrow(__m256 x) {
  if (half) return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256i bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(nearest, quiet, nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8);
  return _mm256_castsi256_si128(packed);
}

// Not lambdas, to which GCC does not hand the target on.
__m256 all(float x) { return _mm256_set1_ps(x); }

template <bool half>
__m256 load(const uint16_t* p) {
  return widen<half>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Returns how many entries are done: all but fewer than eight.
template <bool half>
int64_t write_eights(const Rounding& how, const float* gradient, float* residual, uint16_t* written,
                     int64_t n) {
  const __m256 sign = all(-0.0f), scale = all(how.scale), inverse = all(1 / how.scale);
  const __m256 near = all(0x1p29f * how.reach), far = all(0x1p39f * how.reach);
  const __m256 largest = all(half ? kFloat16Largest * how.reach : kBfloat16Largest);
  const __m256 infinite = all(float_of(0x7f800000u)), beyond = all(0x1p15f * how.reach);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 before = _mm256_loadu_ps(residual + i);
    const __m256 whole = _mm256_add_ps(_mm256_loadu_ps(gradient + i), before);
    const __m256 size = _mm256_andnot_ps(sign, whole);
    const __m256 finite = _mm256_cmp_ps(size, infinite, _CMP_LT_OQ);
    __m256 limit = largest;
    if (half) {
      limit = _mm256_and_ps(beyond, _mm256_cmp_ps(size, far, _CMP_LT_OQ));
      limit = _mm256_blendv_ps(limit, largest, _mm256_cmp_ps(size, near, _CMP_LT_OQ));
    }
    const __m256 cut = _mm256_or_ps(_mm256_min_ps(size, limit), _mm256_and_ps(sign, whole));
    const __m128i bits = narrow<half>(_mm256_blendv_ps(whole, _mm256_mul_ps(cut, scale), finite));
    const __m256 back = _mm256_mul_ps(widen<half>(bits), inverse);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(written + i), bits);
    _mm256_storeu_ps(residual + i, _mm256_blendv_ps(before, _mm256_sub_ps(whole, back), finite));
  }
  return i;
}

template <bool half>
int64_t add_eights(const uint16_t* written, int64_t parts, int64_t stride, float factor,
                   float* total, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 sum = load<half>(written + i);
    for (int64_t part = 1; part < parts; ++part)
      sum = _mm256_add_ps(sum, load<half>(written + part * stride + i));
    _mm256_storeu_ps(total + i, _mm256_mul_ps(sum, all(factor)));
  }
  return i;
}

#pragma GCC pop_options

const bool kHasEights = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif

}  // namespace

void dense_write_cpu(const Rounding& how, const float* gradient, float* residual, uint16_t* written,
                     int64_t n, const ParallelFor& parallel_for) {
  each_chunk(
      1, [n](int64_t) { return n; }, parallel_for,
      [&](int64_t, int64_t start, int64_t entries, int64_t) {
        int64_t i = 0;
#if defined(__x86_64__)
        if (kHasEights)
          i = (how.type == Float::float16 ? write_eights<true>
                                          : write_eights<false>)(how, gradient + start,
                                                                 residual + start, written + start,
                                                                 entries);
#endif
        for (; i < entries; ++i)
          write_one(how, gradient[start + i], residual + start + i, written + start + i);
      });
}

void dense_add_cpu(Float type, const uint16_t* written, int64_t parts, float factor, float* total,
                   int64_t n, const ParallelFor& parallel_for) {
  each_chunk(
      1, [n](int64_t) { return n; }, parallel_for,
      [&](int64_t, int64_t start, int64_t entries, int64_t) {
        int64_t i = 0;
#if defined(__x86_64__)
        if (kHasEights)
          i = (type == Float::float16
                   ? add_eights<true>
                   : add_eights<false>)(written + start, parts, n, factor, total + start, entries);
#endif
        for (; i < entries; ++i)
          total[start + i] = sum_of_parts(type, written + start + i, parts, n) * factor;
      });
}

}  // namespace tfcommx
