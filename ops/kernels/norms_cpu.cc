// Norms on CPUs: turns of many chunks, whatever vectors they belong to; then the chunks of each
// vector are folded.
#include "kernels/norms.h"

#include <algorithm>
#include <vector>

#include "kernels/flush_denormals.h"
#include "kernels/norms_chunk.h"

namespace tfcommx {

void norms_cpu(const Vector* vectors, int64_t count, float* sums, float* squares,
               const ParallelFor& parallel_for) {
  constexpr int64_t kTurn = 64;  // chunks: a megabyte; below that, sharing costs more than it saves
  std::vector<int64_t> firsts(count + 1, 0);  // chunks before each vector
  for (int64_t i = 0; i < count; ++i) firsts[i + 1] = firsts[i] + vectors[i].chunks();
  const int64_t chunks = firsts[count];
  parallel_for((chunks + kTurn - 1) / kTurn, [&](int64_t turn) {
    const FlushDenormals flush;
    const int64_t end = std::min(chunks, (turn + 1) * kTurn);
    int64_t chunk = turn * kTurn;
    int64_t which = std::upper_bound(firsts.begin(), firsts.end(), chunk) - firsts.begin() - 1;
    for (; chunk < end; ++chunk) {
      while (chunk >= firsts[which + 1]) ++which;
      const Vector& vector = vectors[which];
      const int64_t start = (chunk - firsts[which]) * kChunk;
      const int64_t bytes = vector.type == Float::float32 ? 4 : 2;
      sums[chunk] = chunk_sums().of[static_cast<int>(vector.type)](
          static_cast<const char*>(vector.data) + start * bytes,
          std::min(kChunk, vector.entries - start));
    }
  });
  const FlushDenormals flush;
  for (int64_t i = 0; i < count; ++i) {
    if (vectors[i].entries) fold(sums + firsts[i], vectors[i].chunks());
    squares[i] = vectors[i].entries ? one_nan(sums[firsts[i]]) : 0.0f;
  }
}

}  // namespace tfcommx
