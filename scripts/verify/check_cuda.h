// What scripts/verify/check_cuda.cu compares with: random problems of selection, the definition of the
// right answer, and the kernels' own on a CPU and on a GPU. Included once.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda.h"
#include "kernels/random.h"
#include "kernels/select.h"
#include "kernels/wire_float.h"

using namespace tfcommx;

namespace {

const char* const kTypes[] = {"float32", "float16", "bfloat16"};
const char* const kRules[] = {"exact", "mstopk"};
const char* const kKinds[] = {"normal",  "laplace",  "ties",    "equal",   "zero",
                              "sparse",  "denormal", "one_bin", "octaves", "not_finite",
                              "all_nan", "huge",     "misled",  "sorted",  "bits"};

cudaStream_t stream;

void need(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s failed: %s. Is a GPU free, and built for (nvcc -arch)?\n", what,
               cudaGetErrorString(error));
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
  explicit OnDevice(const std::vector<T>& data, size_t skip = 0) : OnDevice(data.size(), skip) {
    put(data);
  }
  ~OnDevice() { cudaFree(base_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  T* data() { return reinterpret_cast<T*>(base_ + first_); }

  void put(const std::vector<T>& data) {
    need(cudaMemcpyAsync(this->data(), data.data(), size_ * sizeof(T), cudaMemcpyHostToDevice,
                         stream),
         "copy to the GPU");
    need(cudaStreamSynchronize(stream), "copy to the GPU");
  }

  std::vector<T> get() {
    std::vector<char> all(bytes_);
    need(cudaMemcpyAsync(all.data(), base_, bytes_, cudaMemcpyDeviceToHost, stream),
         "copy from the GPU");
    need(cudaStreamSynchronize(stream), "a kernel");
    const auto noise = [](char c) { return c == static_cast<char>(kNoise); };
    const auto end = all.begin() + first_ + size_ * sizeof(T);
    untouched =
        std::all_of(all.begin(), all.begin() + first_, noise) && std::all_of(end, all.end(), noise);
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
  std::vector<char> gradient;             // of the type
  std::vector<float> wide;                // the same in float32
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

// A float32 sum with denormals flushed: float64 holds the sum or product of two float32 well enough
// to round it once.
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
      moved = flushed(
          static_cast<double>(flushed(static_cast<double>(p.momentum) * flushed(p.velocity[i]))) +
          flushed(moved));
    acc[i] = p.residual.empty()
                 ? moved
                 : flushed(static_cast<double>(flushed(p.residual[i])) + flushed(moved));
    size[i] = std::isfinite(acc[i]) ? std::fabs(static_cast<double>(acc[i])) : INFINITY;
    if (!std::isfinite(acc[i])) continue;
    if (!p.residual.empty()) result.residual[i] = acc[i];
    if (!p.velocity.empty()) result.velocity[i] = moved;
  }
  std::vector<int32_t> order(p.n);
  for (int64_t i = 0; i < p.n; ++i) order[i] = static_cast<int32_t>(i);
  if (p.k > 0) {
    const auto before = [&](int32_t a, int32_t b) {
      return size[a] != size[b] ? size[a] > size[b] : a < b;
    };
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
      const auto first =
          inside.begin() + below(p.seed, static_cast<int64_t>(inside.size()) - rest + 1);
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
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) {
           return x == y || (std::isnan(x) && std::isnan(y));
         });
}

bool same(const Result& a, const Result& b) {
  return a.indices == b.indices && same(a.values, b.values) && same(a.residual, b.residual) &&
         same(a.velocity, b.velocity);
}

Selection selection(const Problem& p, const void* gradient, float* residual, float* velocity,
                    int32_t* indices, float* values) {
  return {gradient, p.type, residual, velocity, p.momentum, p.n,
          p.k,      p.seed, p.rule,   indices,  values};
}

const ParallelFor in_turn = [](int64_t turns, const std::function<void(int64_t)>& body) {
  for (int64_t turn = 0; turn < turns; ++turn) body(turn);
};

Result on_cpu(const Problem& p) {
  Result result{std::vector<int32_t>(p.k), std::vector<float>(p.k), p.residual, p.velocity};
  select_cpu(selection(p, p.gradient.data(), p.residual.empty() ? nullptr : result.residual.data(),
                       p.velocity.empty() ? nullptr : result.velocity.data(), result.indices.data(),
                       result.values.data()),
             in_turn);
  return result;
}

// Returns what the GPU chose; clears `good` if it wrote beyond its arrays.
Result on_gpu(const Problem& p, size_t skip, bool* good) {
  const size_t entry = p.type == Float::float32 ? 4 : 2;
  OnDevice<char> gradient(p.gradient, skip * entry), workspace(select_cuda_workspace(p.n, p.k));
  OnDevice<float> residual(p.residual, skip / 2), velocity(p.velocity, skip / 3), values(p.k, skip);
  OnDevice<int32_t> indices(p.k);
  need(select_cuda(
           selection(p, gradient.data(), p.residual.empty() ? nullptr : residual.data(),
                     p.velocity.empty() ? nullptr : velocity.data(), indices.data(), values.data()),
           workspace.data(), stream),
       "select_cuda");
  Result result{indices.get(), values.get(), residual.get(), velocity.get()};
  workspace.get();
  *good = *good && indices.untouched && values.untouched && residual.untouched &&
          velocity.untouched && workspace.untouched;
  return result;
}

std::vector<float> make(const std::string& kind, int64_t n, uint64_t seed,
                        std::mt19937_64& random) {
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
    if (kind == "not_finite" && draw(1 << 20) < rare * (1 << 20))
      x[i] = draw(2) ? NAN : draw(2) ? INFINITY : -INFINITY;
    if (kind == "all_nan") x[i] = NAN;
    if (kind == "huge") x[i] *= 2e38f;
    if (kind == "bits") x[i] = float_of(static_cast<uint32_t>(random()));
    if (kind == "sorted")
      x[i] = std::ldexp(1.0f + i % 1024 / 1024.0f, static_cast<int>(i / 1024 % 60) - 30);
  }
  // Large just where the kernel draws its sample, so that its threshold is far too high.
  if (kind == "misled") {
    const int64_t runs = std::min<int64_t>(n / 256, 4096), stretch = runs ? n / 8 / runs : 0;
    for (int64_t run = 0; run < runs; ++run)
      for (int64_t j = 0; j < 8; ++j)
        x[(run * stretch + below(seed + run, stretch)) * 8 + j] += 100;
  }
  return x;
}

// Makes the gradient of its type from `wide`, and `wide` what the gradient holds.
void narrow_gradient(Problem* p) {
  const size_t entry = p->type == Float::float32 ? 4 : 2;
  p->gradient.resize(p->n * entry);
  for (int64_t i = 0; i < p->n; ++i) {
    if (p->type == Float::float32) {
      std::memcpy(&p->gradient[4 * i], &p->wide[i], 4);
      continue;
    }
    const bool half = p->type == Float::float16;
    const uint16_t bits = half ? to_float16(p->wide[i]) : to_bfloat16(p->wide[i]);
    std::memcpy(&p->gradient[2 * i], &bits, 2);
    p->wide[i] = half ? from_float16(bits) : from_bfloat16(bits);
  }
}

Problem draw_problem(int64_t number, int64_t largest, std::mt19937_64& random) {
  constexpr int64_t kinds = std::size(kKinds);
  const std::string kind = kKinds[number % kinds];
  const auto draw = [&](int64_t count) { return static_cast<int64_t>(random() % count); };
  Problem p;
  const int64_t sizes[] = {
      draw(40), draw(3000), 1023 + draw(3), largest / 10 + draw(1000), largest / 2 + draw(5000),
      largest};
  p.n = sizes[(number / kinds) % std::size(sizes)];
  p.type = static_cast<Float>(draw(3));
  p.rule = static_cast<Rule>(draw(2));
  p.seed = random();
  const int64_t ks[] = {
      0, std::min<int64_t>(p.n, 1), p.n, p.n / 1000, p.n / 100, p.n / 100, p.n / 3, draw(p.n + 1)};
  p.k = ks[draw(std::size(ks))];
  p.wide = make(kind, p.n, p.seed, random);
  narrow_gradient(&p);
  if (p.n == 0) return p;
  const char* const starts[] = {"zero", "normal", "ties", "huge", "denormal"};
  const auto start = [&] {
    std::vector<float> x =
        make(kind == "misled" || kind == "equal" ? "zero" : starts[draw(5)], p.n, 0, random);
    for (auto& one : x)
      if (!std::isfinite(one)) one = 1;
    return x;
  };
  if (draw(4)) p.residual = start();
  if (draw(3) == 0) p.velocity = start();
  return p;
}

}  // namespace
