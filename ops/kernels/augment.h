// Reads samples out of a slab of decoded uint8 images and augments them: crop, bilinear resize,
// flip, normalise, in one pass.
//
// No framework: pointers, sizes, and a callback that supplies threads. The plain-TensorFlow
// specification of everything here is tfcommx/reference_augment.py; the layout of the slab is
// written by tfcommx/data/slab.py.
#ifndef TFCOMMX_KERNELS_AUGMENT_H_
#define TFCOMMX_KERNELS_AUGMENT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/parallel.h"

namespace tfcommx {

// ---- the slab ------------------------------------------------------------------------
// One file: a page of header, an index of int64 byte offsets (0 = absent), records at multiples of
// 64 bytes.

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

struct Record {  // 64 bytes, then the pixels, row-major, interleaved channels
  int64_t sample;
  int64_t label;
  int64_t bytes;  // height * width * channels
  int32_t height, width, channels;
  uint32_t crc;  // CRC-32 (zlib's) of the 36 bytes before this field, then the pixels
  uint8_t pad[24];
};
static_assert(sizeof(Record) == 64, "a record's header is one cache line");

// The record at `at`, or null where it does not lie inside [low, length) or is not that of
// `sample`.
const Record* record_at(const uint8_t* base, int64_t low, int64_t length, int64_t at,
                        int64_t sample);

// The record of `sample` in a mapped slab, or null where it is absent. The caller has checked the
// header and the range.
const Record* find(const uint8_t* slab, int64_t sample);

// asks for the record that `find` is going to look at
void foresee(const uint8_t* slab, int64_t sample);

bool intact(const Record& record);  // does its CRC hold? one pass over the pixels

uint32_t crc32(uint32_t crc, const uint8_t* bytes, size_t length);

// ---- what is done to an image --------------------------------------------------------

enum class Crop { kRandom, kCenter, kWhole };
enum class Pixel { kUint8, kHalf, kBfloat16, kFloat };
// the most that may be used of the processor; all give the same bits
enum class Code { kFastest, kAvx2, kPortable };

struct Rule {
  Crop crop = Crop::kWhole;
  bool flip = false;                        // left-right, for every second sample
  double area_low = 0.08, area_high = 1.0;  // of the image, in (0, 1]
  double aspect_low = 0.75, aspect_high = 4.0 / 3;
  double center = 0.875;  // side of the centre crop / short side of the image
  uint64_t seed = 0;
};

struct Window {  // pixels; flip is 0 or 1
  int32_t top, left, height, width, flip;
};

// The window of one sample: a pure function of (rule.seed, epoch, sample, height, width).
Window window_of(const Rule& rule, uint64_t epoch, uint64_t sample, int32_t height, int32_t width);

// A number in [0, 1): draw `draw` of the stream of (seed, epoch, sample).
double uniform(uint64_t seed, uint64_t epoch, uint64_t sample, uint64_t draw);

struct Target {
  int32_t height, width, channels;  // of every image of the batch
  Pixel pixel = Pixel::kFloat;
  // per channel: out = value in 0..255 * scale + bias; not used for kUint8
  std::vector<float> scale, bias;
  // write to memory without reading it into the caches first, where that can be done
  bool past_caches = false;
};

size_t pixel_bytes(Pixel pixel);

struct Image {
  const uint8_t* pixels;  // row-major, interleaved channels
  int32_t height, width, channels;
};

Image image_of(const Record& record);

// Write one image: a window, resized to the target by bilinear interpolation at pixel centres, no
// antialias.
void augment(const Image& image, const Window& window, const Target& target, void* out,
             Code code = Code::kFastest);

// The whole batch: images[i] through windows[i] to out + i * (bytes of one image).
void augment_batch(const std::vector<Image>& images, const std::vector<Window>& windows,
                   const Target& target, void* out, const ParallelFor& parallel_for,
                   Code code = Code::kFastest);

}  // namespace tfcommx

#endif  // TFCOMMX_KERNELS_AUGMENT_H_
