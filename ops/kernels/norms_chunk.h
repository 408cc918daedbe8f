// The one loop over n-sized data of the norms on CPUs: one chunk a call.
#pragma once

#include <cstdint>

#include "kernels/device.h"
#include "kernels/norms.h"
#include "kernels/wire_float.h"

namespace tfcommx {

// a[0] becomes the sum of a[0] ... a[count - 1], count >= 1.
inline void fold(float* a, int64_t count) {
  for (int64_t half; count > 1; count = half) {
    half = (count + 1) / 2;
    for (int64_t i = 0; i < count - half; ++i) a[i] += a[half + i];
  }
}

// Whatever NaN it was.
TFCOMMX_DEVICE inline float one_nan(float x) { return x == x ? x : float_of(0x7fc00000u); }

// The sum of the squares of count entries of a chunk, 1 <= count <= kChunk.
using ChunkSum = float (*)(const void* entries, int64_t count);

struct ChunkSums {
  ChunkSum of[3];  // by Float
};

const ChunkSums& chunk_sums_portable();
#if defined(__x86_64__)
const ChunkSums& chunk_sums_avx2();
const ChunkSums& chunk_sums_avx512();
#endif
const ChunkSums& chunk_sums();  // the fastest that this processor runs

}  // namespace tfcommx
