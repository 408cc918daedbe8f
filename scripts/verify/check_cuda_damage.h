// Damaged words of other ranks: those that a CPU refuses become NaN in a GPU's sum, and all others
// are read alike. Included once.
#pragma once

#include "check_cuda.h"

#include "kernels/low_bits.h"
#include "kernels/merge.h"
#include "kernels/wire.h"

namespace {

int32_t damaged_word(int32_t word, std::mt19937_64& random) {
  switch (random() % 5) {
    case 0:
      return word ^ static_cast<int32_t>(1u << random() % 32);
    case 1:
      return static_cast<int32_t>(random() % 3) - 1;
    case 2:
      return random() % 2 ? INT32_MAX : INT32_MIN;
    case 3:
      return static_cast<int32_t>(random() % 140000);
    default:
      return static_cast<int32_t>(random());
  }
}

// Decodes buffers of which some words are damaged, and merges ones at their indices. Returns a
// problem; empty: none.
std::string problem_with_damaged_entries(std::mt19937_64& random) {
  const int64_t size = 1 + random() % (random() % 2 ? 300 : 140000),
                k = 1 + random() % std::min<int64_t>(size, 300), buffers = 1 + random() % 3,
                pairs = buffers * k;
  const WireLayout layout{k, size, static_cast<Values>(random() % 5),
                          static_cast<Positions>(random() % 3)};
  std::vector<int32_t> words(buffers * layout.words()), indices(k), right(pairs);
  for (int64_t i = 0; i < k; ++i) indices[i] = static_cast<int32_t>(i * (size / k) + size % k);
  const std::vector<float> ones(pairs, 1.0f);
  for (int64_t buffer = 0; buffer < buffers; ++buffer)
    wire_encode_cpu(layout, indices.data(), ones.data(), words.data() + buffer * layout.words());
  for (uint64_t n = random() % 4; n > 0; --n) {
    int32_t& word = words[random() % words.size()];
    word = damaged_word(word, random);
  }
  std::vector<float> numbers(pairs), sums(size);
  bool refused =
      wire_decode_cpu(layout, words.data(), buffers, 1, right.data(), numbers.data(), in_turn) >= 0;
  for (int64_t i = 1; i < pairs; ++i) refused |= i % k && right[i] <= right[i - 1];  // of pairs
  OnDevice<int32_t> from(words), places(pairs);
  OnDevice<float> values(pairs), weights(ones), dense(size);
  need(wire_decode_cuda(layout, from.data(), buffers, 1, places.data(), values.data(), stream),
       "wire_decode_cuda");
  const Merge merge{places.data(), weights.data(), pairs, dense.data(), size};
  OnDevice<int32_t> workspace(merge_cuda_workspace(merge, k));
  need(merge_cuda(merge, k, workspace.data(), stream), "merge_cuda");
  const std::vector<float> merged = dense.get();
  workspace.get();
  const std::vector<int32_t> found = places.get();
  const std::string what = "damaged wire size " + std::to_string(size) + " k " + std::to_string(k) +
                           " positions " + std::to_string(static_cast<int>(layout.places));
  if (!dense.untouched || !workspace.untouched || !places.untouched)
    return what + ": wrote beyond its arrays";
  if (refused) return std::isnan(merged[0]) ? "" : what + ": was merged";
  merge_cpu({right.data(), ones.data(), pairs, sums.data(), size}, k, in_turn);
  return found == right && same(merged, sums) ? "" : what + ": differs from the CPU's";
}

// Adds and reads shards of any codes, with steps of any sign and below 2.
std::string problem_with_any_codes(std::mt19937_64& random) {
  const LowBits layout{1 << random() % 4, static_cast<int64_t>(1 + random() % 4000)};
  const int64_t parts = 1 + random() % 6, real = random() % 5000;
  std::vector<int32_t> words(parts * layout.words()), right(layout.words());
  for (int64_t i = 0; i < static_cast<int64_t>(words.size()); ++i) {
    const uint32_t any = static_cast<uint32_t>(random());
    words[i] = static_cast<int32_t>(i % layout.words() < layout.steps() ? any & 0xbfffbfff : any);
  }
  std::vector<float> kept(layout.entries, 0.25f), numbers(parts * layout.entries);
  OnDevice<int32_t> from(words), total(layout.words());
  OnDevice<float> residual(kept), read(numbers.size());
  need(low_bits_add_cuda(layout, parts, from.data(), residual.data(), real, total.data(), stream),
       "low_bits_add_cuda");
  need(low_bits_read_cuda(layout, parts, from.data(), 0.5f, read.data(), stream),
       "low_bits_read_cuda");
  low_bits_add_cpu(layout, parts, words.data(), kept.data(), real, right.data(), in_turn);
  low_bits_read_cpu(layout, parts, words.data(), 0.5f, numbers.data(), in_turn);
  const bool alike =
      total.get() == right && same(residual.get(), kept) && same(read.get(), numbers);
  if (alike && total.untouched && residual.untouched && read.untouched) return "";
  return "any codes of " + std::to_string(layout.bits) + " bits";
}

std::string problem_with_damage(std::mt19937_64& random) {
  const std::string of_entries = problem_with_damaged_entries(random),
                    of_codes = problem_with_any_codes(random);
  return of_entries.empty() ? of_codes : of_entries;
}

}  // namespace
