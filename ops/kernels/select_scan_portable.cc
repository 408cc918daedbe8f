// The tile loop for any processor.
#include "kernels/select_scan.h"
#include "kernels/select_scan.inl"

namespace tfcommx {
namespace {

struct One {  // a vector of one
  static constexpr uint32_t lanes = 1;
  template <class T>
  static float load(const T* p) {
    return widen(*p);
  }
  static void store(float* p, float x) { *p = x; }
  static float add(float a, float b) { return a + b; }
  static float multiply(float a, float b) { return a * b; }
  static uint32_t at_least(float x, uint32_t key) { return key_of(x) >= key; }
  static float mix(uint32_t bits, float set, float unset) { return bits ? set : unset; }
  static uint32_t append(uint16_t* list, uint32_t length, uint32_t bits, uint32_t first) {
    return append_each(list, length, bits, first);
  }
};

}  // namespace

const Scans& scans_portable() {
  static const Scans result = table<One>();
  return result;
}

}  // namespace tfcommx
