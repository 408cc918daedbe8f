// Compares the tile loops of all instruction sets that this processor has with a plain loop: every
// type, length and threshold.
#include <cstdio>
#include <random>
#include <vector>

#include "kernels/select_scan.h"

using namespace tfcommx;

namespace {

int failures = 0;

template <class T>
void compare(const char* name, const Scans& scans, Float type, std::mt19937& random) {
  for (int round = 0; round < 400; ++round) {
    const uint32_t count = round < 100 ? round : 1 + random() % kTile, skip = random() % 3;
    const uint32_t threshold =
        std::vector<uint32_t>{0, 1, 0x3f800000u, 0x40000000u, kNotFinite}[random() % 5];
    std::vector<T> storage(count + skip);
    std::vector<float> before(count + skip), moving(count + skip);
    for (auto& x : storage) {  // random bits hold NaNs, infinities and denormals too
      uint32_t bits = random();
      std::memcpy(&x, &bits, sizeof x);
    }
    for (auto& x : before) x = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 256;
    for (auto& x : moving) x = static_cast<float>(static_cast<int>(random() % 20001) - 10000) / 30;
    const T* g = storage.data() + skip;
    for (const int states : {0, 1, 2}) {  // none, a residual, a velocity too
      std::vector<float> after = before, expected = before, moved = moving, expected_moved = moving;
      std::vector<uint16_t> candidates(kRoom), bad(kRoom), right_candidates, right_bad;
      for (uint32_t i = 0; i < count; ++i) {
        const float product = 0.9f * moving[i + skip];
        const float u = states == 2 ? product + widen(g[i]) : widen(g[i]),
                    acc = states ? u + before[i + skip] : u;
        if (key_of(acc) >= kNotFinite) {
          right_bad.push_back(i);
          continue;
        }
        if (key_of(acc) >= threshold) right_candidates.push_back(i);
        if (states) expected[i + skip] = acc;
        if (states == 2) expected_moved[i + skip] = u;
      }
      const Scan* row = states == 2 ? scans.with_velocity
                        : states    ? scans.with_residual
                                    : scans.plain;
      const Found found = row[static_cast<int>(type)](
          g, states ? after.data() + skip : nullptr, states == 2 ? moved.data() + skip : nullptr,
          0.9f, count, threshold, candidates.data(), bad.data());
      candidates.resize(found.candidates);
      bad.resize(found.not_finite);
      if (candidates != right_candidates || bad != right_bad ||
          std::memcmp(after.data(), expected.data(), after.size() * sizeof(float)) ||
          std::memcmp(moved.data(), expected_moved.data(), moved.size() * sizeof(float))) {
        std::printf("%s: type %d, count %u, threshold %x, states %d\n", name,
                    static_cast<int>(type), count, threshold, states);
        ++failures;
      }
    }
  }
}

void check(const char* name, const Scans& scans) {
  std::mt19937 random(7);
  compare<float>(name, scans, Float::float32, random);
  compare<Half>(name, scans, Float::float16, random);
  compare<Bfloat>(name, scans, Float::bfloat16, random);
  std::printf("checked %s\n", name);
}

}  // namespace

int main() {
  check("portable", scans_portable());
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) check("avx2", scans_avx2());
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
    check("avx512", scans_avx512());
#endif
  return failures != 0;
}
