// Times the kernels on a GPU, in turns with a copy: selection beside the bare addition and CUB's top
// k; the whole of an exchange; norms, LARS and the dense wire. Included once, by
// scripts/verify/check_cuda.cu, which says what is claimed and printed.
#pragma once

#include "check_cuda_exchange.h"

#if defined(__CUDACC__) && __has_include(<cub/device/device_topk.cuh>)  // from CCCL 3.2 on
#define HAVE_CUB_TOPK
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <cub/device/device_topk.cuh>
#endif

#include "kernels/dense.h"
#include "kernels/lars.h"
#include "kernels/low_bits.h"
#include "kernels/norms.h"
#include "kernels/select_scan.h"

namespace {

constexpr double kAllowed = 1.25;  // times what the copy takes for as many bytes
constexpr int kWarmUps = 3;

// r += g and nothing else: 12 bytes an entry.
__global__ void __launch_bounds__(kThreads)
    bare_add(const float* gradient, float* residual, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) residual[i] += gradient[i];
}

#ifdef HAVE_CUB_TOPK
struct Magnitude {
  __host__ __device__ uint32_t operator()(float x) const { return key_of(x); }
};

__global__ void __launch_bounds__(kThreads)
    take(float* residual, const int32_t* indices, float* values, int64_t k) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= k) return;
  values[j] = residual[indices[j]];
  residual[indices[j]] = 0;
}

// The bare addition, CUB's top k of the magnitudes in any order, and the chosen entries taken out.
// First with workspace null: then only `bytes` is set.
void select_with_cub(const float* gradient, float* residual, int64_t n, int64_t k, void* workspace,
                     size_t* bytes, uint32_t* keys, int32_t* indices, float* values) {
  namespace execution = cuda::execution;
  const auto free_order = execution::require(execution::determinism::not_guaranteed,
                                             execution::output_ordering::unsorted);
  const auto environment = cuda::std::execution::env{cuda::stream_ref{stream}, free_order};
  if (workspace) launch(bare_add, (n + kThreads - 1) / kThreads, stream, gradient, residual, n);
  need(cub::DeviceTopK::MaxPairs(
           workspace, *bytes, thrust::make_transform_iterator(residual, Magnitude{}), keys,
           thrust::make_counting_iterator(int32_t{0}), indices, n, k, environment),
       "cub::DeviceTopK");
  if (workspace) launch(take, (k + kThreads - 1) / kThreads, stream, residual, indices, values, k);
}
#endif

struct Step {
  std::string name;
  int64_t k;
  double bytes;  // that must cross memory: each input read once, each output written once
  std::function<void()> run;
  bool verified = true;
  double allowed = 0;  // bytes that the limit counts; 0: `bytes`
};

// Runs the steps in their order, round after round, queued without waiting: the host is ahead of
// the GPU, as in training. Prints a row a step, with the median of its times. The first step copies.
void time_steps(const std::vector<Step>& steps, int64_t n, const char* type, const char* device,
                int rounds) {
  std::vector<std::vector<float>> times(steps.size());
  std::vector<cudaEvent_t> events(steps.size() + 1);
  for (auto& event : events) need(cudaEventCreate(&event), "cudaEventCreate");
  for (int round = -kWarmUps; round < rounds; ++round) {
    need(cudaEventRecord(events[0], stream), "cudaEventRecord");
    for (size_t i = 0; i < steps.size(); ++i) {
      steps[i].run();
      need(cudaEventRecord(events[i + 1], stream), "cudaEventRecord");
    }
    need(cudaStreamSynchronize(stream), "a kernel");
    for (size_t i = 0; i < steps.size() && round >= 0; ++i) {
      float milliseconds = 0;
      need(cudaEventElapsedTime(&milliseconds, events[i], events[i + 1]), "cudaEventElapsedTime");
      times[i].push_back(milliseconds);
    }
  }
  for (const auto event : events) need(cudaEventDestroy(event), "cudaEventDestroy");
  double copied = 0;  // seconds a byte
  for (size_t i = 0; i < steps.size(); ++i) {
    std::sort(times[i].begin(), times[i].end());
    const double seconds = 1e-3 * times[i][times[i].size() / 2];
    if (i == 0) copied = seconds / steps[0].bytes;
    std::printf(
        "{\"name\": \"%s\", \"device\": \"%s\", \"dtype\": \"%s\", \"n\": %lld, \"k\": %lld, "
        "\"threads\": null, \"seconds\": %.9f, \"limit_seconds\": %.9f, \"bytes\": %.0f, "
        "\"verified\": %s}\n",
        steps[i].name.c_str(), device, type, static_cast<long long>(n),
        static_cast<long long>(steps[i].k), seconds,
        kAllowed * copied * (steps[i].allowed ? steps[i].allowed : steps[i].bytes), steps[i].bytes,
        steps[i].verified ? "true" : "false");
  }
  std::fflush(stdout);
}

Problem timed_problem(int64_t n, Float type, std::mt19937_64& random) {
  Problem p;
  p.n = n;
  p.k = n / 100;
  p.type = type;
  p.seed = random();
  p.wide = make("normal", n, 0, random);
  p.residual = make("normal", n, 0, random);
  narrow_gradient(&p);
  return p;
}

Step copy_step(OnDevice<char>& from, OnDevice<char>& to, int64_t n) {
  return {"copy_16_bytes", 0, 16.0 * n, [&, n] {
            need(cudaMemcpyAsync(to.data(), from.data(), 8 * n, cudaMemcpyDeviceToDevice, stream),
                 "copy");
          }};
}

bool time_selection(Problem p, double density, int rounds, const char* device) {
  p.k = std::max<int64_t>(1, static_cast<int64_t>(p.n * density));
  const int64_t n = p.n;
  const Float type = p.type;
  OnDevice<char> gradient(p.gradient), workspace(select_cuda_workspace(n, p.k)), from(8 * n),
      to(8 * n);
  OnDevice<float> wide(p.wide), added(p.residual), values(p.k);
  OnDevice<int32_t> indices(p.k);
  std::vector<Step> steps = {copy_step(from, to, n)};
  steps.push_back({"residual_add", 0, 12.0 * n, [&] {
                     launch(bare_add, (n + kThreads - 1) / kThreads, stream, wide.data(),
                            added.data(), n);
                   }});
  const double entry = type == Float::float32 ? 4 : 2;
  // A chosen entry: index and value, and its zero in the residual
  const double bytes = (8 + entry) * n + 12.0 * p.k;
  bool good = true;
  std::vector<int32_t> largest;  // as `exact` has them
  std::vector<std::unique_ptr<OnDevice<float>>> residuals;
  for (const Rule rule : {Rule::exact, Rule::mstopk}) {
    p.rule = rule;
    residuals.push_back(std::make_unique<OnDevice<float>>(p.residual));
    float* residual = residuals.back()->data();
    auto selected = [&, rule, residual, seed = p.seed]() mutable {
      Selection s = selection(p, gradient.data(), residual, nullptr, indices.data(), values.data());
      s.rule = rule;
      s.seed = seed++;
      need(select_cuda(s, workspace.data(), stream), "select_cuda");
    };
    selected();
    const Result right = on_cpu(p);
    const bool verified = same({indices.get(), values.get(), residuals.back()->get(), {}}, right);
    good = good && verified;
    if (rule == Rule::exact) largest = right.indices;
    steps.push_back({kRules[static_cast<int>(rule)], p.k, bytes, selected, verified, 16.0 * n});
  }
#ifdef HAVE_CUB_TOPK
  size_t room = 0;
  OnDevice<float> kept(p.residual);
  OnDevice<uint32_t> keys(p.k);
  select_with_cub(wide.data(), kept.data(), n, p.k, nullptr, &room, keys.data(), indices.data(),
                  values.data());
  OnDevice<char> scratch(room);
  const auto cub_topk = [&] {
    select_with_cub(wide.data(), kept.data(), n, p.k, scratch.data(), &room, keys.data(),
                    indices.data(), values.data());
  };
  cub_topk();
  std::vector<int32_t> chosen = indices.get();
  std::sort(chosen.begin(), chosen.end());
  steps.push_back({"cub_topk", p.k, 12.0 * n + 12.0 * p.k, cub_topk, chosen == largest, 16.0 * n});
#endif
  for (Step& step : steps) step.k = p.k;
  time_steps(steps, n, kTypes[static_cast<int>(type)], device, rounds);
  return good;
}

bool time_exchange(Problem p, double density, const WireLayout& kind, int64_t peers, int rounds,
                   const char* device) {
  p.k = std::max<int64_t>(1, static_cast<int64_t>(p.n * density));
  p.rule = Rule::mstopk;
  const int64_t n = p.n;
  Exchange exchange(p, kind, peers);
  exchange.run(stream);
  const bool right = exchange.right();

  OnDevice<char> from(8 * n), to(8 * n);
  const int64_t k = p.k;
  const double buffer = 4.0 * exchange.layout.words();
  std::vector<Step> steps = {copy_step(from, to, n),
                             {"mstopk", k, 12.0 * n + 12.0 * k, [&] { exchange.select(stream); }}};
  if (exchange.layout.coded()) {
    steps.push_back({"round", k, 12.0 * k, [&] { exchange.round(stream); }});
    steps.push_back({"keep", k, 16.0 * k, [&] { exchange.keep(stream); }});
  }
  steps.push_back({"encode", k, 8.0 * k + buffer, [&] { exchange.encode(stream); }});
  steps.push_back({"decode", k, peers * (8.0 * k + buffer), [&] { exchange.decode(stream); }});
  steps.push_back({"merge", k, 4.0 * n + peers * 8.0 * k, [&] { exchange.merge(stream); }});
  for (Step& step : steps) step.verified = right;
  time_steps(steps, n, "float32", device, rounds);
  return right;
}

// The kernels that read whole vectors: 16 bits on a dense route, norms, and LARS, of `count` equal
// vectors. Their results are compared by the cases of check_cuda.cu.
void time_dense(int64_t n, int64_t count, int64_t parts, int rounds, const char* device,
                std::mt19937_64& random) {
  const int64_t each = n / count;
  const std::vector<float> normal = make("normal", n, 0, random);
  OnDevice<char> from(8 * n), to(8 * n);
  OnDevice<float> gradient(normal), weight(normal), momentum(normal), total(n),
      sums(count * chunks_of(each)), squares(count), rates(std::vector<float>(count, 1e-6f));
  OnDevice<uint16_t> written(n * parts);
  const float scale = 1.0f / static_cast<float>(parts);
  std::vector<Vector> vectors;
  std::vector<LarsVector> updated;
  for (int64_t i = 0; i < count; ++i) {
    vectors.push_back({gradient.data() + i * each, each, Float::float32});
    updated.push_back({weight.data() + i * each, momentum.data() + i * each,
                       gradient.data() + i * each, each, 1e-4f});
  }
  const auto write = [&](const Rounding& how) {
    need(dense_write_cuda(how, gradient.data(), total.data(), written.data(), n, stream),
         "dense_write_cuda");
  };
  const auto sum = [&](Float type) {
    need(dense_add_cuda(type, written.data(), parts, 1, total.data(), n, stream), "dense_add_cuda");
  };
  need(cudaMemsetAsync(written.data(), 0, 2 * n * parts, stream), "cudaMemset");
  need(cudaMemsetAsync(total.data(), 0, 4 * n, stream), "cudaMemset");
  const double write_bytes = 14.0 * n, sum_bytes = (2.0 * parts + 4) * n;
  time_steps({copy_step(from, to, n),
              {"dense_write_float16", 0, write_bytes, [&] { write({Float::float16, scale, 1}); }},
              {"dense_write_bfloat16", 0, write_bytes, [&] { write({Float::bfloat16, 1, 1}); }},
              {"dense_add_float16", 0, sum_bytes, [&] { sum(Float::float16); }},
              {"dense_add_bfloat16", 0, sum_bytes, [&] { sum(Float::bfloat16); }},
              {"norms", 0, 4.0 * n,
               [&] {
                 need(norms_cuda(vectors.data(), count, sums.data(), squares.data(), stream),
                      "norms_cuda");
               }},
              {"lars", 0, 20.0 * n,
               [&] {
                 need(lars_cuda(updated.data(), rates.data(), count, {0.9f, false}, stream),
                      "lars_cuda");
               }}},
             n, "float32", device, rounds);
}

// A vector in codes: written, one shard of it added as `parts` ranks wrote it, and all read. The
// results are compared by the cases of check_cuda.cu.
void time_low_bits(int64_t n, int64_t parts, int rounds, const char* device,
                   std::mt19937_64& random) {
  OnDevice<char> from(8 * n), to(8 * n);
  OnDevice<float> gradient(make("normal", n, 0, random)), residual(n), total(n);
  need(cudaMemsetAsync(residual.data(), 0, 4 * n, stream), "cudaMemset");
  std::vector<Step> steps = {copy_step(from, to, n)};
  std::vector<std::unique_ptr<OnDevice<int32_t>>> all;
  for (const int bits : {8, 4, 2, 1}) {
    const LowBits layout{bits, n / parts};
    all.push_back(std::make_unique<OnDevice<int32_t>>(parts * layout.words()));
    all.push_back(std::make_unique<OnDevice<int32_t>>(layout.words()));
    int32_t *const words = all[all.size() - 2]->data(), *const sum = all.back()->data();
    const double entries = static_cast<double>(layout.entries * parts),
                 bytes = 4.0 * static_cast<double>(layout.words());
    const std::string width = std::to_string(bits);
    steps.push_back(
        {"low_bits_write_" + width, 0, 12 * entries + parts * bytes, [=, &gradient, &residual] {
           need(low_bits_write_cuda(layout, parts, gradient.data(), residual.data(),
                                    layout.entries * parts, words, stream),
                "low_bits_write_cuda");
         }});
    steps.push_back(
        {"low_bits_add_" + width, 0, 8 * entries / parts + (parts + 1) * bytes, [=, &residual] {
           need(low_bits_add_cuda(layout, parts, words, residual.data(), layout.entries, sum,
                                  stream),
                "low_bits_add_cuda");
         }});
    steps.push_back({"low_bits_read_" + width, 0, 4 * entries + parts * bytes, [=, &total] {
                       need(low_bits_read_cuda(layout, parts, words, 1, total.data(), stream),
                            "low_bits_read_cuda");
                     }});
  }
  time_steps(steps, n, "float32", device, rounds);
}

}  // namespace
