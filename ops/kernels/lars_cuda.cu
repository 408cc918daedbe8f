// The update of LARS on GPUs. Compiled by nvcc, and run on CPUs by tests/cuda_on_cpu.
//
#include "kernels/cuda.h"
#include "kernels/lars.h"

namespace tfcommx {
namespace {

// Vectors of a launch, as in norms_cuda.cu.
#if defined(CUDART_VERSION) && CUDART_VERSION >= 12010
constexpr int kMost = 700;
#else
constexpr int kMost = 80;
#endif

struct Table {
  LarsVector vectors[kMost];
  int32_t firsts[kMost + 1];  // chunks before each vector
  int32_t count;
};

// A chunk by each block of threads.
__global__ void __launch_bounds__(kThreads)
    update(Table table, const float* rates, LarsOptions options) {
  const int64_t chunk = blockIdx.x;
  const int which = vector_of(table.firsts, table.count, chunk);
  const LarsVector& vector = table.vectors[which];
  const float rate = rates[which], decay = vector.decay, momentum = options.momentum;
  const int64_t start = (chunk - table.firsts[which]) * kChunk, stop = start + kChunk,
                end = stop < vector.entries ? stop : vector.entries;
#pragma unroll 4
  for (int64_t i = start + threadIdx.x; i < end; i += kThreads) {
    const float weight = vector.weight[i], gradient = vector.gradient[i];
    const float decayed = decay == 0.0f ? gradient : add(gradient, multiply(decay, weight));
    const float step = multiply(rate, decayed);
    const float moved = add(multiply(momentum, vector.momentum[i]), -step);
    vector.momentum[i] = moved;
    vector.weight[i] =
        add(weight, options.nesterov ? add(multiply(momentum, moved), -step) : moved);
  }
}

}  // namespace

const char* lars_cuda(const LarsVector* vectors, const float* rates, int64_t count,
                      const LarsOptions& options, CUstream_st* stream) {
  for (int64_t done = 0; done < count; done += kMost) {
    Table table;
    table.count = static_cast<int32_t>(count - done < kMost ? count - done : kMost);
    table.firsts[0] = 0;
    for (int32_t i = 0; i < table.count; ++i) {
      table.vectors[i] = vectors[done + i];
      table.firsts[i + 1] =
          table.firsts[i] + static_cast<int32_t>(chunks_of(vectors[done + i].entries));
    }
    const int64_t chunks = table.firsts[table.count];
    if (chunks) launch(update, chunks, stream, table, rates + done, options);
  }
  return launch_error();
}

}  // namespace tfcommx
