// Ascending indices in about 2 + log2(size / k) bits each: Elias-Fano coding.
//
//   index i = high << low_bits | low                        low_bits = floor(log2(size / k))
//   bitmap   bit high + i is set, for each i: the highs in unary, k ones among k + high of size - 1
//   lows     low_bits of each index, one after another
//
// So the size depends on k and the vector's length alone. Bits are counted from the lowest of the
// first int32 word; both parts end in zero bits.
//
// Source: Elias, Efficient storage and retrieval by content and address of static files, 1974;
// Fano, On the number of bits required to implement an associative memory, 1971; Vigna,
// Quasi-succinct indices, 2013, section 3. We keep no table to skip by: all is read.
#pragma once

#include <cstdint>

#include "kernels/device.h"
#include "kernels/parallel.h"

struct CUstream_st;  // what CUDA's cudaStream_t points to

namespace tfcommx {

struct EliasLayout {
  int64_t k;     // indices, 0 <= k <= size
  int64_t size;  // of the vector, < 2^31
  int low_bits;  // 0 to 30

  TFCOMMX_DEVICE EliasLayout(int64_t k, int64_t size) : k(k), size(size), low_bits(0) {
    while (k && size >> (low_bits + 1) >= k) ++low_bits;
  }

  // Words of each part.
  TFCOMMX_DEVICE int64_t bitmap() const { return k ? (k + ((size - 1) >> low_bits) + 31) / 32 : 0; }
  TFCOMMX_DEVICE int64_t lows() const { return (k * low_bits + 31) / 32; }

  // The bit that index i sets in the bitmap.
  TFCOMMX_DEVICE int64_t bit(int64_t i, int32_t index) const { return (index >> low_bits) + i; }
};

// Writes indices[k] to words[layout.bitmap() + layout.lows()]. Returns the position of the first
// index that is outside [0, size) or not above the one before it, and then `words` is unspecified;
// -1: none is. Cost: one pass.
int64_t elias_encode_cpu(const EliasLayout& layout, const int32_t* indices, int32_t* words);

// Reads them, and adds `first` to each. One more word must follow: it is read, and not used.
// Returns whether they are k ascending indices in [0, size); if not, indices[k] is unspecified. Cost:
// one pass.
bool elias_decode_cpu(const EliasLayout& layout, const int32_t* words, int64_t first,
                      int32_t* indices);

// The same on a GPU, queued on the stream. `each` of the buffers, which
// lie `stride` words apart, are of one shard. Indices that are not in [0, size), and all of a
// buffer that does not hold k, become -1. scratch[buffers * k] is overwritten. Null, or CUDA's
// message.
const char* elias_encode_cuda(const EliasLayout& layout, const int32_t* indices, int32_t* words,
                              CUstream_st* stream);
const char* elias_decode_cuda(const EliasLayout& layout, const int32_t* words, int64_t stride,
                              int64_t buffers, int64_t each, int32_t* indices, uint32_t* scratch,
                              CUstream_st* stream);

}  // namespace tfcommx
