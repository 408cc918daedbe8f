// A dense vector in codes of 8, 4, 2 or 1 bits, on GPUs. Compiled by nvcc, and run on CPUs by
// tests/cuda_on_cpu.
#include "kernels/cuda.h"
#include "kernels/low_bits.h"

namespace tfcommx {
namespace {

// Blocks that add, on each processor. Eight leave a thread 32 registers, too few for Volta's code
// and for 16 entries a lane.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <int bits>
constexpr int kAddingBlocks = resident(bits == 1 ? 3 : 6);
#else
template <int bits>
constexpr int kAddingBlocks = resident(bits == 1 ? 3 : 8);
#endif

// A warp takes a block, and a lane its entries i, i + 32, i + 64 and so on, whose codes are in one
// word, kApart bits apart from bit `shift` on. Instructions take as long as memory does, so codes are
// handled four at a time, the low bits of the bytes of a word, and blocks without padding have
// separate code.
template <int bits>
constexpr int kBlock = low_bits_block(bits);
template <int bits>
constexpr uint32_t kWords = low_bits_words(bits);  // of a block
template <int bits>
constexpr int kEach = kBlock<bits> / 32;
template <int bits>
constexpr int kApart = 32 / kEach<bits>;
constexpr int kTogether = 4;  // parts that are read before the first of them is added
constexpr uint32_t kBytes = 0x01010101;

// A layout, and what the kernels need of it, computed once. Of a shard:
struct Shape {
  LowBits layout;
  uint32_t blocks;  // of entries
  uint32_t teams;   // blocks of threads: a warp takes a block of entries
  uint32_t steps;   // words
  int64_t words;

  explicit Shape(const LowBits& of)
      : layout(of),
        blocks(static_cast<uint32_t>(of.blocks())),
        teams((blocks + kWarps - 1) / kWarps),
        steps(static_cast<uint32_t>(of.steps())),
        words(of.words()) {}
};

// The block of this warp in its shard, of which `team` is the number of this block of threads.
__device__ uint32_t block_of(uint32_t team) { return team * kWarps + threadIdx.x / 32; }

template <int bits>
__device__ uint32_t shift() {
  return lane() / kWords<bits> * bits;
}

template <bool full>
__device__ bool inside(int j, int count) {
  return full || 32 * j + lane() < count;
}

// The numbers of steps that four codes stand for, plus kBias, in bytes.
template <int bits>
constexpr int kBias = bits == 2 ? 4 : 1 << (bits - 1);

template <int bits>
__device__ uint32_t numbers_of(uint32_t codes) {
  if constexpr (bits >= 4)  // The sign bit becomes part of the number
    return (codes & ((1u << bits) - 1) * kBytes) ^ kBias<bits> * kBytes;
  if constexpr (bits == 2)  // 0, 1, 2 and 3 become 5, 3, 7 and 1
    return kBytes | ((codes ^ codes << 1) & 2 * kBytes) | (~codes << 2 & 4 * kBytes);
  return ~codes << 1 & 2 * kBytes;
}

// The number of steps of this lane's entry j. Entries of equal j % kGroups share a call of
// `numbers_of`, because their codes are in the four bytes of one word.
template <int bits>
__device__ float number(uint32_t codes, int j) {
  constexpr float kInteger = 0x1p23f;  // its low byte is an integer's
  constexpr int kGroups = kEach<bits> / 4;
  const uint32_t numbers = numbers_of<bits>(codes >> j % kGroups * kApart<bits>);
  return float_of(__byte_perm(numbers, bits_of(kInteger), 0x7440 + j / kGroups)) -
         (kInteger + kBias<bits>);
}

// Adds the terms pairwise into the first. A recursion, because nvcc leaves a loop over `half` rolled
// for sm_90, and the terms in memory.
template <int half, int size>
__device__ void fold(float (&terms)[size]) {
#pragma unroll
  for (int j = 0; j < half; ++j) terms[j] = add(terms[j], terms[j + half]);
  if constexpr (half > 1) fold<half / 2>(terms);
}

// The step of finite entries from their largest magnitude or the mean; NaN if one is not finite.
// All lanes must call it.
template <int bits, bool full>
__device__ float step_of_warp(const float (&whole)[kEach<bits>], int count) {
  if constexpr (bits >= 4) {
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < kEach<bits>; ++j) {
      const uint32_t one = bits_of(whole[j]) & 0x7fffffff;
      most = one > most ? one : most;
    }
    const float size = float_of(largest_of_warp(most));
    return bits_of(size) < kInfinite ? low_bits_step<bits>(size) : float_of(kNan);
  } else {
    float terms[kEach<bits>];
#pragma unroll
    for (int j = 0; j < kEach<bits>; ++j)
      terms[j] = multiply(float_of(bits_of(whole[j]) & 0x7fffffff), 1.0f / kBlock<bits>);
    fold<kEach<bits> / 2>(terms);
    float sum = terms[0];
#pragma unroll
    for (unsigned distance = 16; distance; distance /= 2)
      sum = add(sum, __shfl_xor_sync(kAllLanes, sum, distance));
    // The sum of finite magnitudes / kBlock is finite, but the mean of a few large ones may not be
    if (!(bits_of(sum) < kInfinite)) return float_of(kNan);
    return low_bits_step<bits>(full ? sum : mean_of<bits>(sum, count));
  }
}

// The code of an entry, as low_bits_code, and what is left of the entry.
template <int bits>
__device__ uint32_t code_of(float x, float step, float scale, float* left) {
  if constexpr (bits >= 4) {
    // Plus a number below 2^22 it ends in the nearest integer
    constexpr float kInteger = 0x1.8p23f;
    const float moved = multiply(x, scale) + kInteger;
    *left = add_product(-(moved - kInteger), step, x);
    return bits_of(moved) & ((1u << bits) - 1);
  }
  const uint32_t negative = bits_of(x) >> 31;
  const bool three = bits == 2 && float_of(bits_of(x) & 0x7fffffff) >= scale;
  const float size = three ? multiply(step, 3.0f) : step;
  *left = add(x, -float_of(bits_of(size) | negative << 31));
  return negative | (three ? 2 : 0);
}

// Writes this warp's entries as a block of a shard, and what is left of them to its residual, which
// begins at this lane's first entry. The entries from `count` on are 0, and no entries. All lanes
// must call it.
template <int bits, bool full>
__device__ void write_block(const Shape& shape, uint32_t block, const float (&whole)[kEach<bits>],
                            int count, float* residual, int32_t* words) {
  const float step = step_of_warp<bits, full>(whole, count);
  uint32_t codes = 0;
  if (step == step) {  // The same in all lanes
    const float scale = low_bits_scale<bits>(step);
#pragma unroll
    for (int j = 0; j < kEach<bits>; ++j) {
      float left;
      codes |= code_of<bits>(whole[j], step, scale, &left) << kApart<bits> * j;
      if (inside<full>(j, count)) residual[32 * j] = left;
    }
  }
  uint32_t word = codes << shift<bits>();
#pragma unroll
  for (unsigned distance = kWords<bits>; distance < 32; distance *= 2)
    word |= __shfl_xor_sync(kAllLanes, word, distance);
  const uint32_t i = lane();
  if (i < kWords<bits>) words[shape.steps + block * kWords<bits> + i] = static_cast<int32_t>(word);
  uint16_t* steps = reinterpret_cast<uint16_t*>(words);
  if (i == 0) steps[block] = static_cast<uint16_t>(bits_of(step) >> 16);
  if (i == 0 && block == 0 && shape.blocks % 2) steps[shape.blocks] = 0;
}

// What this lane needs of a block as a rank wrote it.
struct Written {
  float step;
  uint32_t codes;
};

template <int bits>
__device__ Written read_block(const Shape& shape, uint32_t block, const int32_t* words) {
  const uint32_t word = words[shape.steps + block * kWords<bits> + lane() % kWords<bits>];
  return {from_bfloat16(reinterpret_cast<const uint16_t*>(words)[block]), word >> shift<bits>()};
}

template <int bits, bool full>
__device__ void write_sum(const Shape& shape, uint32_t block, const float* gradient,
                          float* residual, int count, int32_t* words) {
  float whole[kEach<bits>];
#pragma unroll
  for (int j = 0; j < kEach<bits>; ++j)
    whole[j] = inside<full>(j, count) ? add(gradient[32 * j], residual[32 * j]) : 0.0f;
  write_block<bits, full>(shape, block, whole, count, residual, words);
}

template <int bits>
__global__ void __launch_bounds__(kThreads)
    write(Shape shape, const float* gradient, float* residual, int64_t real, int32_t* words) {
  const uint32_t shard = blockIdx.x / shape.teams;
  const uint32_t block = block_of(blockIdx.x - shard * shape.teams);
  if (block >= shape.blocks) return;
  const int64_t before = shard * shape.layout.entries,
                start = before + int64_t{block} * kBlock<bits> + lane();
  const int count = shape.layout.count(block, real - before);
  gradient += start, residual += start, words += shard * shape.words;
  if (count == kBlock<bits>)
    write_sum<bits, true>(shape, block, gradient, residual, count, words);
  else
    write_sum<bits, false>(shape, block, gradient, residual, count, words);
}

template <int bits>
__device__ void add_part(const Written& part, float (&whole)[kEach<bits>]) {
#pragma unroll
  for (int j = 0; j < kEach<bits>; ++j)
    whole[j] = add_product(number<bits>(part.codes, j), part.step, whole[j]);
}

template <int bits, bool full>
__device__ void add_block(const Shape& shape, uint32_t block, int parts, const int32_t* written,
                          float* residual, int count, int32_t* words) {
  float whole[kEach<bits>], before[kEach<bits>];
#pragma unroll
  for (int j = 0; j < kEach<bits>; ++j) {
    before[j] = inside<full>(j, count) ? residual[32 * j] : 0.0f;
    whole[j] = -0.0f;  // plus x is x, even if x is -0
  }
  for (; parts >= kTogether; parts -= kTogether) {
    Written part[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k, written += shape.words)
      part[k] = read_block<bits>(shape, block, written);
#pragma unroll
    for (int k = 0; k < kTogether; ++k) add_part<bits>(part[k], whole);
  }
#pragma unroll 1
  for (; parts > 0; --parts, written += shape.words)
    add_part<bits>(read_block<bits>(shape, block, written), whole);
#pragma unroll
  for (int j = 0; j < kEach<bits>; ++j)
    whole[j] = inside<full>(j, count) ? add(whole[j], before[j]) : 0.0f;
  write_block<bits, full>(shape, block, whole, count, residual, words);
}

template <int bits>
__global__ void __launch_bounds__(kThreads, kAddingBlocks<bits>)
    add_parts(Shape shape, int parts, const int32_t* written, float* residual, int64_t real,
              int32_t* words) {
  const uint32_t block = block_of(blockIdx.x);
  if (block >= shape.blocks) return;
  const int count = shape.layout.count(block, real);
  residual += int64_t{block} * kBlock<bits> + lane();
  if (count == kBlock<bits>)
    add_block<bits, true>(shape, block, parts, written, residual, count, words);
  else
    add_block<bits, false>(shape, block, parts, written, residual, count, words);
}

template <int bits, bool full>
__device__ void read_values(const Written& part, int count, float factor, float* total) {
#pragma unroll
  for (int j = 0; j < kEach<bits>; ++j) {
    const float value = multiply(multiply(number<bits>(part.codes, j), part.step), factor);
    if (inside<full>(j, count)) total[32 * j] = part.step == part.step ? value : float_of(kNan);
  }
}

template <int bits>
__global__ void __launch_bounds__(kThreads)
    read(Shape shape, const int32_t* words, float factor, float* total) {
  const uint32_t shard = blockIdx.x / shape.teams;
  const uint32_t block = block_of(blockIdx.x - shard * shape.teams);
  if (block >= shape.blocks) return;
  const Written part = read_block<bits>(shape, block, words + shard * shape.words);
  const int count = shape.layout.count(block, shape.layout.entries);
  total += shard * shape.layout.entries + int64_t{block} * kBlock<bits> + lane();
  if (count == kBlock<bits>)
    read_values<bits, true>(part, count, factor, total);
  else
    read_values<bits, false>(part, count, factor, total);
}

// The kernel for a width of codes.
template <class Kernel>
Kernel* of_bits(int bits, Kernel* eight, Kernel* four, Kernel* two, Kernel* one) {
  return bits == 8 ? eight : bits == 4 ? four : bits == 2 ? two : one;
}

}  // namespace

const char* low_bits_write_cuda(const LowBits& layout, int64_t shards, const float* gradient,
                                float* residual, int64_t real, int32_t* words,
                                CUstream_st* stream) {
  const Shape shape(layout);
  launch(of_bits(layout.bits, write<8>, write<4>, write<2>, write<1>), shards * shape.teams, stream,
         shape, gradient, residual, real, words);
  return launch_error();
}

const char* low_bits_add_cuda(const LowBits& layout, int64_t parts, const int32_t* written,
                              float* residual, int64_t real, int32_t* words, CUstream_st* stream) {
  const Shape shape(layout);
  launch(of_bits(layout.bits, add_parts<8>, add_parts<4>, add_parts<2>, add_parts<1>), shape.teams,
         stream, shape, static_cast<int>(parts), written, residual, real, words);
  return launch_error();
}

const char* low_bits_read_cuda(const LowBits& layout, int64_t shards, const int32_t* words,
                               float factor, float* total, CUstream_st* stream) {
  const Shape shape(layout);
  launch(of_bits(layout.bits, read<8>, read<4>, read<2>, read<1>), shards * shape.teams, stream,
         shape, words, factor, total);
  return launch_error();
}

}  // namespace tfcommx
