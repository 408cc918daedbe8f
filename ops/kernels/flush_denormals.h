// Makes this thread's arithmetic flush denormals to zero, as TensorFlow's own threads do, whoever's
// thread it is.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tfcommx {

class FlushDenormals {
#if defined(__x86_64__)
 public:
  // Flush to zero, denormals are zero.
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned before_;
#else
 public:
  FlushDenormals() {}
#endif
};

}  // namespace tfcommx
