// Norms on CPUs: the sum of each chunk, then the chunks of each vector are folded.
#include "kernels/norms.h"

#include "kernels/flush_denormals.h"
#include "kernels/norms_chunk.h"

namespace tfcommx {

void norms_cpu(const Vector* vectors, int64_t count, float* sums, float* squares,
               const ParallelFor& parallel_for) {
  each_chunk(
      count, [&](int64_t i) { return vectors[i].entries; }, parallel_for,
      [&](int64_t i, int64_t start, int64_t entries, int64_t chunk) {
        const int64_t bytes = vectors[i].type == Float::float32 ? 4 : 2;
        sums[chunk] = chunk_sums().of[static_cast<int>(vectors[i].type)](
            static_cast<const char*>(vectors[i].data) + start * bytes, entries);
      });
  const FlushDenormals flush;
  for (int64_t i = 0; i < count; ++i) {
    if (vectors[i].entries) fold(sums, vectors[i].chunks());
    squares[i] = vectors[i].entries ? one_nan(sums[0]) : 0.0f;
    sums += vectors[i].chunks();
  }
}

}  // namespace tfcommx
