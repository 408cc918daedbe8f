// Compares kernels with a GPU's rules for denormals (tests/cuda_on_cpu) with the CPU kernels, in a
// thread that flushes denormals as TensorFlow's do and in one that keeps them, bit for bit, NaN
// being any NaN: numbers about the smallest, and sums and products that are denormal. Prints which
// kernels differ.
#include "../scripts/verify/check_cuda.h"
#include "kernels/dense.h"
#include "kernels/flush_denormals.h"
#include "kernels/lars.h"
#include "kernels/low_bits.h"
#include "kernels/merge.h"
#include "kernels/norms.h"
#include "kernels/wire_codes.h"

namespace {

std::mt19937_64 numbers(7);
int differing = 0;

// Any of the numbers below 2^(-149 + octaves), of either sign; a few are zero or ordinary.
std::vector<float> tiny(int64_t n, int octaves) {
  std::vector<float> result(n);
  for (float& x : result) {
    const uint32_t bits = static_cast<uint32_t>(numbers());
    const int exponent = static_cast<int>(numbers() % octaves) - 22;
    const uint32_t denormal = (bits & 0x7fffff) >> (exponent < 0 ? -exponent : 0);
    x = float_of((bits & 0x80000000) |
                 (exponent < 1 ? denormal : exponent << 23 | (bits & 0x7fffff)));
    if (numbers() % 64 == 0) x = numbers() % 2 ? 0.0f : std::copysign(1.25f, x);
  }
  return result;
}

template <class T>
bool equal(const std::vector<T>& a, const std::vector<T>& b) {
  return a == b;
}

template <>
bool equal(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (bits_of(a[i]) != bits_of(b[i]) && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  return true;
}

// cpu() as a thread of each kind computes it.
template <class Cpu, class T>
void compare(const char* name, const Cpu& cpu, const std::vector<T>& gpu) {
  for (const bool flush : {true, false}) {
    std::vector<T> right;
    if (flush) {
      const FlushDenormals flushing;
      right = cpu();
    } else {
      right = cpu();
    }
    if (equal(gpu, right)) continue;
    ++differing;
    std::printf("%s differs from a thread that %s denormals\n", name, flush ? "flushes" : "keeps");
  }
}

void check_dense(Float type, float scale) {
  const int64_t n = 4001;
  const std::vector<float> gradient = tiny(n, 40), residual = tiny(n, 40);
  const Rounding how{type, scale, 1.0f};
  OnDevice<float> from(gradient), left(residual);
  OnDevice<uint16_t> written(n);
  need(dense_write_cuda(how, from.data(), left.data(), written.data(), n, stream), "dense_write");
  const auto on_cpu = [&](std::vector<uint16_t>* bits) {
    std::vector<float> stays = residual;
    bits->resize(n);
    dense_write_cpu(how, gradient.data(), stays.data(), bits->data(), n, in_turn);
    return stays;
  };
  std::vector<uint16_t> bits;
  const std::string name = std::string("dense_write ") + kTypes[static_cast<int>(type)];
  compare((name + ", residual").c_str(), [&] { return on_cpu(&bits); }, left.get());
  compare((name + ", written").c_str(), [&] { return on_cpu(&bits), bits; }, written.get());
  OnDevice<float> total(n / 3);
  need(dense_add_cuda(type, written.data(), 3, 1 / 3.0f, total.data(), n / 3, stream), "dense_add");
  const std::vector<uint16_t> parts = written.get();
  compare(
      "dense_add",
      [&] {
        std::vector<float> sums(n / 3);
        dense_add_cpu(type, parts.data(), 3, 1 / 3.0f, sums.data(), n / 3, in_turn);
        return sums;
      },
      total.get());
}

void check_codes(int width, int octaves) {
  const CodeLayout layout{4001, width};
  const std::vector<float> values = tiny(layout.k, octaves);
  OnDevice<float> from(values), written(layout.k), errors(layout.k);
  const int64_t count = layout.steps() + layout.codes();
  OnDevice<int32_t> words(count);
  need(codes_round_cuda(layout, from.data(), written.data(), errors.data(), stream), "codes_round");
  need(codes_write_cuda(layout, from.data(), words.data(), stream), "codes_write");
  std::vector<float> sent(layout.k), left(layout.k);
  const auto on_cpu = [&] { codes_round_cpu(layout, values.data(), sent.data(), left.data()); };
  compare("codes_round, written", [&] { return on_cpu(), sent; }, written.get());
  compare("codes_round, errors", [&] { return on_cpu(), left; }, errors.get());
  compare(
      "codes_write",
      [&] {
        std::vector<int32_t> right(count);
        codes_write_cpu(layout, values.data(), right.data());
        return right;
      },
      words.get());
}

void check_low_bits(int width, int octaves) {
  const LowBits layout{width, 2001};
  const int64_t shards = 2, n = shards * layout.entries;
  const float factor = 0x1p-40f;  // of numbers of which some are denormal then
  const std::vector<float> gradient = tiny(n, octaves), kept = tiny(n, octaves);
  OnDevice<float> from(gradient), residual(kept), total(n);
  OnDevice<int32_t> words(shards * layout.words()), sum(layout.words());
  need(low_bits_write_cuda(layout, shards, from.data(), residual.data(), n, words.data(), stream),
       "low_bits_write");
  const std::vector<float> first = residual.get();
  need(low_bits_add_cuda(layout, shards, words.data(), residual.data(), layout.entries, sum.data(),
                         stream),
       "low_bits_add");
  need(low_bits_read_cuda(layout, shards, words.data(), factor, total.data(), stream),
       "low_bits_read");
  std::vector<int32_t> written(shards * layout.words()), added(layout.words());
  std::vector<float> numbers(n), stays;
  const auto on_cpu = [&](bool adds) {
    stays = kept;
    low_bits_write_cpu(layout, shards, gradient.data(), stays.data(), n, written.data(), in_turn);
    low_bits_read_cpu(layout, shards, written.data(), factor, numbers.data(), in_turn);
    if (adds)
      low_bits_add_cpu(layout, shards, written.data(), stays.data(), layout.entries, added.data(),
                       in_turn);
    return stays;
  };
  compare("low_bits_write, words", [&] { return on_cpu(false), written; }, words.get());
  compare("low_bits_write, residual", [&] { return on_cpu(false); }, first);
  compare("low_bits_add, words", [&] { return on_cpu(true), added; }, sum.get());
  compare("low_bits_add, residual", [&] { return on_cpu(true); }, residual.get());
  compare("low_bits_read", [&] { return on_cpu(false), numbers; }, total.get());
}

void check_merge() {
  const int64_t n = 500, ranks = 4;
  std::vector<int32_t> indices;
  for (int64_t i = 0; i < ranks * n; ++i) indices.push_back(static_cast<int32_t>(i % n));
  const std::vector<float> values = tiny(ranks * n, 40);
  OnDevice<int32_t> at(indices);
  OnDevice<float> from(values), sums(n);
  const Merge merge{at.data(), from.data(), ranks * n, sums.data(), n};
  OnDevice<int32_t> workspace(merge_cuda_workspace(merge, n));
  need(merge_cuda(merge, n, workspace.data(), stream), "merge");
  compare(
      "merge",
      [&] {
        std::vector<float> right(n);
        merge_cpu({indices.data(), values.data(), ranks * n, right.data(), n}, 0, in_turn);
        return right;
      },
      sums.get());
}

void check_norms() {
  const int64_t n = 9001;
  std::vector<float> data = tiny(n, 40);
  for (float& x : data) x = std::ldexp(x, 64);  // squares about the smallest number
  OnDevice<float> from(data), sums(3), squares(1);
  const Vector vector{from.data(), n, Float::float32};
  need(norms_cuda(&vector, 1, sums.data(), squares.data(), stream), "norms");
  compare(
      "norms",
      [&] {
        std::vector<float> room(3), right(1);
        const Vector on_host{data.data(), n, Float::float32};
        norms_cpu(&on_host, 1, room.data(), right.data(), in_turn);
        return right;
      },
      squares.get());
}

void check_lars(bool nesterov) {
  const int64_t n = 5001;
  const std::vector<float> weight = tiny(n, 40), momentum = tiny(n, 40), gradient = tiny(n, 40);
  const LarsOptions options{0.9f, nesterov};
  const float rate = 0.3f;
  OnDevice<float> w(weight), m(momentum), g(gradient), rates(std::vector<float>{rate});
  const LarsVector vector{w.data(), m.data(), g.data(), n, 0.01f};
  need(lars_cuda(&vector, rates.data(), 1, options, stream), "lars");
  const auto on_cpu = [&](bool weights) {
    std::vector<float> moved = weight, momenta = momentum;
    const LarsVector on_host{moved.data(), momenta.data(), gradient.data(), n, 0.01f};
    lars_cpu(&on_host, &rate, 1, options, in_turn);
    return weights ? moved : momenta;
  };
  compare("lars, weights", [&] { return on_cpu(true); }, w.get());
  compare("lars, momenta", [&] { return on_cpu(false); }, m.get());
}

void check_select(Rule rule) {
  Problem p;
  p.n = 5001;
  p.k = 700;
  p.type = Float::float32;
  p.rule = rule;
  p.seed = 3;
  p.wide = tiny(p.n, 40);
  p.residual = tiny(p.n, 40);
  p.velocity = tiny(p.n, 40);
  p.gradient.resize(4 * p.n);
  std::memcpy(p.gradient.data(), p.wide.data(), 4 * p.n);
  bool guarded = true;
  const Result gpu = on_gpu(p, 0, &guarded);
  compare("select, indices", [&] { return on_cpu(p).indices; }, gpu.indices);
  compare("select, values", [&] { return on_cpu(p).values; }, gpu.values);
  compare("select, residual", [&] { return on_cpu(p).residual; }, gpu.residual);
  compare("select, velocity", [&] { return on_cpu(p).velocity; }, gpu.velocity);
}

}  // namespace

int main() {
  for (const float scale : {1.0f, 0.25f})
    for (const Float type : {Float::float16, Float::bfloat16}) check_dense(type, scale);
  for (const int width : {8, 4})
    for (const int octaves : {23, 26, 40, 60}) check_codes(width, octaves);
  for (const int width : {8, 4, 2, 1})
    for (const int octaves : {23, 40, 60, 120}) check_low_bits(width, octaves);
  check_merge();
  check_norms();
  for (const bool nesterov : {false, true}) check_lars(nesterov);
  for (const Rule rule : {Rule::exact, Rule::mstopk}) check_select(rule);
  std::printf("%d differ\n", differing);
  return differing ? 1 : 0;
}
