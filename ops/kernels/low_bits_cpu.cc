// A dense vector in codes of 8, 4, 2 or 1 bits, on CPUs. Loops over a block have a fixed length, so
// that the compiler makes vector instructions of them.
#include "kernels/low_bits.h"

#include "kernels/flush_denormals.h"

#include <algorithm>
#include <cstring>

#include "kernels/clones.h"

namespace tfcommx {
namespace {

// Loops of a known length for a whole block.
template <int kBlock>
void copy_entries(float* __restrict to, const float* __restrict from, int count) {
  if (count == kBlock) {
    std::memcpy(to, from, 4 * kBlock);
  } else {
    std::copy_n(from, count, to);
  }
}

template <int kBlock>
void add_entries(float* __restrict sums, const float* one, const float* other, int count) {
  if (count == kBlock) {
    for (int i = 0; i < kBlock; ++i) sums[i] = one[i] + other[i];
  } else {
    for (int i = 0; i < count; ++i) sums[i] = one[i] + other[i];
  }
}

uint32_t size_bits(float x) { return bits_of(x) & 0x7fffffff; }

template <int kHalf>
float added_by_halves(float* terms) {
  for (int i = 0; i < kHalf; ++i) terms[i] += terms[i + kHalf];
  return added_by_halves<kHalf / 2>(terms);
}
template <>
float added_by_halves<0>(float* terms) {
  return terms[0];
}

// The mean magnitude of a block of finite entries, of which those from `count` on are 0.
template <int kBits>
float mean_size(const float* whole, int count) {
  constexpr int kBlock = low_bits_block(kBits);
  float terms[kBlock];
  for (int i = 0; i < kBlock; ++i) terms[i] = float_of(size_bits(whole[i])) * (1.0f / kBlock);
  return mean_of<kBits>(added_by_halves<kBlock / 2>(terms), count);
}

// Writes a block of a shard, and what is left of it to its residual. The entries from `count` on are
// no entries.
template <int kBits>
void write_block(const LowBits& layout, int64_t block, float* __restrict whole, int count,
                 float* __restrict residual, int32_t* __restrict words) {
  constexpr int kBlock = low_bits_block(kBits), kWords = low_bits_words(kBits);
  uint16_t* const steps = reinterpret_cast<uint16_t*>(words);
  if (block == 0 && layout.blocks() % 2) steps[layout.blocks()] = 0;
  std::fill(whole + count, whole + kBlock, 0.0f);
  uint32_t most = 0;
  for (int i = 0; i < kBlock; ++i) most = std::max(most, size_bits(whole[i]));
  uint32_t packed[kWords] = {};
  float step = float_of(kNan);
  if (most < kInfinite) {
    step = low_bits_step<kBits>(kBits >= 4 ? float_of(most) : mean_size<kBits>(whole, count));
    const float scale = low_bits_scale<kBits>(step);
    // The loop writes whole blocks, and the residual of a shorter one ends before that
    float room[kBlock];
    float* __restrict const left = count == kBlock ? residual : room;
    for (int i = 0; i < kBlock; i += kWords) {
      for (int j = 0; j < kWords; ++j) {
        const uint32_t code = low_bits_code<kBits>(whole[i + j], scale);
        left[i + j] = subtracted(whole[i + j], low_bits_value<kBits>(code, step));
        packed[j] |= code << i / kWords * kBits;
      }
    }
    if (count < kBlock) std::copy_n(room, count, residual);
  }
  steps[block] = static_cast<uint16_t>(bits_of(step) >> 16);
  std::memcpy(words + layout.steps() + block * kWords, packed, sizeof packed);
}

// Reads a block of a shard; returns its step.
template <int kBits>
float read_block(const LowBits& layout, int64_t block, const int32_t* __restrict words,
                 float* __restrict values) {
  constexpr int kBlock = low_bits_block(kBits), kWords = low_bits_words(kBits);
  const float step = from_bfloat16(reinterpret_cast<const uint16_t*>(words)[block]);
  const int32_t* __restrict packed = words + layout.steps() + block * kWords;
  for (int i = 0; i < kBlock; i += kWords) {
    for (int j = 0; j < kWords; ++j) {
      values[i + j] =
          low_bits_value<kBits>(static_cast<uint32_t>(packed[j]) >> i / kWords * kBits, step);
    }
  }
  return step;
}

// Calls body(shard, block of the shard) for the blocks [first, end) of all shards.
template <class Body>
void each_block(const LowBits& layout, int64_t first, int64_t end, const Body& body) {
  const int64_t blocks = layout.blocks();
  int64_t shard = first / blocks, block = first % blocks;
  for (int64_t i = first; i < end; ++i) {
    body(shard, block);
    if (++block == blocks) {
      block = 0;
      ++shard;
    }
  }
}

// What each function does with the blocks [first, end) of its shards.
struct Write {
  const LowBits& layout;
  const float* gradient;
  float* residual;
  int64_t real;
  int32_t* words;

  template <int kBits>
  void run(int64_t first, int64_t end) const {
    constexpr int kBlock = low_bits_block(kBits);
    each_block(layout, first, end, [&](int64_t shard, int64_t block) {
      const int64_t start = shard * layout.entries + block * kBlock;
      const int count = layout.count(block, real - shard * layout.entries);
      float whole[kBlock];
      add_entries<kBlock>(whole, gradient + start, residual + start, count);
      write_block<kBits>(layout, block, whole, count, residual + start,
                         words + shard * layout.words());
    });
  }
};

struct Add {
  const LowBits& layout;
  int64_t parts;
  const int32_t* written;
  float* residual;
  int64_t real;
  int32_t* words;

  template <int kBits>
  void run(int64_t first, int64_t end) const {
    constexpr int kBlock = low_bits_block(kBits);
    for (int64_t block = first; block < end; ++block) {
      const int count = layout.count(block, real);
      float* const kept = residual + block * kBlock;
      float sums[kBlock], more[kBlock], whole[kBlock];
      // Not added to zeros, because 0 + -0 is 0, and the sum on GPUs begins with -0
      read_block<kBits>(layout, block, written, sums);
      for (int64_t part = 1; part < parts; ++part) {
        read_block<kBits>(layout, block, written + part * layout.words(), more);
        for (int i = 0; i < kBlock; ++i) sums[i] += more[i];
      }
      add_entries<kBlock>(whole, sums, kept, count);
      write_block<kBits>(layout, block, whole, count, kept, words);
    }
  }
};

struct Read {
  const LowBits& layout;
  const int32_t* words;
  float factor;
  float* total;

  template <int kBits>
  void run(int64_t first, int64_t end) const {
    constexpr int kBlock = low_bits_block(kBits);
    each_block(layout, first, end, [&](int64_t shard, int64_t block) {
      float values[kBlock];
      const float step = read_block<kBits>(layout, block, words + shard * layout.words(), values);
      const uint32_t bad = mask_if(step != step);
      for (int j = 0; j < kBlock; ++j)
        values[j] = float_of((bits_of(values[j] * factor) & ~bad) | (kNan & bad));
      copy_entries<kBlock>(total + shard * layout.entries + block * kBlock, values,
                           layout.count(block, layout.entries));
    });
  }
};

template <class Job>
void run_with_bits(const Job& job, int64_t first, int64_t end) {
  switch (job.layout.bits) {
    case 8:
      return job.template run<8>(first, end);
    case 4:
      return job.template run<4>(first, end);
    case 2:
      return job.template run<2>(first, end);
    default:
      return job.template run<1>(first, end);
  }
}

TFCOMMX_CLONES
void run(const Write& job, int64_t first, int64_t end) { run_with_bits(job, first, end); }

TFCOMMX_CLONES
void run(const Add& job, int64_t first, int64_t end) { run_with_bits(job, first, end); }

TFCOMMX_CLONES
void run(const Read& job, int64_t first, int64_t end) { run_with_bits(job, first, end); }

// Shares blocks among threads, with denormals flushed.
template <class Job>
void share(const Job& job, int64_t blocks, const ParallelFor& parallel_for) {
  const int64_t together = (1 << 18) / job.layout.block();  // a megabyte of entries
  parallel_for((blocks + together - 1) / together, [&](int64_t turn) {
    const FlushDenormals flush;
    run(job, turn * together, std::min(blocks, (turn + 1) * together));
  });
}

}  // namespace

void low_bits_write_cpu(const LowBits& layout, int64_t shards, const float* gradient,
                        float* residual, int64_t real, int32_t* words,
                        const ParallelFor& parallel_for) {
  share(Write{layout, gradient, residual, real, words}, shards * layout.blocks(), parallel_for);
}

void low_bits_add_cpu(const LowBits& layout, int64_t parts, const int32_t* written, float* residual,
                      int64_t real, int32_t* words, const ParallelFor& parallel_for) {
  share(Add{layout, parts, written, residual, real, words}, layout.blocks(), parallel_for);
}

void low_bits_read_cpu(const LowBits& layout, int64_t shards, const int32_t* words, float factor,
                       float* total, const ParallelFor& parallel_for) {
  share(Read{layout, words, factor, total}, shards * layout.blocks(), parallel_for);
}

}  // namespace tfcommx
