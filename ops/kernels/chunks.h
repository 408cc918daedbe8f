// Many vectors cut into chunks, so that threads share them evenly, whatever their lengths.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/device.h"
#include "kernels/flush_denormals.h"
#include "kernels/parallel.h"

namespace tfcommx {

constexpr int64_t kChunk = 4096;  // entries

TFCOMMX_DEVICE inline int64_t chunks_of(int64_t entries) { return (entries + kChunk - 1) / kChunk; }

// The last of `count` vectors whose first chunk is not after `chunk`.
TFCOMMX_DEVICE inline int vector_of(const int32_t* firsts, int count, int64_t chunk) {
  int which = 0;
  for (int rest = count; rest > 1;) {
    const int half = rest / 2;
    if (firsts[which + half] <= chunk) {
      which += half;
      rest -= half;
    } else {
      rest = half;
    }
  }
  return which;
}

// Calls body(vector, first entry, number of entries, chunk) for every chunk of every vector, with
// denormals flushed. entries(vector): its length.
template <class Entries, class Body>
void each_chunk(int64_t count, const Entries& entries, const ParallelFor& parallel_for,
                const Body& body) {
  constexpr int64_t kTurn = 64;  // chunks: a megabyte; below that, sharing costs more than it saves
  std::vector<int64_t> firsts(count + 1, 0);  // chunks before each vector
  for (int64_t i = 0; i < count; ++i) firsts[i + 1] = firsts[i] + chunks_of(entries(i));
  const int64_t chunks = firsts[count];
  parallel_for((chunks + kTurn - 1) / kTurn, [&](int64_t turn) {
    const FlushDenormals flush;
    const int64_t end = std::min(chunks, (turn + 1) * kTurn);
    int64_t chunk = turn * kTurn;
    int64_t which = std::upper_bound(firsts.begin(), firsts.end(), chunk) - firsts.begin() - 1;
    for (; chunk < end; ++chunk) {
      while (chunk >= firsts[which + 1]) ++which;
      const int64_t start = (chunk - firsts[which]) * kChunk;
      body(which, start, std::min(kChunk, entries(which) - start), chunk);
    }
  });
}

}  // namespace tfcommx
