// The slab: decoded uint8 images in one file, which all processes of a machine map.
//
// A page of header, an index of int64 byte offsets (0: the sample is absent), records at multiples
// of 64 bytes. tfcommx/data/slab.py makes the file; fill.h puts records into it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tfcommx {

constexpr char kSlabMagic[8] = {'T', 'F', 'C', 'X', 'S', 'L', 'B', '1'};

struct SlabHeader {
  char magic[8];
  int64_t count;     // samples of the data set: entries of the index
  int64_t index_at;  // byte offset of the index
  int64_t data_at;   // byte offset of the first record
  int64_t length;    // bytes of the file
  int64_t next;      // byte offset of the first free byte
  int64_t id;        // drawn when the slab was made
};

// Pixels of a side: positions in a row then fit 32 bits, and float32 holds them exactly.
constexpr int32_t kMostSide = 1 << 24;

struct Record {  // 64 bytes, then the pixels, row-major, interleaved channels
  int64_t sample;
  int64_t label;
  int64_t bytes;  // height * width * channels
  int32_t height, width, channels;
  uint32_t crc;  // CRC-32 (zlib's) of the 36 bytes before this field, then the pixels
  uint8_t pad[24];
};
static_assert(sizeof(Record) == 64, "a record's header is one cache line");

// A mapped slab. The header is a private copy that was checked once, because other processes can
// write to the mapping at any time: nothing in it is read twice or used unchecked.
struct Slab {
  uint8_t* base = nullptr;
  SlabHeader header = {};
};

// A sample in memory: a checked copy of its record, and the pixels that it describes.
struct Sample {
  Record record;
  const uint8_t* pixels;
};

// Whether a header describes a file of `length` bytes: index and data lie inside it.
bool fits(const SlabHeader& header, int64_t length);

// Reads the record at `at`; false if it does not lie inside [low, length) or is not that of
// `sample`.
bool record_at(const uint8_t* base, int64_t low, int64_t length, int64_t at, int64_t sample,
               Sample* out);

// Reads the record of `sample`, in [0, header.count); false if it is absent.
bool find(const Slab& slab, int64_t sample, Sample* out);

// Prefetches the record that `find` is going to look at.
void foresee(const Slab& slab, int64_t sample);

// Whether the record's CRC holds. Cost: one pass over the pixels.
bool intact(const Sample& sample);

// Zlib's CRC-32 of bytes, continued from that of what came before (0: nothing).
uint32_t crc32(uint32_t crc, const uint8_t* bytes, size_t length);

}  // namespace tfcommx
