// A dense vector in 16 bits, on GPUs: one entry by each thread. Compiled by nvcc, and run on CPUs by
// tests/cuda_on_cpu; no GPU has run it yet.
#include "kernels/cuda.h"
#include "kernels/dense.h"

namespace tfcommx {
namespace {

__device__ int64_t thread() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

int64_t blocks(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

__device__ float widened(Float type, uint16_t bits) {
  return type == Float::float16 ? from_float16(bits) : from_bfloat16(bits);
}

__global__ void __launch_bounds__(kThreads)
    write(Rounding how, const float* gradient, float* residual, uint16_t* written, int64_t n) {
  const int64_t i = thread();
  if (i >= n) return;
  const float whole = add(gradient[i], residual[i]);
  float back;
  written[i] = narrowed(how, whole, &back);
  if ((bits_of(whole) & 0x7fffffffu) < 0x7f800000u) residual[i] = add(whole, -back);
}

__global__ void __launch_bounds__(kThreads)
    add_parts(Float type, const uint16_t* written, int64_t parts, float factor, float* total,
              int64_t n) {
  const int64_t i = thread();
  if (i >= n) return;
  float sum = widened(type, written[i]);
  for (int64_t part = 1; part < parts; ++part) sum = add(sum, widened(type, written[part * n + i]));
  total[i] = multiply(sum, factor);
}

}  // namespace

const char* dense_write_cuda(const Rounding& how, const float* gradient, float* residual,
                             uint16_t* written, int64_t n, CUstream_st* stream) {
  if (n == 0) return nullptr;
  launch(write, blocks(n), stream, how, gradient, residual, written, n);
  return launch_error();
}

const char* dense_add_cuda(Float type, const uint16_t* written, int64_t parts, float factor,
                           float* total, int64_t n, CUstream_st* stream) {
  if (n == 0) return nullptr;
  launch(add_parts, blocks(n), stream, type, written, parts, factor, total, n);
  return launch_error();
}

}  // namespace tfcommx
