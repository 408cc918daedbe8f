// One exchange on a GPU as the sparse routes have it, of ranks that all have the same gradient: what
// scripts/verify/check_cuda.cu times, captures in a graph and runs on two streams. Included once.
#pragma once

#include "check_cuda.h"

#include "kernels/keep.h"
#include "kernels/merge.h"
#include "kernels/wire.h"

namespace {

struct Exchange {
  Problem p;
  int64_t k, peers;
  WireLayout layout;
  CodeLayout codes;
  OnDevice<char> gradient, workspace;
  OnDevice<float> residual, values, written, errors, all_values, dense;
  OnDevice<int32_t> indices, words, gathered, all_indices, starts;
  const char* error = nullptr;

  // kind: how entries are written; its k and size are not used.
  Exchange(const Problem& problem, const WireLayout& kind, int64_t peers)
      : p(problem),
        k(p.k),
        peers(peers),
        layout{k, p.n, kind.type, kind.places},
        codes{k, kind.type == Values::int8 ? 8 : 4},
        gradient(p.gradient),
        workspace(select_cuda_workspace(p.n, k)),
        residual(p.residual),
        values(k),
        written(k),
        errors(k),
        all_values(peers * k),
        dense(p.n),
        indices(k),
        words(layout.words()),
        gathered(peers * layout.words()),
        all_indices(peers * k),
        starts(merge_cuda_workspace(merged(), k)) {}

  Merge merged() { return {all_indices.data(), all_values.data(), peers * k, dense.data(), p.n}; }

  void select(cudaStream_t on) {
    Selection s =
        selection(p, gradient.data(), residual.data(), nullptr, indices.data(), values.data());
    note(select_cuda(s, workspace.data(), on));
  }
  void round(cudaStream_t on) {
    note(codes_round_cuda(codes, values.data(), written.data(), errors.data(), on));
  }
  void keep(cudaStream_t on) {
    note(keep_cuda({indices.data(), values.data(), errors.data(), k, residual.data(), p.n}, on));
  }
  void encode(cudaStream_t on) {
    note(wire_encode_cuda(layout, indices.data(), layout.coded() ? written.data() : values.data(),
                          words.data(), on));
  }
  void gather(int64_t peer, cudaStream_t on) {
    need(cudaMemcpyAsync(gathered.data() + peer * layout.words(), words.data(), 4 * layout.words(),
                         cudaMemcpyDeviceToDevice, on),
         "copy");
  }
  void decode(cudaStream_t on) {
    note(wire_decode_cuda(layout, gathered.data(), peers, 1, all_indices.data(), all_values.data(),
                          on));
  }
  void merge(cudaStream_t on) { note(merge_cuda(merged(), k, starts.data(), on)); }

  // A step: what each peer sends is the next selection of the same gradient.
  void run(cudaStream_t on) {
    for (int64_t peer = 0; peer < peers; ++peer) {
      select(on);
      if (layout.coded()) {
        round(on);
        keep(on);
      }
      encode(on);
      gather(peer, on);
    }
    decode(on);
    merge(on);
  }

  // The CPU's step on the same data, compared with what `run` left on the GPU; before that, the
  // residual must have been `p.residual`.
  bool right() {
    Problem mine = p;
    std::vector<int32_t> sent;
    for (int64_t peer = 0; peer < peers; ++peer) {
      const Result chosen = on_cpu(mine);
      std::vector<float> rounded = chosen.values, left(k);
      mine.residual = chosen.residual;
      if (layout.coded()) {
        codes_round_cpu(codes, chosen.values.data(), rounded.data(), left.data());
        keep_cpu({chosen.indices.data(), chosen.values.data(), left.data(), k, mine.residual.data(),
                  p.n});
      }
      std::vector<int32_t> buffer(layout.words());
      wire_encode_cpu(layout, chosen.indices.data(), rounded.data(), buffer.data());
      sent.insert(sent.end(), buffer.begin(), buffer.end());
    }
    std::vector<int32_t> all(peers * k);
    std::vector<float> weights(peers * k), sums(p.n);
    wire_decode_cpu(layout, sent.data(), peers, 1, all.data(), weights.data(), in_turn);
    merge_cpu({all.data(), weights.data(), peers * k, sums.data(), p.n}, k, in_turn);
    need(error, "a kernel");
    return gathered.get() == sent && same(residual.get(), mine.residual) &&
           all_indices.get() == all && same(all_values.get(), weights) && same(dense.get(), sums);
  }

 private:
  void note(const char* other) {
    if (other) error = other;
  }
};

}  // namespace
