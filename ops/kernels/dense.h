// A dense vector on the wire: written in 16 bits, with what rounding loses kept, and added again.
#pragma once

#include <cstdint>

#include "kernels/device.h"
#include "kernels/parallel.h"
#include "kernels/select.h"
#include "kernels/wire_float.h"

namespace tfcommx {

// How entries are written: what travels of an entry x is the nearest 16-bit number to x * scale.
struct Rounding {
  Float type;   // float16 or bfloat16
  float scale;  // a power of two <= 1
  float reach;  // a power of two >= 1: float16 carries up to 65504 * reach of an entry
};

// Largest finite numbers.
constexpr float kFloat16Largest = 65504.0f, kBfloat16Largest = 0x1.fep127f;

// Denormal products are zero on GPUs too, as in TensorFlow's threads.
TFCOMMX_DEVICE inline float product(float a, float b) {
#ifdef __CUDA_ARCH__
  asm("mul.rn.ftz.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#else
  return flushed(flushed(a) * flushed(b));
#endif
}

// Returns the 16 bits of a sum of gradient and residual, and in *back the number that they stand
// for. A finite number beyond `reach` is cut to it; from 2^29 on to 2^15, and from 2^39 on to 0
// (both times reach), because float32 cannot hold the difference to more.
TFCOMMX_DEVICE inline uint16_t narrowed(const Rounding& how, float whole, float* back) {
  const uint32_t bits = bits_of(whole), sign = bits & 0x80000000u;
  const bool half = how.type == Float::float16, finite = (bits ^ sign) < 0x7f800000u;
  const float size = float_of(bits ^ sign);
  const float limit = !half                                ? kBfloat16Largest
                      : size < product(0x1p29f, how.reach) ? product(kFloat16Largest, how.reach)
                      : size < product(0x1p39f, how.reach) ? product(0x1p15f, how.reach)
                                                           : 0.0f;
  const float cut = float_of(bits_of(size < limit ? size : limit) | sign);
  const float scaled = finite ? product(cut, how.scale) : whole;
  const uint16_t written = half ? to_float16(scaled) : to_bfloat16(scaled);
  // The reciprocal of a power of two, without a division
  const float unscale = float_of((254u << 23) - bits_of(how.scale));
  *back = product(half ? from_float16(written) : from_bfloat16(written), unscale);
  return written;
}

// Writes gradient + residual, each of n entries, to written[n]; the residual keeps what of it was
// not written, exactly, and stays as it is where the sum is NaN or infinite. Denormal float32
// numbers are zero. Cost: one pass, 14 bytes an entry.
void dense_write_cpu(const Rounding& how, const float* gradient, float* residual, uint16_t* written,
                     int64_t n, const ParallelFor& parallel_for);

// Adds `parts` equal parts of what was written, in their order and in float32, and multiplies the
// sums, total[n], by `factor`. Cost: one pass.
void dense_add_cpu(Float type, const uint16_t* written, int64_t parts, float factor, float* total,
                   int64_t n, const ParallelFor& parallel_for);

// The same on a GPU, queued on the stream. Return null, or CUDA's message if a kernel could not be
// launched.
const char* dense_write_cuda(const Rounding& how, const float* gradient, float* residual,
                             uint16_t* written, int64_t n, CUstream_st* stream);
const char* dense_add_cuda(Float type, const uint16_t* written, int64_t parts, float factor,
                           float* total, int64_t n, CUstream_st* stream);

}  // namespace tfcommx
