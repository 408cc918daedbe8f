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
    if (slab_.base != nullptr) munmap(slab_.base, slab_.header.length);
    if (file_ >= 0) close(file_);
  }

  absl::Status open(const std::string& path, int64_t id, bool writable = false) {
    // not blocking: the number of a descriptor, once closed, may have become a pipe's
    const int file = ::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
      return tensorflow::errors::FailedPrecondition("The slab ", path,
                                                    " cannot be opened: ", std::strerror(errno),
                                                    ". Make the DataCache first.");
    file_ = file;
    const auto another = [&] {
      return tensorflow::errors::FailedPrecondition(
          "The slab ", path, " with id ", id, " is required, another file is there. ",
          "Make the dataset again from the DataCache that is open now.");
    };
    // Only a file of this user that no other may open: see tfcommx/core/files.py. A
    // removed slab has no link.
    struct stat facts;
    if (fstat(file, &facts) != 0 || !S_ISREG(facts.st_mode) || facts.st_uid != geteuid() ||
        (facts.st_mode & 077) != 0 || facts.st_nlink > 1)
      return another();
    SlabHeader& header = slab_.header;
    if (pread(file, &header, sizeof(header), 0) != sizeof(header) ||
        std::memcmp(header.magic, kSlabMagic, sizeof(kSlabMagic)) || header.id != id)
      return another();
    if (!fits(header, facts.st_size)) {
      return tensorflow::errors::DataLoss("The header of the slab ", path,
                                          " is damaged. Remove the file and start again.");
    }
    void* base = mmap(nullptr, header.length, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                      MAP_SHARED, file, 0);
    if (base == MAP_FAILED)
      return tensorflow::errors::FailedPrecondition(
          "The slab ", path, " cannot be mapped: ", std::strerror(errno), ".");
    slab_.base = static_cast<uint8_t*>(base);
    if (!writable) {
      close(file);
      file_ = -1;
    }
    return absl::OkStatus();
  }

  const Slab& slab() const { return slab_; }
  int file() const { return file_; }                    // -1: not writable
  int64_t count() const { return slab_.header.count; }  // 0: nothing is mapped

 private:
  int file_ = -1;
  Slab slab_;
};

inline absl::Status check_index(int64_t sample, int64_t count) {
  if (sample >= 0 && sample < count) return absl::OkStatus();
  return tensorflow::errors::InvalidArgument("Sample indices must be in [0, ", count,
                                             "). Received ", sample, ".");
}

}  // namespace tfcommx
