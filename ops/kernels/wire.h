// Selected entries on the wire: k (index, value) pairs as one buffer of int32 words, and back.
//
//   pair    [k] int32 indices                                                   then values
//   block   [blocks] int32 counts, [k] uint16 offsets into blocks of 65,536     then values
//   elias   a bitmap and [k] low bits, as wire_elias.h has them                 then values
//
// Values are float32, float16 or bfloat16 [k], rounded to nearest even; NaN stays NaN. Or they are
// codes of 8 or 4 bits, as wire_codes.h has them; what is not finite becomes NaN. 16-bit parts of
// odd length end in two zero bytes. Words are in the machine's byte order: all ranks must have the
// same one.
#pragma once

#include <cstdint>

#include "kernels/device.h"
#include "kernels/parallel.h"
#include "kernels/wire_codes.h"
#include "kernels/wire_elias.h"

namespace tfcommx {

enum class Positions { pair, block, elias };
enum class Values { float32, float16, bfloat16, int8, int4 };

struct WireLayout {
  int64_t k;     // entries in a buffer
  int64_t size;  // of the vector that the indices point into, 0 <= size < 2^31
  Values type;   // how values are written
  Positions places;

  TFCOMMX_DEVICE bool coded() const { return type == Values::int8 || type == Values::int4; }
  TFCOMMX_DEVICE CodeLayout codes() const { return {k, type == Values::int8 ? 8 : 4}; }
  TFCOMMX_DEVICE EliasLayout elias() const { return {k, size}; }

  // Words of each part: the counts or the bitmap; indices, offsets or low bits; values.
  TFCOMMX_DEVICE int64_t counts() const {
    if (places == Positions::elias) return elias().bitmap();
    return places == Positions::block ? (size + 65535) / 65536 : 0;
  }
  TFCOMMX_DEVICE int64_t positions() const {
    if (places == Positions::elias) return elias().lows();
    return places == Positions::block ? (k + 1) / 2 : k;
  }
  TFCOMMX_DEVICE int64_t values() const {
    if (coded()) return codes().steps() + codes().codes();
    return type == Values::float32 ? k : (k + 1) / 2;
  }
  TFCOMMX_DEVICE int64_t words() const { return counts() + positions() + values(); }
};

// Writes indices[k], ascending unless `places` is pair, and values[k] to words[layout.words()].
// Returns the position of the first index that is outside [0, size) or out of order, and then
// `words` is unspecified; -1: none is. Cost: one pass.
int64_t wire_encode_cpu(const WireLayout& layout, const int32_t* indices, const float* values,
                        int32_t* words);

// Reads `buffers` buffers, one after another, to indices[buffers * k] and values[buffers * k]: as
// many for each of `shards` equal parts of a vector of shards * size < 2^31 entries, into which the
// indices point then. Returns the first buffer that does not hold k indices in [0, size), ascending
// unless `places` is pair, and then the outputs are unspecified; -1: none. Cost: one pass, the
// buffers side by side.
int64_t wire_decode_cpu(const WireLayout& layout, const int32_t* words, int64_t buffers,
                        int64_t shards, int32_t* indices, float* values,
                        const ParallelFor& parallel_for);

// The same on a GPU, queued on the stream. Nothing waits, so nothing can
// be refused: if the indices to encode are out of range or order, `words` is unspecified;
// indices that are not in [0, size), and all of a buffer whose counts do not add up to k, become
// -1, which merge_cuda answers with NaN, as it does indices that do not ascend. Return null, or
// CUDA's message if a kernel could not be launched.
const char* wire_encode_cuda(const WireLayout& layout, const int32_t* indices, const float* values,
                             int32_t* words, CUstream_st* stream);
const char* wire_decode_cuda(const WireLayout& layout, const int32_t* words, int64_t buffers,
                             int64_t shards, int32_t* indices, float* values, CUstream_st* stream);

}  // namespace tfcommx
