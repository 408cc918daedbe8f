// Norms on GPUs. Compiled by nvcc, and run on CPUs by tests/cuda_on_cpu.
//
// A table of the vectors travels as an argument of the launch, so that nothing is copied to the GPU
// before.
#include "kernels/cuda.h"
#include "kernels/norms.h"
#include "kernels/norms_chunk.h"
#include "kernels/select_scan.h"

namespace tfcommx {
namespace {

// Vectors of a launch: its arguments may have 4 KB, and 32,764 bytes since CUDA 12.1.
#if defined(CUDART_VERSION) && CUDART_VERSION >= 12010
constexpr int kMost = 1024;
#else
constexpr int kMost = 160;
#endif
constexpr int kChunksOfBlock = kThreads / kLanes;

struct Table {
  const void* data[kMost];
  int64_t entries[kMost];
  int32_t firsts[kMost + 1];  // chunks before each vector
  uint8_t types[kMost];
  int32_t count;
};

// Of a chunk, the sum of the squares of one lane.
template <class T>
__device__ float lane_sum(const T* x, int64_t first, int64_t end) {
  float sum = 0;
#pragma unroll 8
  for (int64_t i = first; i < end; i += kLanes) {
    const float value = widen(x[i]);
    sum = add(sum, multiply(value, value));
  }
  return sum;
}

// Four chunks by each block of threads, one lane by each thread.
__global__ void __launch_bounds__(kThreads) sum_chunks(Table table, float* sums) {
  __shared__ float lanes[kThreads];
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kChunksOfBlock + threadIdx.x / kLanes;
  const int lane_of_chunk = threadIdx.x % kLanes;
  const bool inside = chunk < table.firsts[table.count];
  float sum = 0;
  if (inside) {
    const int which = vector_of(table.firsts, table.count, chunk);
    const int64_t start = (chunk - table.firsts[which]) * kChunk, first = start + lane_of_chunk,
                  stop = start + kChunk,
                  end = stop < table.entries[which] ? stop : table.entries[which];
    const void* data = table.data[which];
    switch (static_cast<Float>(table.types[which])) {
      case Float::float32:
        sum = lane_sum(static_cast<const float*>(data), first, end);
        break;
      case Float::float16:
        sum = lane_sum(static_cast<const Half*>(data), first, end);
        break;
      case Float::bfloat16:
        sum = lane_sum(static_cast<const Bfloat*>(data), first, end);
        break;
    }
  }
  lanes[threadIdx.x] = sum;
  for (int half = kLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane_of_chunk < half)
      lanes[threadIdx.x] = add(lanes[threadIdx.x], lanes[threadIdx.x + half]);
  }
  if (inside && lane_of_chunk == 0) sums[chunk] = lanes[threadIdx.x];
}

// The chunks of one vector by each block of threads.
__global__ void __launch_bounds__(kThreads) fold_chunks(Table table, float* sums, float* squares) {
  const int64_t first = table.firsts[blockIdx.x];
  float* mine = sums + first;
  int64_t half;
  for (int64_t count = table.firsts[blockIdx.x + 1] - first; count > 1; count = half) {
    half = (count + 1) / 2;
    for (int64_t i = threadIdx.x; i < count - half; i += kThreads)
      mine[i] = add(mine[i], mine[half + i]);
    __syncthreads();
  }
  if (threadIdx.x == 0) squares[blockIdx.x] = table.entries[blockIdx.x] ? one_nan(mine[0]) : 0.0f;
}

}  // namespace

const char* norms_cuda(const Vector* vectors, int64_t count, float* sums, float* squares,
                       CUstream_st* stream) {
  for (int64_t done = 0; done < count; done += kMost) {
    Table table;
    table.count = static_cast<int32_t>(count - done < kMost ? count - done : kMost);
    table.firsts[0] = 0;
    for (int32_t i = 0; i < table.count; ++i) {
      const Vector& vector = vectors[done + i];
      table.data[i] = vector.data;
      table.entries[i] = vector.entries;
      table.types[i] = static_cast<uint8_t>(vector.type);
      table.firsts[i + 1] = table.firsts[i] + static_cast<int32_t>(vector.chunks());
    }
    const int64_t chunks = table.firsts[table.count];
    if (chunks)
      launch(sum_chunks, (chunks + kChunksOfBlock - 1) / kChunksOfBlock, stream, table, sums);
    launch(fold_chunks, table.count, stream, table, sums, squares + done);
    sums += chunks;
  }
  return launch_error();
}

}  // namespace tfcommx
