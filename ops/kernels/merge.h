// Merging what the ranks selected: (index, value) pairs added into a dense vector, no dense vector
// per rank.
#pragma once

#include <cstdint>

#include "kernels/parallel.h"

struct CUstream_st;  // what CUDA's cudaStream_t points to

namespace tfcommx {

struct Merge {
  const int32_t* indices;  // [pairs], in [0, n), any order, repeats allowed
  const float* values;     // [pairs]
  int64_t pairs;
  // [n] out: 0 + the values of each index, in the order of the list, whatever the number of threads
  float* dense;
  int64_t n;
};

// Returns the position in the list of the first index outside [0, n), and then `dense` is
// unspecified; -1: all are inside. The list is made of runs of `run` pairs, such as one of each
// rank; 0: any list.
// Cost: one write of dense, and two reads of the indices and one of the values if every run is
// ascending; otherwise one read of the pairs by each of the turns (at most 16) that share the work.
int64_t merge_cpu(const Merge& merge, int64_t run, const ParallelFor& parallel_for);

// The same on a GPU, queued on the stream. Every run must be ascending, without a repeated index.
// Nothing waits, so no position can be returned: if an index is outside [0, n), or not above the one
// before it in its run, dense[0] is NaN. workspace[merge_cuda_workspace(merge, run)] is overwritten.
// Returns null, or CUDA's message if a kernel could not be launched. Cost: the pairs read and dense
// written once.
int64_t merge_cuda_workspace(const Merge& merge, int64_t run);
const char* merge_cuda(const Merge& merge, int64_t run, int32_t* workspace, CUstream_st* stream);

}  // namespace tfcommx
