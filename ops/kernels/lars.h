// The update of LARS for many vectors in one pass over memory, once their rates are known.
//
// Per entry, each operation rounded to float32, denormals zero:
//   d = g + decay * w               (g where decay is 0)
//   m = momentum * m - rate * d
//   w = w + m                       (Nesterov: w + (momentum * m - rate * d), with the new m)
#pragma once

#include <cstdint>

#include "kernels/chunks.h"
#include "kernels/parallel.h"

struct CUstream_st;

namespace tfcommx {

struct LarsVector {
  float *weight, *momentum;  // [entries], updated in place
  const float* gradient;     // [entries]
  int64_t entries;
  float decay;
};

struct LarsOptions {
  float momentum;
  bool nesterov;
};

// rates[count]: learning rate times trust ratio of each vector. No two arrays may overlap. Cost:
// reads three vectors and writes two.
void lars_cpu(const LarsVector* vectors, const float* rates, int64_t count,
              const LarsOptions& options, const ParallelFor& parallel_for);

// The same on a GPU, queued on the stream: one launch for every 700 vectors (80 if compiled before
// CUDA 12.1). `rates` is on the GPU, `vectors` on the host and may be freed
// at once. Returns null, or CUDA's message if a kernel could not be launched.
const char* lars_cuda(const LarsVector* vectors, const float* rates, int64_t count,
                      const LarsOptions& options, CUstream_st* stream);

}  // namespace tfcommx
