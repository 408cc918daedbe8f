// The tile loop for any processor, and the choice among the loops.
#include "kernels/select_scan.h"
#include "kernels/select_scan.inl"

namespace tfcommx {
namespace {

struct One {  // a vector of one
  static constexpr uint32_t lanes = 1;
  template <class T>
  static float load(const T* p) { return widen(*p); }
  static void store(float* p, float x) { *p = x; }
  static float add(float a, float b) { return a + b; }
  static uint32_t at_least(float x, uint32_t key) { return key_of(x) >= key; }
  static float mix(uint32_t bits, float set, float unset) { return bits ? set : unset; }
};

}  // namespace

const Scans& scans_portable() {
  static const Scans result = table<One>();
  return result;
}

const Scans& scans() {
#if defined(__x86_64__)
  static const Scans& result = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? scans_avx512()
                               : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")      ? scans_avx2()
                                                                                                       : scans_portable();
  return result;
#else
  return scans_portable();
#endif
}

}  // namespace tfcommx
