// The fastest tile loop that this processor runs. A file of its own, so that a test can put a loop
// that counts in its place.
#include "kernels/select_scan.h"

namespace tfcommx {

const Scans& scans() {
#if defined(__x86_64__)
  static const Scans& result =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? scans_avx512()
      : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")      ? scans_avx2()
                                                                              : scans_portable();
  return result;
#else
  return scans_portable();
#endif
}

}  // namespace tfcommx
