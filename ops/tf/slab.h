// What the ops on a slab share: the mapping of its file, and the check of an index.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "kernels/slab.h"
#include "tensorflow/core/platform/errors.h"

namespace tfcommx {

// A slab mapped as long as the kernel lives: the mapping survives the removal of the file.
class Mapping {
 public:
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, length_);
    if (file_ >= 0) close(file_);
  }

  absl::Status open(const std::string& path, int64_t id, bool writable = false) {
    // not blocking: the number of a descriptor, once closed, may have become a pipe's
    const int file = ::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
      return tensorflow::errors::FailedPrecondition("The slab ", path,
                                                    " cannot be opened: ", std::strerror(errno),
                                                    ". Make the DataCache first.");
    struct stat facts;
    const bool known = fstat(file, &facts) == 0;
    length_ = known ? facts.st_size : 0;
    const auto another = [&] {
      return tensorflow::errors::FailedPrecondition(
          "The slab ", path, " with id ", id, " is required, another file is there. ",
          "Make the dataset again from the DataCache that is open now.");
    };
    if (!known || length_ < static_cast<int64_t>(sizeof(SlabHeader))) {
      close(file);
      return another();
    }
    void* base =
        mmap(nullptr, length_, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file, 0);
    if (writable) {
      file_ = file;
    } else {
      close(file);
    }
    if (base == MAP_FAILED)
      return tensorflow::errors::FailedPrecondition(
          "The slab ", path, " cannot be mapped: ", std::strerror(errno), ".");
    base_ = base;
    const SlabHeader& header = *static_cast<const SlabHeader*>(base_);
    if (std::memcmp(header.magic, kSlabMagic, sizeof(kSlabMagic)) || header.id != id)
      return another();
    if (header.length != length_ || header.count < 0 || header.index_at % 8 ||
        header.index_at + 8 * header.count > header.data_at || header.data_at > length_) {
      return tensorflow::errors::DataLoss("The header of the slab ", path,
                                          " is damaged. Remove the file and start again.");
    }
    return absl::OkStatus();
  }

  uint8_t* base() const { return static_cast<uint8_t*>(base_); }
  int file() const { return file_; }  // -1: not writable
  int64_t count() const {
    return base_ == nullptr ? 0 : static_cast<const SlabHeader*>(base_)->count;
  }

 private:
  int file_ = -1;
  void* base_ = nullptr;
  int64_t length_ = 0;
};

inline absl::Status check_index(int64_t sample, int64_t count) {
  if (sample >= 0 && sample < count) return absl::OkStatus();
  return tensorflow::errors::InvalidArgument("Sample indices must be in [0, ", count,
                                             "). Received ", sample, ".");
}

}  // namespace tfcommx
