// Rounding errors into a residual, on CPUs.
#include "kernels/keep.h"

namespace tfcommx {

int64_t keep_cpu(const Keep& keep) {
  for (int64_t i = 0; i < keep.k; ++i) {
    if (keep.outside(i)) return i;
    keep.put(i);
  }
  return -1;
}

}  // namespace tfcommx
