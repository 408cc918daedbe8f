// Times selection on a GPU, in turns with a copy, the bare addition and CUB's top k. Included once,
// by scripts/verify/check_cuda.cu, which says what is claimed and printed.
#pragma once

#include "check_cuda.h"

#if defined(__CUDACC__) && __has_include(<cub/device/device_topk.cuh>)  // from CCCL 3.2 on
#define HAVE_CUB_TOPK
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <cub/device/device_topk.cuh>
#endif

#include "kernels/select_scan.h"

namespace {

constexpr double kAllowed = 1.25;  // times the copy
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

bool time_selection(int64_t n, double density, Float type, int rounds, const char* device,
                    std::mt19937_64& random) {
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
    Selection s =
        selection(p, gradient.data(), residual.data(), nullptr, indices.data(), values.data());
    need(select_cuda(s, workspace.data(), stream), "select_cuda");
    const Result right = expected(p);
    const bool verified = same({indices.get(), values.get(), residual.get(), {}}, right);
    good = good && verified;
    std::vector<const char*> names = {"copy_16_bytes", "residual_add",
                                      kRules[static_cast<int>(rule)]};
    std::vector<std::function<void()>> steps = {
        [&] {
          need(cudaMemcpyAsync(to.data(), from.data(), 8 * n, cudaMemcpyDeviceToDevice, stream),
               "copy");
        },
        [&] {
          launch(bare_add, (n + kThreads - 1) / kThreads, stream, wide.data(), added.data(), n);
        },
        [&] { need(select_cuda(s, workspace.data(), stream), "select_cuda"); }};
    std::vector<bool> right_ones = {true, true, verified};
#ifdef HAVE_CUB_TOPK
    size_t bytes = 0;
    OnDevice<float> kept(p.residual);
    OnDevice<uint32_t> keys(p.k);
    select_with_cub(wide.data(), kept.data(), n, p.k, nullptr, &bytes, keys.data(), indices.data(),
                    values.data());
    OnDevice<char> scratch(bytes);
    const auto cub_topk = [&] {
      select_with_cub(wide.data(), kept.data(), n, p.k, scratch.data(), &bytes, keys.data(),
                      indices.data(), values.data());
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
      std::printf(
          "{\"name\": \"%s\", \"device\": \"%s\", \"dtype\": \"%s\", \"n\": %lld, \"k\": %lld, "
          "\"threads\": null, "
          "\"seconds\": %.9f, \"limit_seconds\": %.9f, \"verified\": %s}\n",
          names[j], device, kTypes[static_cast<int>(type)], static_cast<long long>(n),
          static_cast<long long>(p.k), median(j), kAllowed * median(0),
          right_ones[j] ? "true" : "false");
    }
    first = false;
  }
  return good;
}

}  // namespace
