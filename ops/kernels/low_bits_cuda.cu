// A dense vector in codes of 8, 4, 2 or 1 bits, on GPUs. Compiled by nvcc, and run on CPUs by
// tests/cuda_on_cpu.
#include "kernels/cuda.h"
#include "kernels/low_bits.h"

namespace tfcommx {
namespace {

constexpr int kEach = kLowBitsBlock / 32;  // entries of a lane: i, i + 32, i + 64 and i + 96

// The block of this warp among those of all shards.
__device__ int64_t warp() { return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; }

// The largest magnitude of this warp's finite entries, or the mean of `count`; the others are 0.
// All lanes must call it.
template <int bits>
__device__ float size_of_warp(const float (&whole)[kEach], int count) {
  if constexpr (bits >= 4) {
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t size = bits_of(whole[j]) & 0x7fffffff;
      most = size > most ? size : most;
    }
#pragma unroll
    for (unsigned distance = 16; distance; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, most, distance);
      most = other > most ? other : most;
    }
    return float_of(most);
  } else {
    float terms[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      terms[j] = multiply(float_of(bits_of(whole[j]) & 0x7fffffff), 1.0f / kLowBitsBlock);
    float sum = add(add(terms[0], terms[2]), add(terms[1], terms[3]));
#pragma unroll
    for (unsigned distance = 16; distance; distance /= 2)
      sum = add(sum, __shfl_xor_sync(kAllLanes, sum, distance));
    return mean_of(sum, count);
  }
}

// Writes this warp's entries as a block of a shard, and what is left of them to its residual. The
// entries from `count` on are 0, and no entries. All lanes must call it.
template <int bits>
__device__ void write_block(const LowBits& layout, int64_t block, const float (&whole)[kEach],
                            int count, float* residual, int32_t* words) {
  constexpr int kWords = 4 * bits;
  bool finite = true;
#pragma unroll
  for (int j = 0; j < kEach; ++j) finite = finite && mask_if_finite(whole[j]);
  finite = __all_sync(kAllLanes, finite);
  const float step =
                  finite ? low_bits_step<bits>(size_of_warp<bits>(whole, count)) : float_of(kNan),
              scale = low_bits_scale<bits>(step);
  uint32_t word = 0;  // the codes that this lane puts into word lane() % kWords
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = 32 * j + lane();
    const uint32_t code = finite ? low_bits_code<bits>(whole[j], scale) : 0;
    if (finite && i < count) residual[i] = add(whole[j], -low_bits_value<bits>(code, step));
    word |= code << i / kWords * bits;
  }
#pragma unroll
  for (unsigned distance = kWords; distance < 32; distance *= 2)
    word |= __shfl_xor_sync(kAllLanes, word, distance);
  if (lane() < kWords) words[layout.steps() + block * kWords + lane()] = static_cast<int32_t>(word);
  uint16_t* steps = reinterpret_cast<uint16_t*>(words);
  if (lane() == 0) steps[block] = static_cast<uint16_t>(bits_of(step) >> 16);
  if (lane() == 0 && block == 0 && layout.blocks() % 2) steps[layout.blocks()] = 0;
}

// This lane's entries of a block of a shard; returns its step.
template <int bits>
__device__ float read_block(const LowBits& layout, int64_t block, const int32_t* words,
                            float (&values)[kEach]) {
  constexpr int kWords = 4 * bits;
  const float step = from_bfloat16(reinterpret_cast<const uint16_t*>(words)[block]);
  const uint32_t word = words[layout.steps() + block * kWords + lane() % kWords];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const uint32_t code = word >> (32 * j + lane()) / kWords * bits;
    values[j] = low_bits_value<bits>(code & ((1u << bits) - 1), step);
  }
  return step;
}

template <int bits>
__global__ void __launch_bounds__(kThreads)
    write(LowBits layout, int64_t shards, const float* gradient, float* residual, int64_t real,
          int32_t* words) {
  const int64_t blocks = layout.blocks(), shard = warp() / blocks, block = warp() % blocks;
  if (shard >= shards) return;
  const int64_t start = shard * layout.entries + block * kLowBitsBlock;
  const int count = layout.count(block, real - shard * layout.entries);
  gradient += start;
  residual += start;
  float whole[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = 32 * j + lane();
    whole[j] = i < count ? add(gradient[i], residual[i]) : 0.0f;
  }
  write_block<bits>(layout, block, whole, count, residual, words + shard * layout.words());
}

template <int bits>
__global__ void __launch_bounds__(kThreads)
    add_parts(LowBits layout, int64_t parts, const int32_t* written, float* residual, int64_t real,
              int32_t* words) {
  const int64_t block = warp();
  if (block >= layout.blocks()) return;
  const int count = layout.count(block, real);
  residual += block * kLowBitsBlock;
  float whole[kEach];
  read_block<bits>(layout, block, written, whole);
#pragma unroll 2
  for (int64_t part = 1; part < parts; ++part) {
    float values[kEach];
    read_block<bits>(layout, block, written + part * layout.words(), values);
#pragma unroll
    for (int j = 0; j < kEach; ++j) whole[j] = add(whole[j], values[j]);
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = 32 * j + lane();
    whole[j] = i < count ? add(whole[j], residual[i]) : 0.0f;
  }
  write_block<bits>(layout, block, whole, count, residual, words);
}

template <int bits>
__global__ void __launch_bounds__(kThreads)
    read(LowBits layout, int64_t shards, const int32_t* words, float factor, float* total) {
  const int64_t blocks = layout.blocks(), shard = warp() / blocks, block = warp() % blocks;
  if (shard >= shards) return;
  total += shard * layout.entries + block * kLowBitsBlock;
  float values[kEach];
  const float step = read_block<bits>(layout, block, words + shard * layout.words(), values);
  const int count = layout.count(block, layout.entries);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = 32 * j + lane();
    if (i < count) total[i] = step == step ? multiply(values[j], factor) : float_of(kNan);
  }
}

// The kernel for a width of codes.
template <class Kernel>
Kernel* of_bits(int bits, Kernel* eight, Kernel* four, Kernel* two, Kernel* one) {
  return bits == 8 ? eight : bits == 4 ? four : bits == 2 ? two : one;
}

// Blocks of threads for warps.
int64_t blocks_of(int64_t warps) { return (warps + kWarps - 1) / kWarps; }

}  // namespace

const char* low_bits_write_cuda(const LowBits& layout, int64_t shards, const float* gradient,
                                float* residual, int64_t real, int32_t* words,
                                CUstream_st* stream) {
  launch(of_bits(layout.bits, write<8>, write<4>, write<2>, write<1>),
         blocks_of(shards * layout.blocks()), stream, layout, shards, gradient, residual, real,
         words);
  return launch_error();
}

const char* low_bits_add_cuda(const LowBits& layout, int64_t parts, const int32_t* written,
                              float* residual, int64_t real, int32_t* words, CUstream_st* stream) {
  launch(of_bits(layout.bits, add_parts<8>, add_parts<4>, add_parts<2>, add_parts<1>),
         blocks_of(layout.blocks()), stream, layout, parts, written, residual, real, words);
  return launch_error();
}

const char* low_bits_read_cuda(const LowBits& layout, int64_t shards, const int32_t* words,
                               float factor, float* total, CUstream_st* stream) {
  launch(of_bits(layout.bits, read<8>, read<4>, read<2>, read<1>),
         blocks_of(shards * layout.blocks()), stream, layout, shards, words, factor, total);
  return launch_error();
}

}  // namespace tfcommx
