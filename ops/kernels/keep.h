// What rounding leaves of selected entries goes where the selection has left zeros.
#pragma once

#include <cstdint>

#include "kernels/device.h"
#include "kernels/wire_float.h"

struct CUstream_st;  // what CUDA's cudaStream_t points to

namespace tfcommx {

struct Keep {
  const int32_t* indices;  // [k], in [0, n), none twice
  const float* values;     // [k], what was selected; where one is not finite nothing is kept
  const float* errors;     // [k]
  int64_t k;
  float* residual;  // [n] out: at the indices the errors, elsewhere as before
  int64_t n;

  TFCOMMX_DEVICE bool outside(int64_t i) const { return indices[i] < 0 || indices[i] >= n; }

  TFCOMMX_DEVICE void put(int64_t i) const {
    if ((bits_of(values[i]) & 0x7fffffff) < 0x7f800000) residual[indices[i]] = errors[i];
  }
};

// Returns the position of the first index outside [0, n), and then the residual is unspecified; -1:
// all are inside. Cost: one pass over k entries.
int64_t keep_cpu(const Keep& keep);

// The same on a GPU, queued on the stream. An index outside is left out.
// Returns null, or CUDA's message.
const char* keep_cuda(const Keep& keep, CUstream_st* stream);

}  // namespace tfcommx
