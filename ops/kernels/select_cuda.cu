// Selection on GPUs. Compiled by nvcc, and run on CPUs by tests/cuda_on_cpu; no GPU has run it yet.
//
//   sample  a sample of the magnitudes gives a key that a little more than k entries should reach:
//           the candidates
//   add     the only pass over everything: r += g; marks the candidates, one bit each, and counts
//           them in bins
//   narrow  count the candidates of the band in bins, go to the bin in which the k-th largest lies;
//           returns at once if that is done already. If the sample misled, all entries are
//           candidates
//   tally   the entries above the band and in it, for each warp's share; their running sums say
//           where each warp will write
//   emit    write what is above the band, and from the band the rest of k; zero them in r
//
// A warp takes a strip of 1024 entries at a time. While adding, its lanes hold neighbours, so that
// memory is read in whole lines at any alignment and a ballot makes 32 marks in the order of the
// entries; later each lane walks over the marks of one word. In a strip with entries that are not
// finite the bits mark these instead, and all its entries are candidates: r cannot tell them apart,
// because it keeps its old value there. What a kernel's last block does follows all that the others
// have written, so no decision needs the host. The result depends on no order: sums of integers
// only, and positions from running sums. What the kernels share is in select_band_cuda.h.
#include <cmath>

#include "kernels/cuda.h"
#include "kernels/random.h"
#include "kernels/select.h"
#include "kernels/select_band_cuda.h"
#include "kernels/select_scan.h"

namespace tfcommx {
namespace {

constexpr int kBlocksPerProcessor = 8;
constexpr int kMostBlocks = 2048;
constexpr int kBatch = 8;                      // entries of a lane that are on their way together
constexpr int64_t kRun = 8, kMostRuns = 4096;  // of neighbours in the sample

// One entry is drawn by each thread; the neighbours of a run lie in one stretch of memory, which
// costs as much as one entry.
// rank: of the drawn key that becomes the threshold, from the top; runs = 0: none, all entries are
// candidates.
template <class T>
__global__ void __launch_bounds__(kThreads) sample(Job<T> job, int64_t runs, uint32_t rank) {
  __shared__ uint32_t bins[kBins];
  uint32_t* keys = job.marks;  // not needed yet
  clear(bins);
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < runs * kRun;
       i += gridDim.x * kThreads) {
    const int64_t run = i / kRun, stretch = job.s.n / kRun / runs;
    const uint32_t key =
        key_of(sum_at(job, (run * stretch + below(job.s.seed + run, stretch)) * kRun + i % kRun));
    keys[i] = key < kNotFinite ? key : 0;
    atomicAdd(&bins[keys[i] >> kCoarseShift], 1u);
  }
  collect(bins, job.bins);
  if (!last_block(job.state)) return;

  const Bin coarse = find(job.bins, rank);
  clear(job.bins);
  uint32_t lower = 0;
  if (coarse.position < kBins) {
    clear(bins);
    for (int64_t i = threadIdx.x; i < runs * kRun; i += kThreads)
      if (keys[i] >> kCoarseShift == coarse.position)
        atomicAdd(&bins[keys[i] >> (kCoarseShift - kBandShift) & (kBins - 1)], 1u);
    __syncthreads();
    lower = coarse.position << kCoarseShift | find(bins, rank - coarse.above).position
                                                  << (kCoarseShift - kBandShift);
    lower = lower >> kBandShift << kBandShift;  // mstopk's band must be marked whole
  }
  if (threadIdx.x == 0)
    *job.state = {lower, kEnd, 0, static_cast<uint32_t>(job.s.k), kBandShift, false, 0};
}

template <class T, bool kResidual, bool kVelocity>
__global__ void __launch_bounds__(kThreads) add_and_mark(Job<T> job) {
  __shared__ uint32_t bins[kBins];
  clear(bins);
  const Selection& s = job.s;
  const uint32_t lower = job.state->lower;
  for (int64_t strip = warp(); strip < job.strips; strip += warps()) {
    const int64_t base = strip * kStrip;
    const int length = static_cast<int>(base + kStrip <= s.n ? kStrip : s.n - base);
    const T* gradients = static_cast<const T*>(s.gradient) + base;
    float *residuals = s.residual + base, *velocities = s.velocity + base;
    uint32_t mark = 0, bad = 0;  // this lane's words
#pragma unroll 1
    for (int word = 0; word < 32; word += kBatch) {
      T gradient[kBatch];
      float residual[kBatch] = {}, velocity[kBatch] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int position = (word + j) * 32 + lane();
        // A branch would keep the loads from being under way together.
        const int i = position < length ? position : length - 1;
        gradient[j] = gradients[i];
        if (kResidual && position < length) residual[j] = residuals[i];
        if (kVelocity && position < length) velocity[j] = velocities[i];
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int position = (word + j) * 32 + lane();
        const Sum total =
            sum(kResidual, kVelocity, s.momentum, widen(gradient[j]), residual[j], velocity[j]);
        const uint32_t key = key_of(total.acc);  // of a velocity that is not finite, neither is acc
        const bool within = position < length;
        if (within && key < kNotFinite) {
          if (kResidual) residuals[position] = total.acc;
          if (kVelocity) velocities[position] = total.velocity;
        }
        const bool candidate = within && key >= lower;
        const uint32_t candidates = __ballot_sync(kAllLanes, candidate);
        if (candidates == 0) continue;
        if (candidate) atomicAdd(&bins[bin_of(key, lower, kBandShift)], 1u);
        const uint32_t not_finite = __ballot_sync(kAllLanes, within && key >= kNotFinite);
        if (lane() == word + j) {
          mark = candidates;
          bad = not_finite;
        }
      }
    }
    const bool flag = __any_sync(kAllLanes, bad != 0);
    job.marks[strip * 32 + lane()] = flag ? bad : mark;
    if (lane() == 0) job.flags[strip] = flag;
  }
  if (s.k == 0) return;
  collect(bins, job.bins);
  if (last_block(job.state)) descend(job);
}

// Calls body(index, key, value) for the candidates among this lane's 32 entries of the strip,
// ascending (perhaps for some that are none too). The key of what is not finite is kNotFinite.
template <class T, class Body>
__device__ void visit(const Job<T>& job, bool all, int64_t strip, const Body& body) {
  const Selection& s = job.s;
  const int64_t first = strip * kStrip + lane() * 32;
  const uint32_t bits = job.marks[strip * 32 + lane()], bad = job.flags[strip] ? bits : 0;
  uint32_t rest = bits;
  if (all || job.flags[strip])
    rest = first + 32 <= s.n ? kAllLanes : first < s.n ? (1u << (s.n - first)) - 1 : 0;
  for (; rest; rest &= rest - 1) {
    const int position = __ffs(static_cast<int>(rest)) - 1;
    const int64_t i = first + position;
    if (bad >> position & 1) {
      body(i, kNotFinite, sum_at(job, i));
    } else {
      const float value = s.residual ? s.residual[i] : s.velocity ? s.velocity[i] : job.gradient(i);
      body(i, key_of(value), value);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) narrow(Job<T> job) {
  const State state = *job.state;
  if (state.shift == kFound) return;
  __shared__ uint32_t bins[kBins];
  clear(bins);
  for (int64_t strip = warp(); strip < job.strips; strip += warps()) {
    visit(job, state.all, strip, [&](int64_t, uint32_t key, float) {
      if (key >= state.lower && key < state.upper)
        atomicAdd(&bins[bin_of(key, state.lower, state.shift)], 1u);
    });
  }
  collect(bins, job.bins);
  if (last_block(job.state)) descend(job);
}

// Calls body(strip) for this warp's share of the strips: neighbours, in order.
template <class T, class Body>
__device__ void each_strip_of_warp(const Job<T>& job, const Body& body) {
  const int64_t end = job.strips * (warp() + 1) / warps();
  for (int64_t strip = job.strips * warp() / warps(); strip < end; ++strip) body(strip);
}

__device__ uint64_t above_or_inside(const State& state, uint32_t key) {
  return key >= state.upper ? uint64_t{1} << 32 : key >= state.lower;
}

template <class T>
__global__ void __launch_bounds__(kThreads) tally(Job<T> job) {
  const State state = *job.state;
  uint64_t mine = 0;
  each_strip_of_warp(job, [&](int64_t strip) {
    visit(job, state.all, strip,
          [&](int64_t, uint32_t key, float) { mine += above_or_inside(state, key); });
  });
  mine = inclusive_sum_of_warp(mine);
  if (lane() == 31) job.tallies[warp()] = mine;
  if (!last_block(job.state)) return;

  const int64_t share = (warps() + kThreads - 1) / kThreads, first = threadIdx.x * share;
  const int64_t end = first + share < warps() ? first + share : warps();
  uint64_t total = 0;
  for (int64_t i = first; i < end; ++i) total += job.tallies[i];
  uint64_t before = exclusive_sum_of_block(total);
  for (int64_t i = first; i < end; ++i) {
    const uint64_t own = job.tallies[i];
    job.tallies[i] = before;
    before += own;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) emit(Job<T> job) {
  const Selection& s = job.s;
  const State state = *job.state;
  const bool window = s.rule == Rule::mstopk && state.lower < kNotFinite;
  const uint32_t first = window
                             ? static_cast<uint32_t>(below(s.seed, state.inside - state.need + 1))
                             : 0,
                 end = first + state.need;
  uint64_t before = job.tallies[warp()];
  each_strip_of_warp(job, [&](int64_t strip) {
    uint64_t mine = 0;
    visit(job, state.all, strip,
          [&](int64_t, uint32_t key, float) { mine += above_or_inside(state, key); });
    const uint64_t up_to_here = inclusive_sum_of_warp(mine);
    uint64_t next = before + up_to_here - mine;
    visit(job, state.all, strip, [&](int64_t i, uint32_t key, float value) {
      const uint64_t kind = above_or_inside(state, key);
      const uint32_t above = static_cast<uint32_t>(next >> 32),
                     inside = static_cast<uint32_t>(next);
      next += kind;
      if (kind == 0 || (kind == 1 && (inside < first || inside >= end))) return;
      const uint32_t from_band = inside < first ? 0 : (inside < end ? inside : end) - first;
      s.indices[above + from_band] = static_cast<int32_t>(i);
      s.values[above + from_band] = value;
      if (key >= kNotFinite) return;
      if (s.residual) s.residual[i] = 0.0f;
      if (s.velocity) s.velocity[i] = 0.0f;
    });
    before += __shfl_sync(kAllLanes, up_to_here, 31);
  });
}

constexpr int64_t kBinsAt = 128;  // bytes, the state before it
constexpr int64_t kTalliesAt = kBinsAt + 4 * kBins;
constexpr int64_t kMarksAt = kTalliesAt + 8 * kMostBlocks * kWarps;

int64_t strips(int64_t n) { return (n + kStrip - 1) / kStrip; }

int64_t blocks(int64_t n) {
  int device = 0, processors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t most = processors * kBlocksPerProcessor < kMostBlocks
                           ? processors * kBlocksPerProcessor
                           : kMostBlocks;
  const int64_t enough = (strips(n) + kWarps - 1) / kWarps;
  return enough < most ? enough : most;
}

template <class T>
const char* run(const Selection& s, char* workspace, cudaStream_t stream) {
  const Job<T> job{s,
                   strips(s.n),
                   reinterpret_cast<State*>(workspace),
                   reinterpret_cast<uint32_t*>(workspace + kBinsAt),
                   reinterpret_cast<uint64_t*>(workspace + kTalliesAt),
                   reinterpret_cast<uint32_t*>(workspace + kMarksAt),
                   reinterpret_cast<uint8_t*>(workspace + kMarksAt + 128 * strips(s.n))};
  // The margin is three standard deviations of the number of drawn entries that reach the
  // threshold, as on CPUs.
  int64_t runs = s.n / (32 * kRun) < kMostRuns ? s.n / (32 * kRun) : kMostRuns;
  const double expected = static_cast<double>(runs * kRun) * s.k / s.n;
  const int64_t rank = static_cast<int64_t>(expected + 3 * std::sqrt(expected) + 4);
  if (rank > runs * kRun) runs = 0;

  cudaMemsetAsync(workspace, 0, kTalliesAt, stream);
  launch(sample<T>, runs * kRun / kThreads + 1, stream, job, runs, static_cast<uint32_t>(rank));
  launch(s.velocity ? (s.residual ? add_and_mark<T, true, true> : add_and_mark<T, false, true>)
                    : (s.residual ? add_and_mark<T, true, false> : add_and_mark<T, false, false>),
         blocks(s.n), stream, job);
  if (s.k == 0) return launch_error();
  for (int level = s.rule == Rule::exact ? 3 : 2; level > 0; --level)
    launch(narrow<T>, blocks(s.n), stream, job);
  launch(tally<T>, blocks(s.n), stream, job);
  launch(emit<T>, blocks(s.n), stream, job);
  return launch_error();
}

}  // namespace

int64_t select_cuda_workspace(int64_t n) { return kMarksAt + 129 * strips(n); }

const char* select_cuda(const Selection& s, void* workspace, CUstream_st* stream) {
  if (s.n == 0) return nullptr;
  switch (s.type) {
    case Float::float32:
      return run<float>(s, static_cast<char*>(workspace), stream);
    case Float::float16:
      return run<Half>(s, static_cast<char*>(workspace), stream);
    case Float::bfloat16:
      return run<Bfloat>(s, static_cast<char*>(workspace), stream);
  }
  return "unknown gradient type";
}

const char* copy_cuda(void* to, const void* from, int64_t bytes, CUstream_st* stream) {
  cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  return launch_error();
}

}  // namespace tfcommx
