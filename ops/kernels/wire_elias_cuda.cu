// Elias-Fano coding of ascending indices, on GPUs. Compiled by nvcc, and run on CPUs by
// tests/cuda_on_cpu.
#include "kernels/cuda.h"
#include "kernels/wire_elias.h"

namespace tfcommx {
namespace {

__device__ int64_t thread() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

__host__ __device__ int64_t blocks(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

// Sets the bit of index i in the bitmap, of zeros so far; all lanes must call it. Neighbours share a
// word, which the last of them writes: indices out of range or order set some bit of it, and no other
// place.
__device__ void set_bit(const EliasLayout& layout, const int32_t* indices, int64_t i,
                        int32_t* words) {
  const int64_t bit = i < layout.k ? layout.bit(i, indices[i]) : -1;
  const bool inside = bit >= 0 && bit / 32 < layout.bitmap();
  const uint32_t word = inside ? static_cast<uint32_t>(bit / 32) : 0xffffffffu;
  uint32_t bits = 1u << (bit & 31);
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, bits, distance),
                   other_word = __shfl_up_sync(kAllLanes, word, distance);
    if (lane() >= distance && other_word == word) bits |= other;
  }
  const uint32_t next = __shfl_sync(kAllLanes, word, (lane() + 1) % 32);
  if (inside && (lane() == 31 || next != word))
    atomicOr(reinterpret_cast<unsigned*>(words) + word, bits);
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

// One index and one word of low bits by each thread.
__global__ void __launch_bounds__(kThreads)
    encode(EliasLayout layout, const int32_t* indices, int32_t* words) {
  const int64_t i = thread();
  set_bit(layout, indices, i, words);
  if (i < layout.lows())
    words[layout.bitmap() + i] = static_cast<int32_t>(low_word(layout, indices, i));
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

__global__ void __launch_bounds__(kThreads)
    decode(EliasLayout layout, const int32_t* words, int64_t stride, int64_t each,
           const uint32_t* scratch, int32_t* indices) {
  __shared__ uint64_t start, total;
  __shared__ uint16_t places[kThreads * 32];  // of the ones in this chunk, so that indices are
                                              // written side by side
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
  uint32_t place = exclusive_sum_of_block(ones(bits));
  for (; bits; bits &= bits - 1)
    places[place++] = static_cast<uint16_t>(threadIdx.x * 32 + __ffs(static_cast<int>(bits)) - 1);
  __syncthreads();
  indices += buffer * k;
  if (total == static_cast<uint64_t>(k)) {
    // Index j of the chunk is number start + j of all: what of it is 64 bits wide is the same for all
    const int width = layout.low_bits;
    const int64_t first_bit = static_cast<int64_t>(start) * width,
                  first_high = mine * kThreads * 32 - static_cast<int64_t>(start),
                  shard = buffer / each * layout.size;
    const uint32_t* lows = bitmap + layout.bitmap() + first_bit / 32;
    const uint32_t skipped = static_cast<uint32_t>(first_bit % 32), count = counts[mine];
    indices += start;
    for (uint32_t j = threadIdx.x; j < count; j += kThreads) {
      int64_t index = (first_high + places[j] - j) << width;
      if (width) {
        const uint32_t at = skipped + j * static_cast<uint32_t>(width);
        const uint64_t two = lows[at / 32] | static_cast<uint64_t>(lows[at / 32 + 1]) << 32;
        index |= static_cast<int64_t>(two >> (at % 32)) & ((1 << width) - 1);
      }
      indices[j] = index < layout.size ? static_cast<int32_t>(shard + index) : -1;
    }
  } else if (mine == 0) {
    for (int64_t i = threadIdx.x; i < k; i += kThreads) indices[i] = -1;
  }
}

}  // namespace

const char* elias_encode_cuda(const EliasLayout& layout, const int32_t* indices, int32_t* words,
                              CUstream_st* stream) {
  if (layout.k) {
    cudaMemsetAsync(words, 0, 4 * layout.bitmap(), stream);
    const int64_t lows = layout.lows();
    launch(encode, blocks(layout.k > lows ? layout.k : lows), stream, layout, indices, words);
  }
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
