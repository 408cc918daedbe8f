// Small kernels with and without mistakes: what the race checker must report, and what not. Each is
// run by its name; tests/kernels/test_cuda_race.py says what is expected of it.
#include <cuda_runtime.h>

#include <functional>
#include <map>
#include <string>

namespace {

constexpr unsigned kAll = 0xffffffffu, kLow = 0xffffu;

// Each lane hands its number to the next through shared memory.
enum class Order { none, shuffle, syncwarp, half_warps, syncthreads };

template <Order order>
__global__ void rotate(unsigned* result) {
  __shared__ unsigned values[64];
  const unsigned lane = threadIdx.x % 32, first = threadIdx.x - lane;
  values[threadIdx.x] = threadIdx.x;
  if (order == Order::shuffle) __shfl_sync(kAll, 1u, 0);
  if (order == Order::syncwarp) __syncwarp();
  if (order == Order::half_warps) {
    if (lane < 16) {
      __syncwarp(kLow);
    } else {
      __syncwarp(kAll ^ kLow);
    }
  }
  if (order == Order::syncthreads) __syncthreads();
  const unsigned next =
      order == Order::half_warps ? (lane + 1) % 16 + lane / 16 * 16 : (lane + 1) % 32;
  result[threadIdx.x] = values[first + next];
}

// The same between warps, which __syncwarp does not order.
template <bool whole_block>
__global__ void between_warps(unsigned* result) {
  __shared__ unsigned values[64];
  values[threadIdx.x] = threadIdx.x;
  if (whole_block) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  result[threadIdx.x] = values[(threadIdx.x + 32) % 64];
}

// The last block adds what the others have written. `fence`: of the lane that counts the block, after
// a __syncwarp with the lanes that wrote.
template <bool fence_before, bool fence_after, bool sync>
__global__ void last_block_adds(unsigned* parts, unsigned* done, unsigned* total) {
  __shared__ bool last;
  if (threadIdx.x < 32) {
    parts[blockIdx.x * 32 + threadIdx.x] = threadIdx.x;
    if (sync) __syncwarp();
    if (threadIdx.x == 0) {
      if (fence_before) __threadfence();
      last = atomicAdd(done, 1u) == gridDim.x - 1;
      if (fence_after) __threadfence();
    }
  }
  __syncthreads();
  if (!last || threadIdx.x) return;
  unsigned sum = 0;
  for (unsigned i = 0; i < gridDim.x * 32; ++i) sum += parts[i];
  *total = sum;
}

// A block learns of another through a third one.
__global__ void in_turn(unsigned* values, unsigned* flags) {
  if (threadIdx.x) return;
  const unsigned turn = atomicAdd(&flags[0], 1u);
  __threadfence();
  unsigned sum = 0;
  for (unsigned i = 0; i < turn; ++i) sum += values[i];
  values[turn] = sum + 1;
  __threadfence();
  atomicAdd(&flags[0], 0u);
}

__global__ void outside(unsigned* result) { result[threadIdx.x + 1] = 1; }

__global__ void not_written(unsigned* result) {
  __shared__ unsigned values[64];
  if (threadIdx.x != 5) values[threadIdx.x] = 1;
  __syncthreads();
  result[threadIdx.x] = values[threadIdx.x];
}

__global__ void misaligned(unsigned* result) {
  unsigned* off = reinterpret_cast<unsigned*>(reinterpret_cast<char*>(result) + 2);
  if (threadIdx.x == 0) *off = 1;
}

__global__ void neighbours_of_a_word(unsigned* result) {
  reinterpret_cast<uint16_t*>(result)[threadIdx.x] = 1;
}

__global__ void same_word(unsigned* result) {
  if (threadIdx.x == 1) *result = 1;
  if (threadIdx.x == 2) reinterpret_cast<uint16_t*>(result)[1] = 1;
}

__global__ void different_intrinsics(unsigned* result) {
  unsigned value;
  if (threadIdx.x % 2) {
    value = __shfl_sync(kAll, threadIdx.x, 0);
  } else {
    value = __ballot_sync(kAll, true);
  }
  result[threadIdx.x] = value;
}

__global__ void barrier_of_some(unsigned* result) {
  if (threadIdx.x < 40) __syncthreads();
  result[threadIdx.x] = 1;
}

}  // namespace

int main(int count, char** words) {
  const std::string name = count > 1 ? words[1] : "";
  const int64_t blocks = 5;
  unsigned *result, *counts, *total;
  cudaMalloc(&result, 4 * 64 * blocks);
  cudaMalloc(&counts, 4);
  cudaMalloc(&total, 4);
  cudaMemsetAsync(counts, 0, 4, nullptr);
  std::map<std::string, std::function<void()>> all;
  const auto one = [&](const std::string& of, int64_t grid, int64_t bytes,
                       void (*kernel)(unsigned*)) {
    all[of] = [=] {
      unsigned* exact;
      cudaMalloc(&exact, bytes);
      cuda_on_cpu::launch(grid, 64, nullptr, [=] { kernel(exact); });
    };
  };
  one("no order", 1, 256, rotate<Order::none>);
  one("shuffle", 1, 256, rotate<Order::shuffle>);
  one("syncwarp", 1, 256, rotate<Order::syncwarp>);
  one("syncwarp of half warps", 1, 256, rotate<Order::half_warps>);
  one("syncthreads", 1, 256, rotate<Order::syncthreads>);
  one("syncwarp between warps", 1, 256, between_warps<false>);
  one("syncthreads between warps", 1, 256, between_warps<true>);
  one("outside", 1, 256, outside);
  one("two blocks", 2, 256, rotate<Order::syncthreads>);
  one("not written", 1, 256, not_written);
  one("misaligned", 1, 256, misaligned);
  one("neighbours of a word", 1, 256, neighbours_of_a_word);
  one("same word", 1, 256, same_word);
  one("different intrinsics", 1, 256, different_intrinsics);
  one("barrier of some", 1, 256, barrier_of_some);
  const auto last = [&](const std::string& of, void (*kernel)(unsigned*, unsigned*, unsigned*)) {
    all[of] = [=] {
      cuda_on_cpu::launch(blocks, 64, nullptr, [=] { kernel(result, counts, total); });
    };
  };
  last("last block", last_block_adds<true, true, true>);
  last("last block without fence before", last_block_adds<false, true, true>);
  last("last block without fence after", last_block_adds<true, false, true>);
  last("last block without syncwarp", last_block_adds<true, true, false>);
  all["in turn"] = [=] {
    cuda_on_cpu::launch(blocks, 64, nullptr, [=] { in_turn(result, counts); });
  };
  const auto found = all.find(name);
  if (found == all.end()) return 2;
  found->second();
  return 0;
}
