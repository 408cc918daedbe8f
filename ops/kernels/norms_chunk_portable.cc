// The sum of a chunk for any processor, and the choice of the fastest one.
#include "kernels/norms_chunk.h"
#include "kernels/norms_chunk.inl"

namespace tfcommx {
namespace {

struct One {  // a vector of one
  static constexpr int64_t lanes = 1;
  using Values = float;
  static float zero() { return 0; }
  template <class T>
  static float load(const T* p) {
    return widen(*p);
  }
  static float add_square(float sum, float x) { return sum + x * x; }
  static void store(float* p, float x) { *p = x; }
};

}  // namespace

const ChunkSums& chunk_sums_portable() {
  static const ChunkSums result = table<One>();
  return result;
}

const ChunkSums& chunk_sums() {
#if defined(__x86_64__)
  static const ChunkSums& result =
      __builtin_cpu_supports("avx512f")                                  ? chunk_sums_avx512()
      : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? chunk_sums_avx2()
                                                                         : chunk_sums_portable();
  return result;
#else
  return chunk_sums_portable();
#endif
}

}  // namespace tfcommx
