// Compares the sums of a chunk of all instruction sets that this processor has with a plain loop in
// the order that ops/kernels/norms.h says: every type, length and alignment.
#include <cstdio>
#include <random>
#include <vector>

#include "kernels/flush_denormals.h"
#include "kernels/norms_chunk.h"
#include "kernels/select_scan.h"

using namespace tfcommx;

namespace {

int failures = 0;

template <class T>
float in_order(const T* x, int64_t count) {
  std::vector<float> lanes(kLanes, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    volatile float square = widen(x[i]) * widen(x[i]);  // rounded by itself
    lanes[i % kLanes] += square;
  }
  for (size_t half = kLanes / 2; half; half /= 2)
    for (size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <class T>
void compare(const char* name, const ChunkSums& sums, Float type, std::mt19937& random) {
  for (int round = 0; round < 2000; ++round) {
    const int64_t count = round < 300 ? round + 1 : 1 + random() % kChunk, skip = random() % 5;
    std::vector<T> storage(count + skip);
    for (auto& x : storage) {
      uint32_t bits = random();
      if (round % 2) {  // numbers of about one size; else NaNs, infinities and denormals too
        if (sizeof x == 4) bits = (bits & 0x81ffffffu) | 0x3e000000u;
        if (type == Float::float16) bits = (bits & 0x8fffu) | 0x3000u;
        if (type == Float::bfloat16) bits = (bits & 0x81ffu) | 0x3e00u;
      }
      std::memcpy(&x, &bits, sizeof x);
    }
    const float mine = one_nan(sums.of[static_cast<int>(type)](storage.data() + skip, count)),
                right = one_nan(in_order(storage.data() + skip, count));
    if (std::memcmp(&mine, &right, 4)) {
      std::printf("%s: type %d, count %lld: %a is not %a\n", name, static_cast<int>(type),
                  static_cast<long long>(count), mine, right);
      ++failures;
    }
  }
}

void check(const char* name, const ChunkSums& sums) {
  const FlushDenormals flush;
  std::mt19937 random(7);
  compare<float>(name, sums, Float::float32, random);
  compare<Half>(name, sums, Float::float16, random);
  compare<Bfloat>(name, sums, Float::bfloat16, random);
  std::printf("checked %s\n", name);
}

}  // namespace

int main() {
  check("portable", chunk_sums_portable());
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
    check("avx2", chunk_sums_avx2());
  if (__builtin_cpu_supports("avx512f")) check("avx512", chunk_sums_avx512());
#endif
  return failures != 0;
}
