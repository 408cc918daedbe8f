// See fill.h.
#include "kernels/fill.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#ifndef MADV_POPULATE_WRITE  // headers before Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace tfcommx {
namespace {

// The first of the 8 bytes that are locked: of the header, which nobody writes.
enum class Lock : int64_t { kSpace = 0, kPwrite = 8 };

bool lock(int file, Lock which, short kind, bool wait = false) {
  struct flock request = {};
  request.l_type = kind;
  request.l_whence = SEEK_SET;
  request.l_start = static_cast<int64_t>(which);
  request.l_len = 8;
  // Locks of the open file, because those of a process end when it closes any descriptor of it
  return fcntl(file, wait ? F_OFD_SETLKW : F_OFD_SETLK, &request) == 0;
}

// Finds where the `size` bytes of a sample may be written: kWritten if they may.
Put take(const SlabFile& file, int64_t sample, int64_t size, int64_t* at) {
  const std::lock_guard<std::mutex> threads(*file.one_takes);
  if (!lock(file.file, Lock::kSpace, F_WRLCK, true)) return Put::kNot;
  const SlabHeader& header = file.slab.header;
  int64_t* next = &reinterpret_cast<SlabHeader*>(file.slab.base)->next;
  Put found = Put::kNot;
  Sample there;
  // Looked for under the lock, because another process may have put it there meanwhile
  if (find(file.slab, sample, &there)) {
    found = Put::kThere;
  } else {
    *at = __atomic_load_n(next, __ATOMIC_RELAXED);
    // Another value would lead outside the records.
    const bool sound = *at >= header.data_at && *at <= header.length && *at % 64 == 0;
    if (sound && header.length - *at >= size) {
      found = Put::kWritten;
      __atomic_store_n(next, *at + size, __ATOMIC_RELAXED);
    }
  }
  lock(file.file, Lock::kSpace, F_UNLCK);
  return found;
}

// Writes a record; false if the file system is full. pwrite is cheapest, but the kernel lets one
// pwrite at a time into a file: a thread that finds another one writing makes the pages in the
// mapping and copies, so that all cores fill side by side. The pages are asked for, and not just
// touched, because that is an error on a full file system and not a fatal signal.
bool write(const SlabFile& file, int64_t at, const Record& record, const uint8_t* pixels) {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t size = static_cast<int64_t>(sizeof(Record)) + record.bytes,
                first = at / page * page;
  const std::unique_lock<std::mutex> threads(*file.one_writes, std::try_to_lock);
  const bool alone = threads.owns_lock() && lock(file.file, Lock::kPwrite, F_WRLCK);
  if (!alone && madvise(file.slab.base + first, at + size - first, MADV_POPULATE_WRITE) == 0) {
    std::memcpy(file.slab.base + at, &record, sizeof(Record));
    std::memcpy(file.slab.base + at + sizeof(Record), pixels, record.bytes);
    return true;
  }
  const iovec parts[] = {{const_cast<Record*>(&record), sizeof(Record)},
                         {const_cast<uint8_t*>(pixels), static_cast<size_t>(record.bytes)}};
  const bool done = pwritev(file.file, parts, 2, at) == size;
  if (alone) lock(file.file, Lock::kPwrite, F_UNLCK);
  return done;
}

// Averages 2 x 2 pixels, rounded; an odd last row or column is left out. `to` may be the
// image's own memory.
void halve(Image* image, uint8_t* to) {
  const int64_t c = image->channels, height = image->height / 2, width = image->width / 2,
                stride = image->width * c;
  uint8_t* out = to;
  for (int64_t y = 0; y < height; ++y) {
    const uint8_t* a = image->pixels + 2 * y * stride;
    for (int64_t x = 0; x < width; ++x, a += 2 * c) {
      for (int64_t k = 0; k < c; ++k)
        *out++ =
            static_cast<uint8_t>((a[k] + a[c + k] + a[stride + k] + a[stride + c + k] + 2) >> 2);
    }
  }
  *image = {to, static_cast<int32_t>(height), static_cast<int32_t>(width), image->channels};
}

}  // namespace

bool read_head(const uint8_t* bytes, size_t length, FileHead* head) {
  static constexpr uint8_t kPng[] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'};
  if (length >= 25 && std::equal(kPng, kPng + 8, bytes)) {
    const auto side = [&](size_t at) {
      return static_cast<int32_t>(uint32_t{bytes[at]} << 24 | bytes[at + 1] << 16 |
                                  bytes[at + 2] << 8 | bytes[at + 3]);
    };
    *head = {false, side(20), side(16), bytes[24]};
    return head->height > 0 && head->width > 0;
  }
  if (length < 4 || bytes[0] != 0xFF || bytes[1] != 0xD8 || bytes[2] != 0xFF) return false;
  for (size_t at = 2; at + 9 <= length && bytes[at] == 0xFF;) {
    const uint8_t marker = bytes[at + 1];
    if (marker == 0xFF) {  // filling
      ++at;
      // A frame starts.
    } else if (marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 &&
               marker != 0xCC) {
      *head = {true, bytes[at + 5] << 8 | bytes[at + 6], bytes[at + 7] << 8 | bytes[at + 8],
               bytes[at + 4]};
      return head->height > 0 && head->width > 0;
    } else if (marker == 0x01 || (marker >= 0xD0 && marker <= 0xD7)) {  // they have no length
      at += 2;
    } else if (marker == 0 || (marker >= 0xD8 && marker <= 0xDA)) {  // no frame before the scan
      return false;
    } else {
      at += 2 + (bytes[at + 2] << 8 | bytes[at + 3]);
    }
  }
  return false;
}

void stored_size(int32_t height, int32_t width, int32_t store, int32_t* kept_height,
                 int32_t* kept_width) {
  const int32_t small = std::min(height, width);
  const bool shrinks = store > 0 && small > store;
  const auto kept = [&](int32_t side) {
    return shrinks ? std::max<int32_t>(1, std::lrint(static_cast<double>(side) * store / small))
                   : side;
  };
  *kept_height = kept(height);
  *kept_width = kept(width);
}

Put put(const SlabFile& file, int64_t sample, int64_t label, Image image, int32_t store) {
  Target target;
  target.pixel = Pixel::kUint8;
  target.channels = image.channels;
  stored_size(image.height, image.width, store, &target.height, &target.width);
  if (target.height > kMostSide || target.width > kMostSide) return Put::kNot;
  const int64_t bytes = static_cast<int64_t>(target.height) * target.width * target.channels;
  thread_local std::vector<uint8_t> halves, small;
  // Interpolation by more than 2 would skip pixels.
  while (store > 0 && std::min(image.height, image.width) / 2 >= store) {
    if (image.pixels != halves.data())
      halves.resize(static_cast<size_t>(image.height / 2) * (image.width / 2) * image.channels);
    halve(&image, halves.data());
  }
  const uint8_t* pixels = image.pixels;
  if (target.height != image.height || target.width != image.width) {
    small.resize(bytes);
    augment(image, {0, 0, image.height, image.width, 0}, target, small.data());
    pixels = small.data();
  }
  Record record = {sample, label, bytes, target.height, target.width, target.channels, 0, {}};
  record.crc = crc32(crc32(0, reinterpret_cast<const uint8_t*>(&record), offsetof(Record, crc)),
                     pixels, bytes);
  int64_t at = 0;
  const Put found = take(file, sample, sizeof(Record) + (bytes + 63) / 64 * 64, &at);
  if (found != Put::kWritten) return found;
  if (!write(file, at, record, pixels)) return Put::kNot;
  int64_t* index = reinterpret_cast<int64_t*>(file.slab.base + file.slab.header.index_at);
  // Last, because a reader that sees the offset reads the record. A process that is killed before
  // leaves a gap, and no half record
  __atomic_store_n(index + sample, at, __ATOMIC_RELEASE);
  return Put::kWritten;
}

}  // namespace tfcommx
