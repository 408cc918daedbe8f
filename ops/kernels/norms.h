// The squared norms of many vectors in one pass over memory, each in one order of additions that
// depends on nothing but its length.
//
// Entry i of a vector belongs to chunk i / 4096, and there to lane i % 64. A lane begins with 0 and
// adds the squares of its entries one after another. Then lanes are folded, and after them the sums
// of the chunks: while there is more than one, the first ones receive the second half
// (half = (count + 1) / 2, a[i] += a[half + i]), so that each is in the sum after at most
// 64 + 6 + log2(chunks) roundings. Products and sums are rounded one by one to float32 (nothing is
// fused), and denormal entries and results are zero; so threads, blocks, alignment and instruction
// sets cannot change a bit, and CPUs and GPUs give the same ones. NaN comes out as one NaN.
#pragma once

#include <cstdint>

#include "kernels/chunks.h"
#include "kernels/device.h"
#include "kernels/parallel.h"
#include "kernels/select.h"

namespace tfcommx {

constexpr int64_t kLanes = 64;

struct Vector {
  const void* data;
  int64_t entries;
  Float type;

  TFCOMMX_DEVICE int64_t chunks() const { return chunks_of(entries); }
};

// squares[count]: the squared norm of each vector. sums: room for a float of every chunk of every
// vector, unspecified afterwards. Cost: reads each entry once.
void norms_cpu(const Vector* vectors, int64_t count, float* sums, float* squares,
               const ParallelFor& parallel_for);

// The same on a GPU, queued on the stream, nothing waits: two launches for every 1,024 vectors (160
// if compiled before CUDA 12.1), one that reads them and one that folds their chunks. `vectors` is on
// the host and may be freed at once. Returns null, or CUDA's message if a kernel could not be
// launched.
const char* norms_cuda(const Vector* vectors, int64_t count, float* sums, float* squares,
                       CUstream_st* stream);

}  // namespace tfcommx
