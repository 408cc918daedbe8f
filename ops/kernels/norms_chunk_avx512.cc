// The sum of a chunk, sixteen lanes a register.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/norms_chunk.h"

#pragma GCC push_options
// GCC 12 warns of its own intrinsics (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f")
#include "kernels/norms_chunk.inl"

namespace tfcommx {
namespace {

struct Sixteen {
  static constexpr int64_t lanes = 16;
  using Values = __m512;
  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512 load(const float* p) { return _mm512_loadu_ps(p); }
  static __m512 load(const Half* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static __m512 load(const Bfloat* p) {
    const __m512i bits =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  }
  static __m512 add_square(__m512 sum, __m512 x) { return _mm512_add_ps(sum, _mm512_mul_ps(x, x)); }
  static void store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
};

ChunkSums all() { return table<Sixteen>(); }

}  // namespace
}  // namespace tfcommx
#pragma GCC pop_options

const tfcommx::ChunkSums& tfcommx::chunk_sums_avx512() {
  static const ChunkSums result = all();
  return result;
}
#endif
