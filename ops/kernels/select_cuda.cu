// Selection on GPUs. Compiled by nvcc, and run on CPUs by tests/cuda_on_cpu.
//
//   sample  a sample of the magnitudes gives a key that a little more than k entries should reach:
//           the candidates
//   add     the only pass over everything: r += g, but 0 where an entry is a candidate, which goes
//           to its strip's list; counts the candidates in bins
//   narrow  count the candidates of the band in bins, go to the bin in which the k-th largest lies;
//           returns at once if that is done already. If the sample misled, all entries are
//           candidates
//   tally   the entries above the band and in it, for each warp's share; their running sums say
//           where each warp will write
//   emit    write what is above the band, and from the band the rest of k; put the other candidates
//           back into r
//
// A warp takes a strip of 1024 entries at a time, whose neighbours its lanes hold, so that memory
// is read in whole lines at any alignment and a ballot says where each candidate goes in the list.
// Because nearly all candidates are chosen, nearly no entry of r is written twice. A strip with
// more candidates than its list holds has none: r keeps its entries, and later passes read it
// whole. What is not finite is always a candidate; r keeps its old value there, so such a strip
// marks these entries by bits in the place of the list. What a kernel's last block does follows all
// that the others have written, so no decision needs the host. The result depends on no order: sums
// of integers only, and positions from running sums. What the kernels share is in
// select_band_cuda.h.
#include <cmath>

#include "kernels/cuda.h"
#include "kernels/random.h"
#include "kernels/select.h"
#include "kernels/select_band_cuda.h"
#include "kernels/select_scan.h"
#include "kernels/wire_float.h"

namespace tfcommx {
namespace {

// Blocks for each processor: as many as are resident, and few where most launches have nothing to do.
constexpr int kReadingBlocks = 8, kAddingBlocks = 4, kNarrowingBlocks = 2;
constexpr int kMostBlocks = 2048;
// Without a bound ptxas takes so few registers for some processors that kernels spill
constexpr int kFewBlocks = resident(5);
constexpr int kBatch = 8;                      // entries of a lane that are on their way together
constexpr int kTogether = 32;                  // of the sample's keys
constexpr int64_t kRun = 8, kMostRuns = 4096;  // of neighbours in the sample

__device__ uint32_t lanes_before() { return (1u << lane()) - 1; }

// One entry is drawn by each thread; the neighbours of a run lie in one stretch of memory, which
// costs as much as one entry.
// rank: of the drawn key that becomes the threshold, from the top; runs = 0: none, all entries are
// candidates.
template <class T>
__global__ void __launch_bounds__(kThreads) sample(Job<T> job, int64_t runs, uint32_t rank) {
  __shared__ uint32_t bins[kBins];
  uint32_t* keys = reinterpret_cast<uint32_t*>(job.values);  // not needed yet
  let_next_kernel_wait();
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
  if (!last_block(job.blocks_done)) return;

  take(job.bins, bins);
  const Bin coarse = find(bins, rank);
  uint32_t lower = 0;
  if (coarse.position < kBins) {
    clear(bins);
    // One load at a time would wait 128 times for the second cache
    constexpr uint32_t kNoKey = 0xffffffffu;
    for (int64_t first = threadIdx.x; first < runs * kRun; first += kThreads * kTogether) {
      uint32_t some[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int64_t i = first + j * kThreads;
        some[j] = i < runs * kRun ? keys[i] : kNoKey;
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        if (some[j] >> kCoarseShift == coarse.position)
          atomicAdd(&bins[some[j] >> (kCoarseShift - kBandShift) & (kBins - 1)], 1u);
    }
    __syncthreads();
    lower = coarse.position << kCoarseShift | find(bins, rank - coarse.above).position
                                                  << (kCoarseShift - kBandShift);
    lower = lower >> kBandShift << kBandShift;  // mstopk's band must be marked whole
  }
  if (threadIdx.x == 0)
    *job.state = {lower, kEnd, 0, static_cast<uint32_t>(job.s.k), kBandShift, false};
}

// A strip's entries go back to r from its list, and bits in its place mark those that are not
// finite: one word by each lane. All lanes of the warp must call it.
template <class T>
__device__ void put_back(const Job<T>& job, int64_t strip, uint32_t not_finite, uint32_t count) {
  float* listed = job.values + strip * job.room;
  const uint16_t* positions = job.positions + strip * job.room;
  __syncwarp();
  if (job.s.residual)
    for (uint32_t j = lane(); j < count; j += 32)
      if (key_of(listed[j]) < kNotFinite) job.s.residual[strip * kStrip + positions[j]] = listed[j];
  listed[lane()] = float_of(not_finite);  // read by no other lane
  if (lane() == 0) job.counts[strip] = kWhole;
  __syncwarp();  // `narrow` reads what other lanes have put back
}

template <class T, bool kResidual, bool kVelocity>
__global__ void __launch_bounds__(kThreads, resident(kAddingBlocks)) add_and_list(Job<T> job) {
  __shared__ uint32_t bins[kBins];
  let_next_kernel_wait();
  clear(bins);
  wait_for_previous_kernel();
  const Selection& s = job.s;
  const uint32_t lower = s.k ? job.state->lower : kEnd, room = static_cast<uint32_t>(job.room);
  uint32_t farther = 0;  // candidates beyond the near bins, by far the most if k is large
  for (int64_t strip = warp(); strip < job.strips; strip += warps()) {
    const int64_t base = strip * kStrip;
    const int length = static_cast<int>(base + kStrip <= s.n ? kStrip : s.n - base);
    const T* gradients = static_cast<const T*>(s.gradient) + base;
    float *residuals = s.residual + base, *velocities = s.velocity + base;
    float* listed = job.values + strip * room;
    uint16_t* positions = job.positions + strip * room;
    uint32_t count = 0, bad = 0;  // candidates so far; this lane's word
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
        const bool within = position < length, candidate = within && key >= lower;
        const uint32_t candidates = __ballot_sync(kAllLanes, candidate);
        float left = total.acc;
        if (candidates) {
          const uint32_t place = count + ones(candidates & lanes_before());
          if (candidate && place < room) {
            listed[place] = total.acc;
            positions[place] = static_cast<uint16_t>(position);
            left = 0;
          }
          count += ones(candidates);
          const uint32_t bin = bin_of(key, lower, kBandShift);
          farther += candidate && bin >= job.near;
          if (candidate && bin < job.near) atomicAdd(&bins[bin], 1u);
          const uint32_t not_finite = __ballot_sync(kAllLanes, within && key >= kNotFinite);
          if (lane() == word + j) bad = not_finite;
        }
        if (within && key < kNotFinite) {
          if (kResidual) residuals[position] = left;
          if (kVelocity) velocities[position] = total.velocity;
        }
      }
    }
    if (count > room) {
      put_back(job, strip, bad, room);
    } else if (lane() == 0) {
      job.counts[strip] = count;
    }
  }
  if (s.k == 0) return;
  if (farther) atomicAdd(&bins[kBins - 1], farther);
  collect(bins, job.bins);
  if (last_block(job.blocks_done)) descend(job, bins);
}

// An entry of a strip; key: kNotFinite if it is not finite.
struct Entry {
  int64_t index;
  uint32_t key;
  float value;
  bool present;  // or else this lane has none
};

// Calls body(entry) for the candidates of a strip (and, if it is read whole, for others too), 32 at
// a time, ascending. count: job.counts[strip]. All lanes of the warp must call it.
template <class T, class Body>
__device__ void visit(const Job<T>& job, int64_t strip, uint32_t count, const Body& body) {
  const Selection& s = job.s;
  const int64_t base = strip * kStrip;
  const float* listed = job.values + strip * job.room;
  if (count != kWhole) {
    const uint16_t* positions = job.positions + strip * job.room;
    for (uint32_t first = 0; first < count; first += 32) {
      const uint32_t j = first + lane();
      const bool present = j < count;
      const float value = present ? listed[j] : 0.0f;
      const uint32_t key = key_of(value);
      body(Entry{base + (present ? positions[j] : 0), key < kNotFinite ? key : kNotFinite, value,
                 present});
    }
    return;
  }
  const uint32_t bad = bits_of(listed[lane()]);
  for (int word = 0; word < 32; ++word) {
    const int64_t i = base + word * 32 + lane();
    const bool present = i < s.n, not_finite = __shfl_sync(kAllLanes, bad, word) >> lane() & 1;
    const float value = !present     ? 0.0f
                        : not_finite ? sum_at(job, i)
                        : s.residual ? s.residual[i]
                        : s.velocity ? s.velocity[i]
                                     : job.gradient(i);
    body(Entry{i, not_finite ? kNotFinite : key_of(value), value, present});
  }
}

// The bits of a strip's entries that are not finite, from its list: this lane's word.
template <class T>
__device__ uint32_t not_finite_in_list(const Job<T>& job, int64_t strip, uint32_t count) {
  uint32_t bits = 0;
  for (uint32_t j = 0; j < count; ++j) {
    const uint32_t position = job.positions[strip * job.room + j];
    const bool bad = key_of(job.values[strip * job.room + j]) >= kNotFinite;
    if (bad && static_cast<int>(position / 32) == lane()) bits |= 1u << position % 32;
  }
  return bits;
}

template <class T>
__global__ void __launch_bounds__(kThreads, kFewBlocks) narrow(Job<T> job) {
  let_next_kernel_wait();
  wait_for_previous_kernel();
  const State state = *job.state;
  if (state.shift == kFound) return;
  __shared__ uint32_t bins[kBins];
  clear(bins);
  for (int64_t strip = warp(); strip < job.strips; strip += warps()) {
    uint32_t count = job.counts[strip];
    if (state.all && count != kWhole) {
      put_back(job, strip, not_finite_in_list(job, strip, count), count);
      count = kWhole;
    }
    visit(job, strip, count, [&](const Entry& entry) {
      if (entry.present && entry.key >= state.lower && entry.key < state.upper)
        atomicAdd(&bins[bin_of(entry.key, state.lower, state.shift)], 1u);
    });
  }
  collect(bins, job.bins);
  if (last_block(job.blocks_done)) descend(job, bins);
}

// Calls body(strip, its count) for this warp's share of the strips: neighbours, in order. Lanes read
// the counts side by side.
template <class T, class Body>
__device__ void each_strip_of_warp(const Job<T>& job, const Body& body) {
  const int64_t end = job.strips * (warp() + 1) / warps();
  for (int64_t first = job.strips * warp() / warps(); first < end; first += 32) {
    const uint32_t mine = first + lane() < end ? job.counts[first + lane()] : 0;
    for (int64_t strip = first; strip < end && strip < first + 32; ++strip)
      body(strip, __shfl_sync(kAllLanes, mine, static_cast<unsigned>(strip - first)));
  }
}

__device__ bool is_above(const State& state, const Entry& entry) {
  return entry.present && entry.key >= state.upper;
}

__device__ bool is_inside(const State& state, const Entry& entry) {
  return entry.present && entry.key >= state.lower && entry.key < state.upper;
}

template <class T>
__global__ void __launch_bounds__(kThreads, kFewBlocks) tally(Job<T> job) {
  let_next_kernel_wait();
  wait_for_previous_kernel();
  const State state = *job.state;
  uint64_t mine = 0;
  each_strip_of_warp(job, [&](int64_t strip, uint32_t count) {
    visit(job, strip, count, [&](const Entry& entry) {
      mine += static_cast<uint64_t>(is_above(state, entry)) << 32 | is_inside(state, entry);
    });
  });
  const uint64_t before = exclusive_sum_of_block(mine);
  if (lane() == 0) job.warp_tallies[warp()] = before;
  if (threadIdx.x == kThreads - 1) job.block_tallies[blockIdx.x] = before + mine;
  if (!last_block(job.blocks_done)) return;

  const uint32_t share = (gridDim.x + kThreads - 1) / kThreads, first = threadIdx.x * share;
  uint64_t own[kMostBlocks / kThreads] = {}, total = 0;
#pragma unroll
  for (uint32_t i = 0; i < kMostBlocks / kThreads; ++i) {
    if (i < share && first + i < gridDim.x) own[i] = job.block_tallies[first + i];
    total += own[i];
  }
  uint64_t running = exclusive_sum_of_block(total);
#pragma unroll
  for (uint32_t i = 0; i < kMostBlocks / kThreads; ++i) {
    if (i < share && first + i < gridDim.x) job.block_tallies[first + i] = running;
    running += own[i];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) emit(Job<T> job) {
  wait_for_previous_kernel();
  const Selection& s = job.s;
  const State state = *job.state;
  const bool window = s.rule == Rule::mstopk && state.lower < kNotFinite;
  const uint32_t first = window
                             ? static_cast<uint32_t>(below(s.seed, state.inside - state.need + 1))
                             : 0,
                 end = first + state.need;
  const uint64_t before = job.block_tallies[blockIdx.x] + job.warp_tallies[warp()];
  uint32_t above_before = static_cast<uint32_t>(before >> 32),
           inside_before = static_cast<uint32_t>(before);
  each_strip_of_warp(job, [&](int64_t strip, uint32_t count) {
    const bool in_list = count != kWhole;
    visit(job, strip, count, [&](const Entry& entry) {
      const bool above = is_above(state, entry), inside = is_inside(state, entry);
      const uint32_t all_above = __ballot_sync(kAllLanes, above),
                     all_inside = __ballot_sync(kAllLanes, inside);
      const uint32_t of_band = inside_before + ones(all_inside & lanes_before()),
                     of_above = above_before + ones(all_above & lanes_before());
      above_before += ones(all_above);
      inside_before += ones(all_inside);
      const bool chosen = above || (inside && of_band >= first && of_band < end),
                 finite = entry.key < kNotFinite;
      if (chosen) {
        const uint32_t place =
            of_above + (of_band < first ? 0 : (of_band < end ? of_band : end) - first);
        s.indices[place] = static_cast<int32_t>(entry.index);
        s.values[place] = entry.value;
        if (finite && s.velocity) s.velocity[entry.index] = 0.0f;
      }
      // r has 0 where an entry is in the list, and else its value
      if (entry.present && finite && s.residual && chosen != in_list)
        s.residual[entry.index] = chosen ? 0.0f : entry.value;
    });
  });
}

// How the threshold is drawn, and what follows from it.
struct Plan {
  int64_t strips, runs, rank, room;
  uint32_t near;
  // Where the parts of the workspace are, in bytes; the state is at 0.
  int64_t warp_tallies, block_tallies, values, positions, counts, end;
  static constexpr int64_t blocks_done = 64, bins = 128;

  Plan(int64_t n, int64_t k) : strips((n + kStrip - 1) / kStrip) {
    // The margin is three standard deviations of the number of drawn entries that reach the
    // threshold, as on CPUs.
    runs = n / (32 * kRun) < kMostRuns ? n / (32 * kRun) : kMostRuns;
    const double expected = runs ? static_cast<double>(runs * kRun) * k / n : 0;
    rank = static_cast<int64_t>(expected + 3 * std::sqrt(expected) + 4);
    if (rank > runs * kRun) runs = 0;
    // Room for half as many again as a strip has on average, because layers differ, and at least
    // for a word of each lane
    const double mean = runs ? static_cast<double>(kStrip * rank) / (runs * kRun) : kStrip,
                 most = 1.5 * mean + 4 * std::sqrt(mean) + 8;
    room = most < kStrip ? (static_cast<int64_t>(most) + 31) / 32 * 32 : kStrip;
    // The larger the sample's error, the farther may the k-th largest lie: up to 28 % or 13 % above
    near = expected < 512 ? 1024 : 512;
    warp_tallies = bins + 4 * kBins;
    block_tallies = warp_tallies + 8 * kMostBlocks * kWarps;
    values = block_tallies + 8 * kMostBlocks;
    positions = values + 4 * strips * room;
    counts = positions + 2 * strips * room;
    end = counts + 4 * strips;
  }
};

int64_t blocks(int64_t strips, int each) {
  int device = 0, processors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t most = processors * each < kMostBlocks ? processors * each : kMostBlocks;
  const int64_t enough = (strips + kWarps - 1) / kWarps;
  return enough < most ? enough : most;
}

template <class T>
const char* run(const Selection& s, char* workspace, cudaStream_t stream) {
  const Plan plan(s.n, s.k);
  const Job<T> job{s,
                   plan.strips,
                   plan.room,
                   plan.near,
                   reinterpret_cast<State*>(workspace),
                   reinterpret_cast<uint32_t*>(workspace + plan.blocks_done),
                   reinterpret_cast<uint32_t*>(workspace + plan.bins),
                   reinterpret_cast<uint64_t*>(workspace + plan.warp_tallies),
                   reinterpret_cast<uint64_t*>(workspace + plan.block_tallies),
                   reinterpret_cast<uint32_t*>(workspace + plan.counts),
                   reinterpret_cast<float*>(workspace + plan.values),
                   reinterpret_cast<uint16_t*>(workspace + plan.positions)};
  const int64_t adding = blocks(plan.strips, kAddingBlocks),
                reading = blocks(plan.strips, kReadingBlocks),
                narrowing = blocks(plan.strips, kNarrowingBlocks);
  // Counters and bins begin at 0; each kernel's last block leaves them so for the next kernel
  cudaMemsetAsync(workspace, 0, plan.warp_tallies, stream);
  launch(sample<T>, plan.runs * kRun / kThreads + 1, stream, job, plan.runs,
         static_cast<uint32_t>(plan.rank));
  launch_early(s.velocity
                   ? (s.residual ? add_and_list<T, true, true> : add_and_list<T, false, true>)
                   : (s.residual ? add_and_list<T, true, false> : add_and_list<T, false, false>),
               adding, stream, job);
  if (s.k == 0) return launch_error();
  // As many levels as a sample that misled needs, because the host does not see whether it did
  for (int level = s.rule == Rule::exact ? 3 : 2; level > 0; --level)
    launch_early(narrow<T>, narrowing, stream, job);
  launch_early(tally<T>, reading, stream, job);
  launch_early(emit<T>, reading, stream, job);
  return launch_error();
}

}  // namespace

int64_t select_cuda_workspace(int64_t n, int64_t k) { return Plan(n, k).end; }

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
