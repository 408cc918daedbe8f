// A dense vector in 16 bits, on GPUs. Compiled by nvcc, and run on CPUs by
// tests/cuda_on_cpu.
#include "kernels/cuda.h"
#include "kernels/dense.h"

namespace tfcommx {
namespace {

constexpr int kEach = 4;  // entries of a thread, whose loads are under way together

template <Float type>
__device__ float widened(uint16_t bits) {
  return type == Float::float16 ? from_float16(bits) : from_bfloat16(bits);
}

// Entry j of this thread; n if it has none.
__device__ int64_t entry(int j, int64_t n) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kEach + j) * kThreads + threadIdx.x;
  return i < n ? i : n;
}

template <Float type>
__global__ void __launch_bounds__(kThreads)
    write(Rounding how, const float* gradient, float* residual, uint16_t* written, int64_t n) {
  how.type = type;  // known when compiled
  float whole[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int64_t i = entry(j, n);
    if (i < n) whole[j] = add(gradient[i], residual[i]);
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int64_t i = entry(j, n);
    if (i == n) continue;
    float back;
    written[i] = narrowed(how, whole[j], &back);
    if ((bits_of(whole[j]) & 0x7fffffffu) < 0x7f800000u) residual[i] = add(whole[j], -back);
  }
}

template <Float type>
__global__ void __launch_bounds__(kThreads)
    add_parts(const uint16_t* written, int64_t parts, float factor, float* total, int64_t n) {
  float sum[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (entry(j, n) < n) sum[j] = widened<type>(written[entry(j, n)]);
#pragma unroll 2
  for (int64_t part = 1; part < parts; ++part) {
    written += n;
    uint16_t bits[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (entry(j, n) < n) bits[j] = written[entry(j, n)];
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (entry(j, n) < n) sum[j] = add(sum[j], widened<type>(bits[j]));
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (entry(j, n) < n) total[entry(j, n)] = multiply(sum[j], factor);
}

int64_t blocks(int64_t n) { return (n + kEach * kThreads - 1) / (kEach * kThreads); }

}  // namespace

const char* dense_write_cuda(const Rounding& how, const float* gradient, float* residual,
                             uint16_t* written, int64_t n, CUstream_st* stream) {
  if (n == 0) return nullptr;
  launch(how.type == Float::float16 ? write<Float::float16> : write<Float::bfloat16>, blocks(n),
         stream, how, gradient, residual, written, n);
  return launch_error();
}

const char* dense_add_cuda(Float type, const uint16_t* written, int64_t parts, float factor,
                           float* total, int64_t n, CUstream_st* stream) {
  if (n == 0) return nullptr;
  launch(type == Float::float16 ? add_parts<Float::float16> : add_parts<Float::bfloat16>, blocks(n),
         stream, written, parts, factor, total, n);
  return launch_error();
}

}  // namespace tfcommx
