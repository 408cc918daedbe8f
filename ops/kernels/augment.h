// Reads samples out of a slab of decoded uint8 images and augments them: crop, bilinear resize,
// flip, normalise, in one pass.
//
// No framework: pointers, sizes, and a callback that supplies threads. Everything here is defined
// in Python and TensorFlow by tfcommx/kernels/augment.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/parallel.h"
#include "kernels/slab.h"

namespace tfcommx {

enum class Crop { kRandom, kCenter, kWhole };
enum class Pixel { kUint8, kHalf, kBfloat16, kFloat };
// The most that may be used of the processor; all give the same bits.
enum class Code { kFastest, kAvx2, kPortable };

struct WindowRule {
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
Window window_of(const WindowRule& rule, uint64_t epoch, uint64_t sample, int32_t height,
                 int32_t width);

// A number in [0, 1): draw `draw` of the stream of (seed, epoch, sample).
double uniform(uint64_t seed, uint64_t epoch, uint64_t sample, uint64_t draw);

struct Target {
  int32_t height, width, channels;  // of every image of the batch
  Pixel pixel = Pixel::kFloat;
  // per channel: out = value in 0..255 * scale + bias; not used for kUint8
  std::vector<float> scale, bias;
  // Write to memory without reading it into the caches first, if that can be done.
  bool past_caches = false;
};

size_t pixel_bytes(Pixel pixel);

struct Image {
  const uint8_t* pixels;  // row-major, interleaved channels
  int32_t height, width, channels;
};

Image image_of(const Sample& sample);

// Write one image: a window, resized to the target by bilinear interpolation at pixel centres, no
// antialias.
void augment(const Image& image, const Window& window, const Target& target, void* out,
             Code code = Code::kFastest);

// The whole batch: images[i] through windows[i] to out + i * (bytes of one image).
void augment_batch(const std::vector<Image>& images, const std::vector<Window>& windows,
                   const Target& target, void* out, const ParallelFor& parallel_for,
                   Code code = Code::kFastest);

}  // namespace tfcommx
