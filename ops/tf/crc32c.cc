// CRC32C as TFRecord files have it, by TensorFlow's own code. No op but a plain function: an op
// would copy the record first.
#include <cstddef>
#include <cstdint>

#include "absl/crc/crc32c.h"

extern "C" uint32_t tfcommx_crc32c(const char* bytes, size_t length) {
  return static_cast<uint32_t>(absl::ComputeCrc32c({bytes, length}));
}
