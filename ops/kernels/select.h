// Selection with error feedback: which k entries of a gradient travel, and what stays.
//
// For a gradient g[n] and a residual r[n]:
//   acc     = g + r                  in float32
//   indices = k entries of acc       by magnitude, ascending, unique
//   values  = acc[indices]
//   r       = acc                    the chosen entries zeroed
// With momentum correction, a velocity u[n]:
//   u       = momentum * u + g       rounded after each operation, not fused
//   acc     = r + u                  the rest as above
//   u       = u                      the chosen entries zeroed (factor masking)
//
// Rules. The magnitudes |acc| are counted in bins of equal exponent and equal first twelve mantissa
// bits. The band is the bin in which the k-th largest magnitude lies; its edges are Algorithm 1's
// thresholds, thres2 <= thres1, at most 1/4096 apart.
//   exact   the k largest magnitudes; of equal ones the lowest indices.
//   mstopk  every entry >= thres1; the rest of k are consecutive entries of the band, in index
//           order, from the offset (splitmix64(seed) >> 1) mod (entries in the band - rest + 1):
//           every window of that length is equally likely.
// Non-finite. A NaN or infinite acc (so also one of an infinite u) counts as larger than
// everything, all of them alike: the lowest indices are chosen first, and sent as they are. Their
// entries of r and u keep their old values, chosen or not, so neither becomes non-finite.
// Denormals. Products and sums are flushed to zero if they are denormal, as in all of
// TensorFlow's arithmetic. The result depends on neither the number of threads nor their timing.
//
// Source: Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud
// Clusters, 2021, Algorithm 1. We differ in the search: a sample and counts in bins evaluate many
// thresholds in one pass, instead of one threshold a pass. Momentum: Lin et al., Deep Gradient
// Compression, 2018, section 3.2 and Algorithm 4.
#pragma once

#include <cstdint>

#include "kernels/parallel.h"

struct CUstream_st;  // what CUDA's cudaStream_t points to

namespace tfcommx {

enum class Float { float32, float16, bfloat16 };
enum class Rule { exact, mstopk };

struct Selection {
  const void* gradient;  // [n], any alignment that its type allows
  Float type;            // of the gradient
  float* residual;       // [n], updated in place; null: acc = g
  float* velocity;       // [n], updated in place; null: no momentum. Needs a residual
  float momentum;        // in [0, 1)
  int64_t n;             // 0 <= n < 2^31
  int64_t k;             // 0 <= k <= n
  uint64_t seed;         // of mstopk's window
  Rule rule;
  int32_t* indices;  // [k] out
  float* values;     // [k] out
};

// Cost: at most two reading passes. The first adds. If what reaches the threshold that a sample
// predicts fits a list, it is the only one: usual for k <= n / 8. Else, so for larger k and if
// many entries are alike, a second one reads the stretches of r (of g if there is no residual)
// that hold entries to be sent. The sample reads up to n / 32 entries, at most 262,144. A third
// pass and more only if the sample misled, by more than three standard deviations of what it
// counts, about once in 350 calls: what lies between two drawn entries is not known before it is
// read. Extra memory: at most 2 % of a float32 gradient's for k <= n / 100 and n >= 2^23, and the
// list of the non-finite entries.
void select_cpu(const Selection& selection, const ParallelFor& parallel_for);

// The same on a GPU, all pointers in its memory: queued on the stream, and nothing waits.
// `workspace` is select_cuda_workspace(n, k) bytes, aligned to 128, of any content, in use until the
// stream has passed. Returns null, or CUDA's message if a kernel could not be launched. Cost: one
// pass over g and r, and six bytes for each entry that reaches the predicted threshold, written once
// and read twice (by `exact` three times); more passes over all if the sample misled. No more than
// eight launches. Workspace: 160 kB and some 9 k bytes, at least 5 % of a float32 gradient.
int64_t select_cuda_workspace(int64_t n, int64_t k);
const char* select_cuda(const Selection& selection, void* workspace, CUstream_st* stream);

// Copies within a GPU's memory, queued on the stream.
const char* copy_cuda(void* to, const void* from, int64_t bytes, CUstream_st* stream);

}  // namespace tfcommx
