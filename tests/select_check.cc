// Counts what selection reads and allocates: each line of output is a case. The loops that read
// n-sized data are replaced by ones that count and call the real ones, and operator new counts
// bytes: the kernel itself carries no counter.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/select.h"
#include "kernels/select_scan.h"

namespace {

std::atomic<int64_t> entries_read{0}, bytes_now{0}, bytes_peak{0};
constexpr size_t kHead = 64;  // before each allocation: its size

}  // namespace

void* operator new(size_t size) {
  char* start =
      static_cast<char*>(std::aligned_alloc(kHead, (size + 2 * kHead - 1) / kHead * kHead));
  if (!start) throw std::bad_alloc();
  *reinterpret_cast<size_t*>(start) = size;
  const int64_t now = bytes_now += static_cast<int64_t>(size);
  for (int64_t peak = bytes_peak; now > peak && !bytes_peak.compare_exchange_weak(peak, now);) {
  }
  return start + kHead;
}
void operator delete(void* data) noexcept {
  if (!data) return;
  char* start = static_cast<char*>(data) - kHead;
  bytes_now -= static_cast<int64_t>(*reinterpret_cast<size_t*>(start));
  std::free(start);
}
void operator delete(void* data, size_t) noexcept { operator delete(data); }

namespace tfcommx {
namespace {

const Scans& fastest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
    return scans_avx512();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return scans_avx2();
#endif
  return scans_portable();
}

template <int kRow, int kType>
Found counted(const void* gradient, float* residual, float* velocity, float momentum,
              uint32_t count, uint32_t threshold, uint16_t* candidates, uint16_t* not_finite) {
  entries_read += count;
  const Scans& real = fastest();
  const Scan* row = kRow == 0 ? real.plain : kRow == 1 ? real.with_residual : real.with_velocity;
  return row[kType](gradient, residual, velocity, momentum, count, threshold, candidates,
                    not_finite);
}

}  // namespace

const Scans& scans() {
  static const Scans counting = {{counted<0, 0>, counted<0, 1>, counted<0, 2>},
                                 {counted<1, 0>, counted<1, 1>, counted<1, 2>},
                                 {counted<2, 0>, counted<2, 1>, counted<2, 2>}};
  return counting;
}

}  // namespace tfcommx

using namespace tfcommx;

namespace {

std::vector<float> make(const std::string& kind, int64_t n) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (auto& value : x) value = normal(random);
  const auto map = [&](auto function) {
    for (auto& value : x) value = function(value);
  };
  if (kind == "laplace") map([&](float v) { return v * std::fabs(v); });  // heavy tails
  if (kind == "equal") map([](float) { return -1.5f; });
  if (kind == "zero") map([](float) { return 0.0f; });
  if (kind == "few") map([](float v) { return std::round(v); });
  if (kind == "sparse") map([](float v) { return std::fabs(v) > 3 ? v : 0.0f; });
  if (kind == "one_bin")
    map([&](float) { return 1.0f + static_cast<float>(random() % 64) * 0x1p-23f; });
  if (kind == "runs")  // neighbours alike: a sample of runs knows little
    for (int64_t i = 0; i < n; ++i) x[i] = x[i / 8 * 8];
  if (kind == "halves") map([](float v) { return v > 0 ? 1.0f : v * 1e-6f; });
  if (kind == "not_finite")
    for (int64_t i = 0; i < n; i += 1 + random() % 4000) x[i] = NAN;
  return x;
}

void run_threads(int64_t turns, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t turn; (turn = next++) < turns;) body(turn);
  };
  std::thread other(work);
  work();
  other.join();
}

}  // namespace

// Takes n, and a kind if not all are wanted. Prints: kind, rule, states (0: none, 1: a residual,
// 2: a velocity too), n, k, entries read, peak bytes
int main(int count, char** words) {
  const int64_t n = std::atoll(words[1]);
  const std::string wanted = count > 2 ? words[2] : "";
  // Made once: fresh memory for each case costs more than the selection
  std::vector<float> residual(n), velocity(n), values(n / 3);
  std::vector<int32_t> indices(n / 3);
  for (const std::string kind : {"normal", "laplace", "equal", "zero", "few", "sparse", "one_bin",
                                 "runs", "halves", "not_finite"}) {
    if (!wanted.empty() && kind != wanted) continue;
    const std::vector<float> gradient = make(kind, n);
    for (const Rule rule : {Rule::exact, Rule::mstopk}) {
      for (const int states : {0, 1, 2}) {
        for (const int64_t k : {n / 1000, n / 100, n / 3}) {
          std::fill(residual.begin(), residual.end(), 0.0f);
          std::fill(velocity.begin(), velocity.end(), 0.0f);
          const Selection selection{gradient.data(),
                                    Float::float32,
                                    states ? residual.data() : nullptr,
                                    states == 2 ? velocity.data() : nullptr,
                                    0.9f,
                                    n,
                                    k,
                                    7,
                                    rule,
                                    indices.data(),
                                    values.data()};
          entries_read = 0;
          bytes_peak = bytes_now.load();
          const int64_t before = bytes_now;
          select_cpu(selection, run_threads);
          std::printf("%s %s %d %ld %ld %ld %ld\n", kind.c_str(),
                      rule == Rule::exact ? "exact" : "mstopk", states, static_cast<long>(n),
                      static_cast<long>(k), static_cast<long>(entries_read.load()),
                      static_cast<long>(bytes_peak - before));
        }
      }
    }
  }
  return 0;
}
