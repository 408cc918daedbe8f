// The CUDA kernels as C functions, for programs without TensorFlow: Python's ctypes, PyTorch, CuPy.
// scripts/gpu_day builds them as a shared library, which needs nvcc only.
//
// Pointers are to the GPU's memory, except the tables of vectors, which are on the host. Types: 0
// float32, 1 float16, 2 bfloat16. Rules: 0 exact, 1 mstopk. Wire: positions 0 pair, 1 block, 2
// elias; values 0 float32, 1 float16, 2 bfloat16, 3 int8, 4 int4. Everything is queued on the
// stream. Functions return null, or what CUDA says. The headers in ops/kernels have the contracts.
#include "kernels/dense.h"
#include "kernels/keep.h"
#include "kernels/lars.h"
#include "kernels/low_bits.h"
#include "kernels/merge.h"
#include "kernels/norms.h"
#include "kernels/select.h"
#include "kernels/wire.h"

using namespace tfcommx;

namespace {

WireLayout layout_of(int64_t k, int64_t size, int values, int positions) {
  return {k, size, static_cast<Values>(values), static_cast<Positions>(positions)};
}

CodeLayout codes_of(int64_t k, int values) {
  return {k, static_cast<Values>(values) == Values::int8 ? 8 : 4};
}

}  // namespace

extern "C" {

int64_t tfcommx_select_workspace(int64_t n, int64_t k) { return select_cuda_workspace(n, k); }

const char* tfcommx_select(const void* gradient, int type, float* residual, float* velocity,
                           float momentum, int64_t n, int64_t k, uint64_t seed, int rule,
                           int32_t* indices, float* values, void* workspace, CUstream_st* stream) {
  return select_cuda({gradient, static_cast<Float>(type), residual, velocity, momentum, n, k, seed,
                      static_cast<Rule>(rule), indices, values},
                     workspace, stream);
}

int64_t tfcommx_wire_words(int64_t k, int64_t size, int values, int positions) {
  return layout_of(k, size, values, positions).words();
}

const char* tfcommx_wire_round(const float* values, int64_t k, int type, float* written,
                               float* errors, CUstream_st* stream) {
  return codes_round_cuda(codes_of(k, type), values, written, errors, stream);
}

const char* tfcommx_keep(const int32_t* indices, const float* values, const float* errors,
                         int64_t k, float* residual, int64_t n, CUstream_st* stream) {
  return keep_cuda({indices, values, errors, k, residual, n}, stream);
}

const char* tfcommx_wire_encode(const int32_t* indices, const float* values, int64_t k,
                                int64_t size, int type, int positions, int32_t* words,
                                CUstream_st* stream) {
  return wire_encode_cuda(layout_of(k, size, type, positions), indices, values, words, stream);
}

const char* tfcommx_wire_decode(const int32_t* words, int64_t buffers, int64_t shards, int64_t k,
                                int64_t size, int type, int positions, int32_t* indices,
                                float* values, CUstream_st* stream) {
  return wire_decode_cuda(layout_of(k, size, type, positions), words, buffers, shards, indices,
                          values, stream);
}

int64_t tfcommx_merge_workspace(int64_t pairs, int64_t k, int64_t n) {
  return merge_cuda_workspace({nullptr, nullptr, pairs, nullptr, n}, k);
}

const char* tfcommx_merge(const int32_t* indices, const float* values, int64_t pairs, int64_t k,
                          float* dense, int64_t n, int32_t* workspace, CUstream_st* stream) {
  return merge_cuda({indices, values, pairs, dense, n}, k, workspace, stream);
}

const char* tfcommx_dense_write(const float* gradient, float* residual, int64_t n, int type,
                                float scale, float reach, uint16_t* written, CUstream_st* stream) {
  return dense_write_cuda({static_cast<Float>(type), scale, reach}, gradient, residual, written, n,
                          stream);
}

const char* tfcommx_dense_add(const uint16_t* written, int64_t parts, int64_t n, int type,
                              float factor, float* total, CUstream_st* stream) {
  return dense_add_cuda(static_cast<Float>(type), written, parts, factor, total, n, stream);
}

// bits: 8, 4, 2 or 1; entries: of a shard; real: entries that are no padding.
int64_t tfcommx_low_bits_words(int bits, int64_t entries) { return LowBits{bits, entries}.words(); }

const char* tfcommx_low_bits_write(const float* gradient, float* residual, int64_t shards,
                                   int64_t entries, int64_t real, int bits, int32_t* words,
                                   CUstream_st* stream) {
  return low_bits_write_cuda({bits, entries}, shards, gradient, residual, real, words, stream);
}

const char* tfcommx_low_bits_add(const int32_t* written, int64_t parts, float* residual,
                                 int64_t entries, int64_t real, int bits, int32_t* words,
                                 CUstream_st* stream) {
  return low_bits_add_cuda({bits, entries}, parts, written, residual, real, words, stream);
}

const char* tfcommx_low_bits_read(const int32_t* words, int64_t shards, int64_t entries, int bits,
                                  float factor, float* total, CUstream_st* stream) {
  return low_bits_read_cuda({bits, entries}, shards, words, factor, total, stream);
}

// vectors[count] of {data, entries, type}; sums: a float for every 4096 entries, or part of them, of
// each vector.
const char* tfcommx_norms(const Vector* vectors, int64_t count, float* sums, float* squares,
                          CUstream_st* stream) {
  return norms_cuda(vectors, count, sums, squares, stream);
}

// vectors[count] of {weight, momentum, gradient, entries, decay}.
const char* tfcommx_lars(const LarsVector* vectors, const float* rates, int64_t count,
                         float momentum, bool nesterov, CUstream_st* stream) {
  return lars_cuda(vectors, rates, count, {momentum, nesterov}, stream);
}

}  // extern "C"
