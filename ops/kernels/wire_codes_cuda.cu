// Values as codes of 8 or 4 bits, on GPUs. Compiled by nvcc, and run on CPUs by tests/cuda_on_cpu.
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

template <int bits>
__global__ void __launch_bounds__(kThreads)
    write(CodeLayout layout, const float* values, int32_t* words) {
  constexpr int kPerWord = 32 / bits;
  const int64_t i = thread(), block = i / kCodeBlock;
  const float value = i < layout.k ? values[i] : 0.0f,
              step = step_of_warp(value, largest_code(bits));
  const uint32_t code =
      static_cast<uint32_t>(code_of(value, step, largest_code(bits))) & ((1u << bits) - 1);
  // Neighbours put the codes of a word together
  uint32_t word = code << lane() % kPerWord * bits;
  for (unsigned distance = 1; distance < kPerWord; distance *= 2)
    word |= __shfl_sync(kAllLanes, word, lane() ^ distance);
  const int64_t place = i / kPerWord;
  if (lane() % kPerWord == 0 && place < layout.codes())
    words[layout.steps() + place] = static_cast<int32_t>(word);
  uint16_t* steps = reinterpret_cast<uint16_t*>(words);
  if (lane() == 0 && block < 2 * layout.steps())
    steps[block] = block < layout.blocks() ? static_cast<uint16_t>(bits_of(step) >> 16) : 0;
}

template <int bits>
__global__ void __launch_bounds__(kThreads)
    round(CodeLayout layout, const float* values, float* written, float* errors) {
  const int64_t i = thread();
  const float value = i < layout.k ? values[i] : 0.0f,
              step = step_of_warp(value, largest_code(bits));
  if (i >= layout.k) return;
  const float rounded =
      value_of(code_of(value, step, largest_code(bits)), step, largest_code(bits));
  written[i] = rounded;
  errors[i] = rounding_error(value, rounded);
}

// Blocks of threads for `values` whole blocks of values.
int64_t blocks(int64_t values) { return (values * kCodeBlock + kThreads - 1) / kThreads; }

}  // namespace

const char* codes_write_cuda(const CodeLayout& layout, const float* values, int32_t* words,
                             CUstream_st* stream) {
  // Of the last step, which may be padding, too
  if (layout.k)
    launch(layout.bits == 8 ? write<8> : write<4>, blocks(2 * layout.steps()), stream, layout,
           values, words);
  return launch_error();
}

const char* codes_round_cuda(const CodeLayout& layout, const float* values, float* written,
                             float* errors, CUstream_st* stream) {
  if (layout.k)
    launch(layout.bits == 8 ? round<8> : round<4>, blocks(layout.blocks()), stream, layout, values,
           written, errors);
  return launch_error();
}

}  // namespace tfcommx
