// Claim: the CUDA kernels choose what the contract in ops/kernels says, and selection with error feedback takes at most 1.25
// times as long as moving 16 bytes an entry. Built and started by scripts/check_cuda; needs neither TensorFlow nor Python.
//
// Checks, on fresh random inputs: selection against its definition, computed with sums and magnitudes in float64, and against
// the CPU kernel; merge and wire against the CPU kernels; every array lies between guards that must stay untouched. Then times
// selection in turns with a copy of 8 bytes an entry (which moves 16) and with the bare addition r += g. Prints one JSON object
// a line: {"name": "check", "cases", "failures"}, then those of scripts/bench_select.py.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#if defined(__CUDACC__) && __has_include(<cub/device/device_topk.cuh>)  // from CCCL 3.2 on
#define HAVE_CUB_TOPK
#include <cub/device/device_topk.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#endif

#include "kernels/cuda.h"
#include "kernels/merge.h"
#include "kernels/random.h"
#include "kernels/select.h"
#include "kernels/select_scan.h"
#include "kernels/wire.h"
#include "kernels/wire_float.h"

using namespace tfcommx;

namespace {

constexpr double kAllowed = 1.25;  // times the copy
constexpr int kWarmUps = 3;
const char* const kTypes[] = {"float32", "float16", "bfloat16"};
const char* const kRules[] = {"exact", "mstopk"};
const char* const kKinds[] = {"normal", "laplace", "ties", "equal", "zero", "sparse", "denormal", "one_bin", "octaves", "not_finite",
                              "all_nan", "huge", "misled", "sorted", "bits"};

cudaStream_t stream;

void need(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s failed: %s. Is a GPU free, and built for (nvcc -arch)?\n", what, cudaGetErrorString(error));
  std::exit(2);
}

void need(const char* error, const char* what) {
  if (!error) return;
  std::fprintf(stderr, "%s failed: %s\n", what, error);
  std::exit(2);
}

// A vector in the GPU's memory between guards, `skip` entries off the alignment of allocations.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(size_t size, size_t skip = 0)
      : size_(size), first_(kGuard + skip * sizeof(T)), bytes_(first_ + size * sizeof(T) + kGuard) {
    need(cudaMalloc(&base_, bytes_), "cudaMalloc");
    need(cudaMemsetAsync(base_, kNoise, bytes_, stream), "cudaMemset");
  }
  explicit OnDevice(const std::vector<T>& data, size_t skip = 0) : OnDevice(data.size(), skip) { put(data); }
  ~OnDevice() { cudaFree(base_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  T* data() { return reinterpret_cast<T*>(base_ + first_); }

  void put(const std::vector<T>& data) {
    need(cudaMemcpyAsync(this->data(), data.data(), size_ * sizeof(T), cudaMemcpyHostToDevice, stream), "copy to the GPU");
    need(cudaStreamSynchronize(stream), "copy to the GPU");
  }

  std::vector<T> get() {
    std::vector<char> all(bytes_);
    need(cudaMemcpyAsync(all.data(), base_, bytes_, cudaMemcpyDeviceToHost, stream), "copy from the GPU");
    need(cudaStreamSynchronize(stream), "a kernel");
    const auto noise = [](char c) { return c == static_cast<char>(kNoise); };
    const auto end = all.begin() + first_ + size_ * sizeof(T);
    untouched = std::all_of(all.begin(), all.begin() + first_, noise) && std::all_of(end, all.end(), noise);
    std::vector<T> data(size_);
    if (size_) std::memcpy(data.data(), all.data() + first_, size_ * sizeof(T));
    return data;
  }

  bool untouched = true;  // the guards, when last read

 private:
  static constexpr int kNoise = 0xa5;
  static constexpr size_t kGuard = 256;
  size_t size_, first_, bytes_;
  char* base_;
};

struct Problem {
  std::vector<char> gradient;      // of the type
  std::vector<float> wide;         // the same in float32
  std::vector<float> residual, velocity;  // empty: none
  float momentum = 0.9f;
  Float type;
  Rule rule;
  int64_t n, k;
  uint64_t seed;
};

struct Result {
  std::vector<int32_t> indices;
  std::vector<float> values, residual, velocity;
};

// A float32 sum with denormals flushed: float64 holds the sum or product of two float32 well enough to round it once.
float flushed(double x) {
  const float y = static_cast<float>(x);
  return std::fabs(y) < FLT_MIN ? std::copysign(0.0f, y) : y;
}

// The definition.
Result expected(const Problem& p) {
  Result result{{}, {}, p.residual, p.velocity};
  std::vector<float> acc(p.wide);
  std::vector<double> size(p.n);
  for (int64_t i = 0; i < p.n; ++i) {
    float moved = acc[i];
    if (!p.velocity.empty())
      moved = flushed(static_cast<double>(flushed(static_cast<double>(p.momentum) * flushed(p.velocity[i]))) + flushed(moved));
    acc[i] = p.residual.empty() ? moved : flushed(static_cast<double>(flushed(p.residual[i])) + flushed(moved));
    size[i] = std::isfinite(acc[i]) ? std::fabs(static_cast<double>(acc[i])) : INFINITY;
    if (!std::isfinite(acc[i])) continue;
    if (!p.residual.empty()) result.residual[i] = acc[i];
    if (!p.velocity.empty()) result.velocity[i] = moved;
  }
  std::vector<int32_t> order(p.n);
  for (int64_t i = 0; i < p.n; ++i) order[i] = static_cast<int32_t>(i);
  if (p.k > 0) {
    const auto before = [&](int32_t a, int32_t b) { return size[a] != size[b] ? size[a] > size[b] : a < b; };
    std::nth_element(order.begin(), order.begin() + (p.k - 1), order.end(), before);
    const double last = size[order[p.k - 1]];
    order.resize(p.k);
    if (p.rule == Rule::mstopk && std::isfinite(last)) {
      const double width = std::ldexp(1.0, (last < FLT_MIN ? -126 : std::ilogb(last)) - 12);
      const double lower = std::floor(last / width) * width;
      std::vector<int32_t> inside;
      order.clear();
      for (int64_t i = 0; i < p.n; ++i) {
        if (size[i] >= lower + width) order.push_back(static_cast<int32_t>(i));
        if (size[i] >= lower && size[i] < lower + width) inside.push_back(static_cast<int32_t>(i));
      }
      const int64_t rest = p.k - static_cast<int64_t>(order.size());
      const auto first = inside.begin() + below(p.seed, static_cast<int64_t>(inside.size()) - rest + 1);
      order.insert(order.end(), first, first + rest);
    }
    std::sort(order.begin(), order.end());
    result.indices = order;
  }
  for (const int32_t i : result.indices) {
    result.values.push_back(acc[i]);
    if (!std::isfinite(acc[i])) continue;
    if (!p.residual.empty()) result.residual[i] = 0;
    if (!p.velocity.empty()) result.velocity[i] = 0;
  }
  return result;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {  // a NaN is any NaN
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

bool same(const Result& a, const Result& b) {
  return a.indices == b.indices && same(a.values, b.values) && same(a.residual, b.residual) && same(a.velocity, b.velocity);
}

Selection selection(const Problem& p, const void* gradient, float* residual, float* velocity, int32_t* indices, float* values) {
  return {gradient, p.type, residual, velocity, p.momentum, p.n, p.k, p.seed, p.rule, indices, values};
}

const ParallelFor in_turn = [](int64_t turns, const std::function<void(int64_t)>& body) {
  for (int64_t turn = 0; turn < turns; ++turn) body(turn);
};

Result on_cpu(const Problem& p) {
  Result result{std::vector<int32_t>(p.k), std::vector<float>(p.k), p.residual, p.velocity};
  select_cpu(selection(p, p.gradient.data(), p.residual.empty() ? nullptr : result.residual.data(), nullptr, result.indices.data(),
                       result.values.data()),
             in_turn);
  return result;
}

// Returns what the GPU chose; clears `good` where it wrote beyond its arrays.
Result on_gpu(const Problem& p, size_t skip, bool* good) {
  const size_t entry = p.type == Float::float32 ? 4 : 2;
  OnDevice<char> gradient(p.gradient, skip * entry), workspace(select_cuda_workspace(p.n));
  OnDevice<float> residual(p.residual, skip / 2), velocity(p.velocity, skip / 3), values(p.k, skip);
  OnDevice<int32_t> indices(p.k);
  need(select_cuda(selection(p, gradient.data(), p.residual.empty() ? nullptr : residual.data(),
                             p.velocity.empty() ? nullptr : velocity.data(), indices.data(), values.data()),
                   workspace.data(), stream),
       "select_cuda");
  Result result{indices.get(), values.get(), residual.get(), velocity.get()};
  workspace.get();
  *good = *good && indices.untouched && values.untouched && residual.untouched && velocity.untouched && workspace.untouched;
  return result;
}

std::vector<float> make(const std::string& kind, int64_t n, uint64_t seed, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (auto& one : x) one = normal(random);
  const auto draw = [&](uint64_t count) { return random() % count; };
  const double rare = std::pow(10.0, -static_cast<double>(draw(4)));
  for (int64_t i = 0; i < n; ++i) {
    if (kind == "laplace") x[i] = std::copysign(-std::log((draw(1 << 24) + 1) / 16777217.0f), x[i]);
    if (kind == "ties") x[i] = static_cast<float>(draw(7)) - 3;
    if (kind == "equal") x[i] = -1.5f;
    if (kind == "zero") x[i] = 0;
    if (kind == "sparse" && draw(1000)) x[i] = 0;
    if (kind == "denormal") x[i] *= 1e-39f;
    if (kind == "one_bin") x[i] = 1 + draw(64) * 0x1p-23f;
    if (kind == "octaves") x[i] = std::ldexp(x[i], static_cast<int>(draw(200)) - 100);
    if (kind == "not_finite" && draw(1 << 20) < rare * (1 << 20)) x[i] = draw(2) ? NAN : draw(2) ? INFINITY : -INFINITY;
    if (kind == "all_nan") x[i] = NAN;
    if (kind == "huge") x[i] *= 2e38f;
    if (kind == "bits") x[i] = float_of(static_cast<uint32_t>(random()));
    if (kind == "sorted") x[i] = std::ldexp(1.0f + i % 1024 / 1024.0f, static_cast<int>(i / 1024 % 60) - 30);
  }
  if (kind == "misled") {  // large just where the kernel draws its sample, so that its threshold is far too high
    const int64_t runs = std::min<int64_t>(n / 256, 4096), stretch = runs ? n / 8 / runs : 0;
    for (int64_t run = 0; run < runs; ++run)
      for (int64_t j = 0; j < 8; ++j) x[(run * stretch + below(seed + run, stretch)) * 8 + j] += 100;
  }
  return x;
}

Problem draw_problem(int64_t number, int64_t largest, std::mt19937_64& random) {
  constexpr int64_t kinds = std::size(kKinds);
  const std::string kind = kKinds[number % kinds];
  const auto draw = [&](int64_t count) { return static_cast<int64_t>(random() % count); };
  Problem p;
  const int64_t sizes[] = {draw(40), draw(3000), 1023 + draw(3), largest / 10 + draw(1000), largest / 2 + draw(5000), largest};
  p.n = sizes[(number / kinds) % std::size(sizes)];
  p.type = static_cast<Float>(draw(3));
  p.rule = static_cast<Rule>(draw(2));
  p.seed = random();
  const int64_t ks[] = {0, std::min<int64_t>(p.n, 1), p.n, p.n / 1000, p.n / 100, p.n / 100, p.n / 3, draw(p.n + 1)};
  p.k = ks[draw(std::size(ks))];
  p.wide = make(kind, p.n, p.seed, random);
  p.gradient.resize(p.n * (p.type == Float::float32 ? 4 : 2));
  for (int64_t i = 0; i < p.n; ++i) {
    if (p.type == Float::float32) {
      std::memcpy(&p.gradient[4 * i], &p.wide[i], 4);
      continue;
    }
    const uint16_t bits = p.type == Float::float16 ? to_float16(p.wide[i]) : to_bfloat16(p.wide[i]);
    std::memcpy(&p.gradient[2 * i], &bits, 2);
    p.wide[i] = p.type == Float::float16 ? from_float16(bits) : from_bfloat16(bits);
  }
  if (p.n == 0) return p;
  const char* const starts[] = {"zero", "normal", "ties", "huge", "denormal"};
  const auto start = [&] {
    std::vector<float> x = make(kind == "misled" || kind == "equal" ? "zero" : starts[draw(5)], p.n, 0, random);
    for (auto& one : x)
      if (!std::isfinite(one)) one = 1;
    return x;
  };
  if (draw(4)) p.residual = start();
  if (draw(3) == 0) p.velocity = start();
  return p;
}

int checked = 0, failures = 0;

void report(bool good, const std::string& what) {
  ++checked;
  if (good) return;
  if (++failures <= 20) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

void check_selection(int64_t number, int64_t largest, std::mt19937_64& random) {
  const Problem p = draw_problem(number, largest, random);
  const size_t skip = random() % 8;
  const std::string what = std::string("select ") + kKinds[number % std::size(kKinds)] + " " + kTypes[static_cast<int>(p.type)] + " " +
                           kRules[static_cast<int>(p.rule)] + " n " + std::to_string(p.n) + " k " + std::to_string(p.k) + " skip " +
                           std::to_string(skip) + (p.residual.empty() ? "" : " residual") + (p.velocity.empty() ? "" : " velocity");
  const Result right = expected(p);
  bool guarded = true;
  const Result mine = on_gpu(p, skip, &guarded);
  report(guarded, what + ": wrote beyond its arrays");
  report(same(mine, right), what + ": differs from the definition");
  if (p.velocity.empty()) report(same(on_cpu(p), right), what + ": the CPU kernel differs from the definition");
}

#ifndef __CUDACC__
// A wrong result would be noticed above, but not that everything is a candidate. Each entry that is sampled or a candidate costs
// an atomic addition, and so do the bins that they fall into.
void check_prediction(std::mt19937_64& random) {
  Problem p;
  p.n = 400000;
  p.k = p.n / 100;
  p.type = Float::float32;
  p.rule = Rule::mstopk;
  p.seed = random();
  p.wide = make("normal", p.n, 0, random);
  p.gradient.resize(4 * p.n);
  std::memcpy(p.gradient.data(), p.wide.data(), 4 * p.n);
  cuda_on_cpu::atomics = 0;
  bool guarded = true;
  on_gpu(p, 0, &guarded);
  report(cuda_on_cpu::atomics < p.n / 8, "the sample must leave few candidates: atomic additions " + std::to_string(cuda_on_cpu::atomics));
}
#endif

std::vector<int32_t> draw_indices(int64_t k, int64_t n, std::mt19937_64& random) {  // ascending, unique
  std::vector<int32_t> result;
  for (int64_t i = 0, left = k; left > 0; ++i) {
    if (static_cast<int64_t>(random() % (n - i)) >= left) continue;
    result.push_back(static_cast<int32_t>(i));
    --left;
  }
  return result;
}

void check_merge(std::mt19937_64& random) {
  const int64_t n = 1 + random() % 5000, k = random() % (n + 1), ranks = random() % 6;
  std::normal_distribution<float> normal;
  std::vector<int32_t> indices;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const std::vector<int32_t> run = draw_indices(k, n, random);
    indices.insert(indices.end(), run.begin(), run.end());
  }
  std::vector<float> values(indices.size()), right(n);
  for (auto& one : values) one = normal(random) * std::pow(10.0f, static_cast<float>(random() % 7) - 3);
  const int64_t pairs = static_cast<int64_t>(indices.size());
  merge_cpu({indices.data(), values.data(), pairs, right.data(), n}, in_turn);
  const bool outside = pairs && random() % 4 == 0;
  if (outside) indices[random() % pairs] = random() % 2 ? -1 : static_cast<int32_t>(n);
  OnDevice<int32_t> from(indices);
  OnDevice<float> weights(values), dense(n, random() % 4);
  need(merge_cuda({from.data(), weights.data(), pairs, dense.data(), n}, k, stream), "merge_cuda");
  const std::vector<float> mine = dense.get();
  report(dense.untouched && (outside ? std::isnan(mine[0]) : same(mine, right)),
         "merge n " + std::to_string(n) + " k " + std::to_string(k));
}

void check_wire(std::mt19937_64& random) {
  const int64_t size = random() % 3 ? 1 + random() % 5000 : 65536 * (random() % 5) + 1 + random() % 3;
  const int64_t k = std::min<int64_t>(size, random() % 3000), buffers = 1 + random() % 3;
  const WireLayout layout{k, size, static_cast<Float>(random() % 3), random() % 2 == 0};
  const std::string what = "wire size " + std::to_string(size) + " k " + std::to_string(k) + " " + kTypes[static_cast<int>(layout.type)];
  std::vector<int32_t> all;
  for (int64_t buffer = 0; buffer < buffers; ++buffer) {
    const std::vector<int32_t> indices = draw_indices(k, size, random);
    std::vector<float> values(k);
    for (auto& one : values) one = float_of(static_cast<uint32_t>(random()));
    std::vector<int32_t> right(layout.words());
    wire_encode_cpu(layout, indices.data(), values.data(), right.data());
    OnDevice<int32_t> from(indices), words(layout.words());
    OnDevice<float> weights(values);
    need(wire_encode_cuda(layout, from.data(), weights.data(), words.data(), stream), "wire_encode_cuda");
    report(words.get() == right && words.untouched, what + ": encode");
    all.insert(all.end(), right.begin(), right.end());
  }
  const bool broken = layout.blocks && k && random() % 4 == 0;
  if (broken) all[random() % layout.counts()] += random() % 2 ? 1 : -5000;
  std::vector<int32_t> right(buffers * k);
  std::vector<float> right_values(buffers * k);
  wire_decode_cpu(layout, all.data(), buffers, right.data(), right_values.data(), in_turn);
  if (broken) std::fill_n(right.begin(), k, -1);
  OnDevice<int32_t> from(all), indices(buffers * k);
  OnDevice<float> values(buffers * k);
  need(wire_decode_cuda(layout, from.data(), buffers, indices.data(), values.data(), stream), "wire_decode_cuda");
  report(indices.get() == right && same(values.get(), right_values) && indices.untouched && values.untouched, what + ": decode");
}

// r += g and nothing else: 12 bytes an entry.
__global__ void __launch_bounds__(kThreads) bare_add(const float* gradient, float* residual, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) residual[i] += gradient[i];
}

#ifdef HAVE_CUB_TOPK
struct Magnitude {
  __host__ __device__ uint32_t operator()(float x) const { return key_of(x); }
};

__global__ void __launch_bounds__(kThreads) take(float* residual, const int32_t* indices, float* values, int64_t k) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= k) return;
  values[j] = residual[indices[j]];
  residual[indices[j]] = 0;
}

// The bare addition, CUB's top k of the magnitudes in any order, and the chosen entries taken out. First with workspace null: then
// only `bytes` is set.
void select_with_cub(const float* gradient, float* residual, int64_t n, int64_t k, void* workspace, size_t* bytes, uint32_t* keys,
                     int32_t* indices, float* values) {
  namespace execution = cuda::execution;
  const auto free_order = execution::require(execution::determinism::not_guaranteed, execution::output_ordering::unsorted);
  const auto environment = cuda::std::execution::env{cuda::stream_ref{stream}, free_order};
  if (workspace) launch(bare_add, (n + kThreads - 1) / kThreads, stream, gradient, residual, n);
  need(cub::DeviceTopK::MaxPairs(workspace, *bytes, thrust::make_transform_iterator(residual, Magnitude{}), keys,
                                 thrust::make_counting_iterator(int32_t{0}), indices, n, k, environment),
       "cub::DeviceTopK");
  if (workspace) launch(take, (k + kThreads - 1) / kThreads, stream, residual, indices, values, k);
}
#endif

// Seconds of each step, queued one after another: the host is ahead of the GPU, as in training.
std::vector<double> seconds(const std::vector<std::function<void()>>& steps) {
  std::vector<cudaEvent_t> events(steps.size() + 1);
  for (auto& event : events) need(cudaEventCreate(&event), "cudaEventCreate");
  need(cudaEventRecord(events[0], stream), "cudaEventRecord");
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i]();
    need(cudaEventRecord(events[i + 1], stream), "cudaEventRecord");
  }
  need(cudaStreamSynchronize(stream), "a kernel");
  std::vector<double> result;
  for (size_t i = 0; i < steps.size(); ++i) {
    float milliseconds = 0;
    need(cudaEventElapsedTime(&milliseconds, events[i], events[i + 1]), "cudaEventElapsedTime");
    result.push_back(milliseconds * 1e-3);
  }
  for (const auto event : events) need(cudaEventDestroy(event), "cudaEventDestroy");
  return result;
}

bool time_selection(int64_t n, double density, Float type, int rounds, const char* device, std::mt19937_64& random) {
  Problem p;
  p.n = n;
  p.k = std::max<int64_t>(1, static_cast<int64_t>(n * density));
  p.type = type;
  p.seed = random();
  p.wide = make("normal", n, 0, random);
  p.residual = make("normal", n, 0, random);
  const size_t entry = type == Float::float32 ? 4 : 2;
  p.gradient.resize(n * entry);
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t bits = type == Float::float16 ? to_float16(p.wide[i]) : to_bfloat16(p.wide[i]);
    if (type == Float::float32) {
      std::memcpy(&p.gradient[4 * i], &p.wide[i], 4);
    } else {
      std::memcpy(&p.gradient[2 * i], &bits, 2);
      p.wide[i] = type == Float::float16 ? from_float16(bits) : from_bfloat16(bits);
    }
  }
  OnDevice<char> gradient(p.gradient), workspace(select_cuda_workspace(n)), from(8 * n), to(8 * n);
  OnDevice<float> wide(p.wide), added(p.residual), values(p.k);
  OnDevice<int32_t> indices(p.k);
  bool good = true, first = true;
  for (const Rule rule : {Rule::exact, Rule::mstopk}) {
    p.rule = rule;
    OnDevice<float> residual(p.residual);
    Selection s = selection(p, gradient.data(), residual.data(), nullptr, indices.data(), values.data());
    need(select_cuda(s, workspace.data(), stream), "select_cuda");
    const Result right = expected(p);
    const bool verified = same({indices.get(), values.get(), residual.get(), {}}, right);
    good = good && verified;
    std::vector<const char*> names = {"copy_16_bytes", "residual_add", kRules[static_cast<int>(rule)]};
    std::vector<std::function<void()>> steps = {
        [&] { need(cudaMemcpyAsync(to.data(), from.data(), 8 * n, cudaMemcpyDeviceToDevice, stream), "copy"); },
        [&] { launch(bare_add, (n + kThreads - 1) / kThreads, stream, wide.data(), added.data(), n); },
        [&] { need(select_cuda(s, workspace.data(), stream), "select_cuda"); }};
    std::vector<bool> right_ones = {true, true, verified};
#ifdef HAVE_CUB_TOPK
    size_t bytes = 0;
    OnDevice<float> kept(p.residual);
    OnDevice<uint32_t> keys(p.k);
    select_with_cub(wide.data(), kept.data(), n, p.k, nullptr, &bytes, keys.data(), indices.data(), values.data());
    OnDevice<char> scratch(bytes);
    const auto cub_topk = [&] {
      select_with_cub(wide.data(), kept.data(), n, p.k, scratch.data(), &bytes, keys.data(), indices.data(), values.data());
    };
    cub_topk();
    std::vector<int32_t> chosen = indices.get();
    std::sort(chosen.begin(), chosen.end());
    names.push_back("cub_topk");
    steps.push_back(cub_topk);
    right_ones.push_back(chosen == right.indices);  // printed for `exact`
#endif
    std::vector<std::vector<double>> times(steps.size());
    for (int round = -kWarmUps; round < rounds; ++round) {
      ++s.seed;
      const std::vector<double> round_times = seconds(steps);
      for (size_t j = 0; j < steps.size() && round >= 0; ++j) times[j].push_back(round_times[j]);
    }
    const auto median = [&](size_t which) {
      std::sort(times[which].begin(), times[which].end());
      return times[which][times[which].size() / 2];
    };
    for (size_t j = 0; j < steps.size(); ++j) {
      if (j != 2 && !first) continue;  // the others are alike for both rules
      std::printf("{\"name\": \"%s\", \"device\": \"%s\", \"dtype\": \"%s\", \"n\": %lld, \"k\": %lld, \"threads\": null, "
                  "\"seconds\": %.9f, \"limit_seconds\": %.9f, \"verified\": %s}\n",
                  names[j], device, kTypes[static_cast<int>(type)], static_cast<long long>(n), static_cast<long long>(p.k), median(j),
                  kAllowed * median(0), right_ones[j] ? "true" : "false");
    }
    first = false;
  }
  return good;
}

}  // namespace

int main(int count, char** words) {
  int64_t cases = 600, largest = 3000000, rounds = 51, n = 0, type = 0;
  uint64_t seed = std::random_device{}();
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i];
    const int64_t value = std::atoll(words[i + 1]);
    if (name == "--cases") cases = value;
    else if (name == "--largest") largest = value;
    else if (name == "--rounds") rounds = value;
    else if (name == "--n") n = value;
    else if (name == "--type" && value >= 0 && value < 3) type = value;
    else if (name == "--seed") seed = value;
    else count = 0;
  }
  if (count % 2 == 0) {
    std::fprintf(stderr, "Options, each with a number: --cases, --largest (entries in a case), --seed, --n (entries timed), --type (of\n"
                 "what is timed: 0 float32, 1 float16, 2 bfloat16), --rounds (0: no timing)\n");
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "No GPU was found: nothing was checked. Run this where nvidia-smi lists one.\n");
    return 2;
  }
  cudaDeviceProp properties;
  need(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  need(cudaStreamCreate(&stream), "cudaStreamCreate");
  std::mt19937_64 random(seed);
  for (int64_t number = 0; number < cases; ++number) {
    check_selection(number, largest, random);
    check_merge(random);
    check_wire(random);
  }
#ifndef __CUDACC__
  check_prediction(random);
#endif
  std::printf("{\"name\": \"check\", \"device\": \"%s\", \"seed\": %llu, \"cases\": %d, \"failures\": %d}\n", properties.name,
              static_cast<unsigned long long>(seed), checked, failures);
  std::fflush(stdout);
  bool good = failures == 0;
  for (const int64_t entries : n ? std::vector<int64_t>{n} : std::vector<int64_t>{25600000, 128000000})
    for (const double density : {0.001, 0.01})
      if (rounds > 0)
        good = time_selection(entries, density, static_cast<Float>(type), static_cast<int>(rounds), properties.name, random) && good;
  return good ? 0 : 1;
}
