// The tile loop, sixteen entries a turn.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/select_scan.h"

#pragma GCC push_options
// GCC 12 warns of its own intrinsics (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,popcnt")
#include "kernels/select_scan.inl"

namespace tfcommx {
namespace {

struct Sixteen {
  static constexpr uint32_t lanes = 16;
  static __m512 load(const float* p) { return _mm512_loadu_ps(p); }
  static __m512 load(const Half* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static __m512 load(const Bfloat* p) {
    const __m512i bits =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  }
  static void store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
  static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __m512 multiply(__m512 a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
  static uint32_t at_least(__m512 x, uint32_t key) {
    const __m512i keys =
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(kMagnitude)));
    const __mmask16 mask = _mm512_cmpge_epu32_mask(keys, _mm512_set1_epi32(static_cast<int>(key)));
    // Widened by hand: if GCC 12 puts the mask on the stack, it writes 16 bits and reads 32.
    uint32_t bits;
    asm("kmovw %1, %0" : "=r"(bits) : "k"(mask));
    return bits;
  }
  static __m512 mix(uint32_t bits, __m512 set, __m512 unset) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), unset, set);
  }
  // Without a branch: whether an entry reaches the threshold is what a processor cannot predict.
  static uint32_t append(uint16_t* list, uint32_t length, uint32_t bits, uint32_t first) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i positions = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(first)));
    const __m512i packed = _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), positions);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(list + length), _mm512_cvtepi32_epi16(packed));
    return length + static_cast<uint32_t>(__builtin_popcount(bits));
  }
};

Scans all() { return table<Sixteen>(); }

}  // namespace
}  // namespace tfcommx
#pragma GCC pop_options

const tfcommx::Scans& tfcommx::scans_avx512() {
  static const Scans result = all();
  return result;
}
#endif
