// The sum of a chunk, eight lanes a register.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/norms_chunk.h"

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#include "kernels/norms_chunk.inl"

namespace tfcommx {
namespace {

struct Eight {
  static constexpr int64_t lanes = 8;
  using Values = __m256;
  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256 load(const float* p) { return _mm256_loadu_ps(p); }
  static __m256 load(const Half* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static __m256 load(const Bfloat* p) {
    const __m256i bits =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
  static __m256 add_square(__m256 sum, __m256 x) { return _mm256_add_ps(sum, _mm256_mul_ps(x, x)); }
  static void store(float* p, __m256 x) { _mm256_storeu_ps(p, x); }
};

ChunkSums all() { return table<Eight>(); }

}  // namespace
}  // namespace tfcommx
#pragma GCC pop_options

const tfcommx::ChunkSums& tfcommx::chunk_sums_avx2() {
  static const ChunkSums result = all();
  return result;
}
#endif
