// Selected entries on the wire: k (index, value) pairs as one buffer of int32 words, and back.
//
//   pair    [k] int32 indices                                                   then values
//   block   [blocks] int32 counts, [k] uint16 offsets into blocks of 65,536     then values
//
// Values are float32, float16 or bfloat16 [k], rounded to nearest even; NaN stays NaN. 16-bit parts
// of odd length end in two zero bytes. Words are in the machine's byte order: all ranks must have
// the same one.
#pragma once

#include <cstdint>

#include "kernels/device.h"
#include "kernels/parallel.h"
#include "kernels/select.h"

namespace tfcommx {

struct WireLayout {
  int64_t k;     // entries in a buffer
  int64_t size;  // of the vector that the indices point into, 0 <= size < 2^31
  Float type;    // of the values
  bool blocks;   // block, else pair

  // Words of each part.
  TFCOMMX_DEVICE int64_t counts() const { return blocks ? (size + 65535) / 65536 : 0; }
  TFCOMMX_DEVICE int64_t positions() const { return blocks ? (k + 1) / 2 : k; }
  TFCOMMX_DEVICE int64_t values() const { return type == Float::float32 ? k : (k + 1) / 2; }
  TFCOMMX_DEVICE int64_t words() const { return counts() + positions() + values(); }
};

// Writes indices[k], ascending if the layout has blocks, and values[k] to words[layout.words()].
// Returns the position of the first index that is outside [0, size) or out of order, and then
// `words` is unspecified; -1: none is. Cost: one pass.
int64_t wire_encode_cpu(const WireLayout& layout, const int32_t* indices, const float* values,
                        int32_t* words);

// Reads `buffers` buffers, one after another, to indices[buffers * k] and values[buffers * k]: as
// many for each of `shards` equal parts of a vector of shards * size < 2^31 entries, into which the
// indices point then. Returns the first buffer that does not hold k indices in [0, size), and then
// the outputs are unspecified; -1: none. Cost: one pass, the buffers side by side.
int64_t wire_decode_cpu(const WireLayout& layout, const int32_t* words, int64_t buffers,
                        int64_t shards, int32_t* indices, float* values,
                        const ParallelFor& parallel_for);

// The same on a GPU, queued on the stream. (No GPU has run it yet.) Nothing waits, so nothing can
// be refused: if the indices to encode are out of range or order, `words` is unspecified;
// indices that are not in [0, size), and all of a buffer whose counts do not add up to k, become
// -1, which merge_cuda answers with NaN. Return null, or CUDA's message if a kernel could not be
// launched.
const char* wire_encode_cuda(const WireLayout& layout, const int32_t* indices, const float* values,
                             int32_t* words, CUstream_st* stream);
const char* wire_decode_cuda(const WireLayout& layout, const int32_t* words, int64_t buffers,
                             int64_t shards, int32_t* indices, float* values, CUstream_st* stream);

}  // namespace tfcommx
