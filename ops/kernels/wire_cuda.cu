// The wire formats on GPUs. Compiled by nvcc, and run on CPUs by tests/cuda_on_cpu.
//
#include "kernels/cuda.h"
#include "kernels/wire.h"
#include "kernels/wire_float.h"

namespace tfcommx {
namespace {

__device__ int64_t thread() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

int64_t blocks(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

// How many of the ascending indices are below `limit`.
__device__ int64_t count_below(const int32_t* indices, int64_t k, int64_t limit) {
  int64_t first = 0;
  while (first < k) {
    const int64_t middle = first + (k - first) / 2;
    if (indices[middle] < limit) {
      first = middle + 1;
    } else {
      k = middle;
    }
  }
  return first;
}

// Two 16-bit parts as a word; the second of the last word may be missing.
template <class Part>
__device__ uint32_t word_of_two(int64_t word, int64_t k, const Part& part) {
  return part(2 * word) | (2 * word + 1 < k ? static_cast<uint32_t>(part(2 * word + 1)) << 16 : 0);
}

// Position in the vector of `index` of a shard; -1 if it is outside of its shard.
__device__ int32_t placed(const WireLayout& layout, int64_t shard, uint32_t index) {
  return index < layout.size ? static_cast<int32_t>(shard * layout.size + index) : -1;
}

__device__ uint16_t narrow(Values type, float value) {
  return type == Values::float16 ? to_float16(value) : to_bfloat16(value);
}

// One word of each part by each thread; elias and codes have kernels of their own.
__global__ void __launch_bounds__(kThreads)
    encode(WireLayout layout, const int32_t* indices, const float* values, int32_t* words) {
  const int64_t i = thread(), k = layout.k;
  int32_t *positions = words + layout.counts(), *last = positions + layout.positions();
  if (layout.places == Positions::block) {
    if (i < layout.counts())
      words[i] = static_cast<int32_t>(count_below(indices, k, (i + 1) * 65536) -
                                      count_below(indices, k, i * 65536));
    if (i < layout.positions())
      positions[i] =
          word_of_two(i, k, [&](int64_t j) { return static_cast<uint16_t>(indices[j]); });
  }
  if (layout.places == Positions::pair && i < k) positions[i] = indices[i];
  if (i < layout.values() && !layout.coded())
    last[i] = layout.type == Values::float32
                  ? bits_of(values[i])
                  : word_of_two(i, k, [&](int64_t j) { return narrow(layout.type, values[j]); });
}

// Where the parts of a buffer lie, found once on the host: no thread has to divide or to search.
struct Parts {
  int64_t stride, positions, values;  // words
  int64_t blocks;                     // of threads, for each buffer
};

template <Values type>
__device__ float value_at(int64_t k, const int32_t* words, int64_t i) {
  const uint16_t* narrowed = reinterpret_cast<const uint16_t*>(words);
  switch (type) {
    case Values::int8:
      return coded_value(CodeLayout{k, 8}, words, i);
    case Values::int4:
      return coded_value(CodeLayout{k, 4}, words, i);
    case Values::float16:
      return from_float16(narrowed[i]);
    case Values::bfloat16:
      return from_bfloat16(narrowed[i]);
    default:
      return float_of(words[i]);
  }
}

// One entry of a buffer by each thread; `each` of the buffers for a shard.
template <Values type>
__global__ void __launch_bounds__(kThreads)
    decode_entries(WireLayout layout, Parts parts, const int32_t* words, int64_t each,
                   int32_t* indices, float* values) {
  const uint32_t of_buffer = static_cast<uint32_t>(parts.blocks), buffer = blockIdx.x / of_buffer;
  const int64_t i = static_cast<int64_t>(blockIdx.x % of_buffer) * kThreads + threadIdx.x,
                at = buffer * layout.k + i;
  if (i >= layout.k) return;
  words += buffer * parts.stride;
  if (layout.places == Positions::pair)
    indices[at] = placed(layout, buffer / static_cast<uint32_t>(each),
                         static_cast<uint32_t>(words[parts.positions + i]));
  values[at] = value_at<type>(layout.k, words + parts.values, i);
}

// A stretch of 65,536 positions of one buffer by each block of threads.
__global__ void __launch_bounds__(kThreads)
    decode_offsets(WireLayout layout, const int32_t* words, int64_t each, int32_t* indices) {
  __shared__ uint64_t start, total;
  const int64_t counts = layout.counts(), buffer = blockIdx.x / counts, mine = blockIdx.x % counts;
  // What is negative becomes huge.
  const uint32_t* count = reinterpret_cast<const uint32_t*>(words + buffer * layout.words());
  const uint16_t* offsets = reinterpret_cast<const uint16_t*>(count + counts);
  uint64_t before = 0, all = 0;
  for (int64_t i = threadIdx.x; i < counts; i += kThreads) {
    all += count[i];
    if (i < mine) before += count[i];
  }
  const uint64_t all_before = exclusive_sum_of_block(all),
                 before_before = exclusive_sum_of_block(before);
  if (threadIdx.x == kThreads - 1) {
    total = all_before + all;
    start = before_before + before;
  }
  __syncthreads();
  indices += buffer * layout.k;
  if (total == static_cast<uint64_t>(layout.k)) {
    for (uint64_t i = start + threadIdx.x; i < start + count[mine]; i += kThreads)
      indices[i] = placed(layout, buffer / each, static_cast<uint32_t>(mine * 65536 + offsets[i]));
  } else if (mine == 0) {
    for (int64_t i = threadIdx.x; i < layout.k; i += kThreads) indices[i] = -1;
  }
}

}  // namespace

const char* wire_encode_cuda(const WireLayout& layout, const int32_t* indices, const float* values,
                             int32_t* words, CUstream_st* stream) {
  if (layout.words() == 0) return nullptr;
  const bool elias = layout.places == Positions::elias;
  if (elias)
    if (const char* error = elias_encode_cuda(layout.elias(), indices, words, stream)) return error;
  int32_t* last = words + layout.counts() + layout.positions();
  if (layout.coded())
    if (const char* error = codes_write_cuda(layout.codes(), values, last, stream)) return error;
  const int64_t most = !elias && layout.counts() > layout.k ? layout.counts() : layout.k;
  if (!elias || !layout.coded())
    launch(encode, blocks(most), stream, layout, indices, values, words);
  return launch_error();
}

const char* wire_decode_cuda(const WireLayout& layout, const int32_t* words, int64_t buffers,
                             int64_t shards, int32_t* indices, float* values, CUstream_st* stream) {
  const int64_t entries = buffers * layout.k, each = buffers / shards;
  if (entries == 0) return nullptr;
  // Values are read last: until then their place is scratch
  if (layout.places == Positions::elias)
    if (const char* error = elias_decode_cuda(layout.elias(), words, layout.words(), buffers, each,
                                              indices, reinterpret_cast<uint32_t*>(values), stream))
      return error;
  const Parts parts{layout.words(), layout.counts(), layout.counts() + layout.positions(),
                    blocks(layout.k)};
  const auto decode = layout.type == Values::int8       ? decode_entries<Values::int8>
                      : layout.type == Values::int4     ? decode_entries<Values::int4>
                      : layout.type == Values::float16  ? decode_entries<Values::float16>
                      : layout.type == Values::bfloat16 ? decode_entries<Values::bfloat16>
                                                        : decode_entries<Values::float32>;
  launch(decode, buffers * parts.blocks, stream, layout, parts, words, each, indices, values);
  if (layout.places == Positions::block && layout.counts())
    launch(decode_offsets, buffers * layout.counts(), stream, layout, words, each, indices);
  return launch_error();
}

}  // namespace tfcommx
