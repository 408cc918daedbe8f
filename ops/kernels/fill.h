// Puts decoded samples into a slab (slab.h), as tfcommx/data/slab.py does.
#pragma once

#include <cstdint>
#include <mutex>

#include "kernels/augment.h"

namespace tfcommx {

// What an image file says of itself.
struct FileHead {
  bool jpeg;  // else a PNG
  int32_t height, width;
  int32_t bits;  // of a channel
};

// Reads the head of a JPEG or PNG; false if it is neither, or says no size.
bool read_head(const uint8_t* bytes, size_t length, FileHead* head);

// The size at which an image is kept: its short side `store` pixels, the aspect kept, never
// enlarged; store 0: as it is.
void stored_size(int32_t height, int32_t width, int32_t store, int32_t* kept_height,
                 int32_t* kept_width);

// A slab that is mapped and open for writing.
struct SlabFile {
  int file;
  const Slab& slab;
  // of this file: its locks keep out other processes, and no thread of this one
  std::mutex *one_takes, *one_writes;
};

// What `put` has done.
enum class Put { kWritten, kThere, kNot };

// Shrinks an image to its stored size, writes its record and publishes it, unless another process
// has done so meanwhile.
Put put(const SlabFile& file, int64_t sample, int64_t label, Image image, int32_t store);

}  // namespace tfcommx
