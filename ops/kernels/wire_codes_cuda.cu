// Values as codes of 8 or 4 bits, on GPUs. Compiled by nvcc, and run on CPUs by tests/cuda_on_cpu;
// no GPU has run it yet.
#include "kernels/cuda.h"
#include "kernels/wire_codes.h"

namespace tfcommx {
namespace {

static_assert(kCodeBlock == 32, "a warp has a block of values, and each lane one of them");

__device__ int64_t thread() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

// The step of this warp's values; all lanes must call it.
__device__ float step_of_warp(float value, int largest) {
  uint32_t size = finite_size(value);
  for (unsigned distance = 16; distance; distance /= 2) {
    const uint32_t other = __shfl_sync(kAllLanes, size, lane() ^ distance);
    size = other > size ? other : size;
  }
  return step_of(size, largest);
}

__global__ void __launch_bounds__(kThreads)
    write(CodeLayout layout, const float* values, int32_t* words) {
  const int64_t i = thread(), block = i / kCodeBlock;
  const int largest = largest_code(layout.bits), per_word = 32 / layout.bits;
  const float value = i < layout.k ? values[i] : 0.0f, step = step_of_warp(value, largest);
  const uint32_t code =
      static_cast<uint32_t>(code_of(value, step, largest)) & ((1u << layout.bits) - 1);
  uint32_t word = 0;  // of the codes of the lanes from per_word * lane on
  for (int j = 0; j < per_word; ++j)
    word |= __shfl_sync(kAllLanes, code, (lane() * per_word + j) % 32) << (j * layout.bits);
  const int64_t place = block * layout.bits + lane();
  if (lane() < layout.bits && place < layout.codes())
    words[layout.steps() + place] = static_cast<int32_t>(word);
  uint16_t* steps = reinterpret_cast<uint16_t*>(words);
  if (lane() == 0 && block < 2 * layout.steps())
    steps[block] = block < layout.blocks() ? static_cast<uint16_t>(bits_of(step) >> 16) : 0;
}

__global__ void __launch_bounds__(kThreads)
    round(CodeLayout layout, const float* values, float* written, float* errors) {
  const int64_t i = thread();
  const int largest = largest_code(layout.bits);
  const float value = i < layout.k ? values[i] : 0.0f, step = step_of_warp(value, largest);
  if (i >= layout.k) return;
  written[i] = value_of(code_of(value, step, largest), step, largest);
  errors[i] = rounding_error(value, written[i]);
}

// Blocks of threads for `values` whole blocks of values.
int64_t blocks(int64_t values) { return (values * kCodeBlock + kThreads - 1) / kThreads; }

}  // namespace

const char* codes_write_cuda(const CodeLayout& layout, const float* values, int32_t* words,
                             CUstream_st* stream) {
  // Of the last step, which may be padding, too
  if (layout.k) launch(write, blocks(2 * layout.steps()), stream, layout, values, words);
  return launch_error();
}

const char* codes_round_cuda(const CodeLayout& layout, const float* values, float* written,
                             float* errors, CUstream_st* stream) {
  if (layout.k) launch(round, blocks(layout.blocks()), stream, layout, values, written, errors);
  return launch_error();
}

}  // namespace tfcommx
