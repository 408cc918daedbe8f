// Elias-Fano coding of ascending indices, on GPUs. Compiled by nvcc, and run on CPUs by
// tests/cuda_on_cpu; no GPU has run it yet.
#include "kernels/cuda.h"
#include "kernels/wire_elias.h"

namespace tfcommx {
namespace {

__device__ int64_t thread() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

__host__ __device__ int64_t blocks(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

__device__ int ones(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

// Word `word` of the bitmap: the first index whose bit is not before it is searched, and those that
// follow are set. If the indices are out of range or order, some word, and no other place.
__device__ uint32_t bitmap_word(const EliasLayout& layout, const int32_t* indices, int64_t word) {
  const int64_t start = word * 32;
  int64_t first = 0, end = layout.k;
  while (first < end) {
    const int64_t middle = first + (end - first) / 2;
    if (layout.bit(middle, indices[middle]) < start) {
      first = middle + 1;
    } else {
      end = middle;
    }
  }
  uint32_t bits = 0;
  for (int64_t i = first; i < layout.k; ++i) {
    const int64_t bit = layout.bit(i, indices[i]) - start;
    if (bit < 0 || bit >= 32) break;
    bits |= 1u << bit;
  }
  return bits;
}

// Word `word` of the low bits, from all indices that have a part in it.
__device__ uint32_t low_word(const EliasLayout& layout, const int32_t* indices, int64_t word) {
  const int width = layout.low_bits;
  const int64_t start = word * 32;
  uint64_t bits = 0;
  for (int64_t i = start / width; i < layout.k && i * width < start + 32; ++i) {
    const uint64_t low = static_cast<uint32_t>(indices[i]) & ((1u << width) - 1);
    const int64_t from = i * width - start;
    bits |= from < 0 ? low >> -from : low << from;
  }
  return static_cast<uint32_t>(bits);
}

// A word of each part by each thread.
__global__ void __launch_bounds__(kThreads)
    encode(EliasLayout layout, const int32_t* indices, int32_t* words) {
  const int64_t i = thread(), bitmap = layout.bitmap();
  if (i < bitmap) words[i] = static_cast<int32_t>(bitmap_word(layout, indices, i));
  if (i < layout.lows()) words[bitmap + i] = static_cast<int32_t>(low_word(layout, indices, i));
}

// Decoding: kThreads words of a bitmap are a chunk, of which each block of threads has one. First
// the ones of each chunk are counted, then the ones of all chunks before it say which index is the
// chunk's first. The counts of a buffer lie where its part of the scratch begins: there are at most
// 3 k bits, so no more chunks than indices.
__global__ void __launch_bounds__(kThreads)
    count_chunks(EliasLayout layout, const int32_t* words, int64_t stride, uint32_t* scratch) {
  const int64_t chunks = blocks(layout.bitmap()), buffer = blockIdx.x / chunks,
                chunk = blockIdx.x % chunks, word = chunk * kThreads + threadIdx.x;
  const uint32_t count =
      word < layout.bitmap() ? ones(static_cast<uint32_t>(words[buffer * stride + word])) : 0;
  const uint32_t before = exclusive_sum_of_block(count);
  if (threadIdx.x == kThreads - 1) scratch[buffer * layout.k + chunk] = before + count;
}

__device__ int32_t index_at(const EliasLayout& layout, const uint32_t* lows, int64_t high,
                            int64_t i, int64_t shard) {
  const int width = layout.low_bits;
  int64_t index = high << width;
  if (width) {
    const int64_t at = i * width;
    const uint64_t two = lows[at / 32] | static_cast<uint64_t>(lows[at / 32 + 1]) << 32;
    index |= static_cast<int64_t>(two >> (at % 32)) & ((1 << width) - 1);
  }
  return index < layout.size ? static_cast<int32_t>(shard * layout.size + index) : -1;
}

__global__ void __launch_bounds__(kThreads)
    decode(EliasLayout layout, const int32_t* words, int64_t stride, int64_t each,
           const uint32_t* scratch, int32_t* indices) {
  __shared__ uint64_t start, total;
  const int64_t k = layout.k, chunks = blocks(layout.bitmap()), buffer = blockIdx.x / chunks,
                mine = blockIdx.x % chunks, word = mine * kThreads + threadIdx.x;
  const uint32_t* counts = scratch + buffer * k;
  uint64_t before = 0, all = 0;
  for (int64_t i = threadIdx.x; i < chunks; i += kThreads) {
    all += counts[i];
    if (i < mine) before += counts[i];
  }
  const uint64_t all_before = exclusive_sum_of_block(all),
                 before_before = exclusive_sum_of_block(before);
  if (threadIdx.x == kThreads - 1) {
    total = all_before + all;
    start = before_before + before;
  }
  const uint32_t* bitmap = reinterpret_cast<const uint32_t*>(words) + buffer * stride;
  uint32_t bits = word < layout.bitmap() ? bitmap[word] : 0;
  const uint32_t first = exclusive_sum_of_block(static_cast<uint32_t>(ones(bits)));
  __syncthreads();
  indices += buffer * k;
  if (total == static_cast<uint64_t>(k)) {
    for (int64_t i = static_cast<int64_t>(start) + first; bits; bits &= bits - 1, ++i) {
      const int64_t high = word * 32 + __ffs(static_cast<int>(bits)) - 1 - i;
      indices[i] = index_at(layout, bitmap + layout.bitmap(), high, i, buffer / each);
    }
  } else if (mine == 0) {
    for (int64_t i = threadIdx.x; i < k; i += kThreads) indices[i] = -1;
  }
}

}  // namespace

const char* elias_encode_cuda(const EliasLayout& layout, const int32_t* indices, int32_t* words,
                              CUstream_st* stream) {
  const int64_t bitmap = layout.bitmap(), lows = layout.lows();
  if (layout.k)
    launch(encode, blocks(bitmap > lows ? bitmap : lows), stream, layout, indices, words);
  return launch_error();
}

const char* elias_decode_cuda(const EliasLayout& layout, const int32_t* words, int64_t stride,
                              int64_t buffers, int64_t each, int32_t* indices, uint32_t* scratch,
                              CUstream_st* stream) {
  const int64_t chunks = buffers * blocks(layout.bitmap());
  if (chunks == 0) return launch_error();
  launch(count_chunks, chunks, stream, layout, words, stride, scratch);
  launch(decode, chunks, stream, layout, words, stride, each, static_cast<const uint32_t*>(scratch),
         indices);
  return launch_error();
}

}  // namespace tfcommx
