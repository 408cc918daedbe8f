// The tile loop, eight entries a turn.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/select_scan.h"

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#include "kernels/select_scan.inl"

namespace tfcommx {
namespace {

struct Eight {
  static constexpr uint32_t lanes = 8;
  static __m256 load(const float* p) { return _mm256_loadu_ps(p); }
  static __m256 load(const Half* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static __m256 load(const Bfloat* p) {
    const __m256i bits =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
  static void store(float* p, __m256 x) { _mm256_storeu_ps(p, x); }
  static __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  static __m256 multiply(__m256 a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
  // Both sides are below 2^31: the signed comparison is right.
  static uint32_t at_least(__m256 x, uint32_t key) {
    const __m256i keys =
        _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(static_cast<int>(kMagnitude)));
    const __m256i above = _mm256_cmpgt_epi32(keys, _mm256_set1_epi32(static_cast<int>(key) - 1));
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(above)));
  }
  static __m256 mix(uint32_t bits, __m256 set, __m256 unset) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i mask =
        _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane), lane);
    return _mm256_blendv_ps(unset, set, _mm256_castsi256_ps(mask));
  }
  static uint32_t append(uint16_t* list, uint32_t length, uint32_t bits, uint32_t first) {
    return append_each(list, length, bits, first);
  }
};

Scans all() { return table<Eight>(); }

}  // namespace
}  // namespace tfcommx
#pragma GCC pop_options

const tfcommx::Scans& tfcommx::scans_avx2() {
  static const Scans result = all();
  return result;
}
#endif
