// Runs the kernels that change or add vectors on hostile numbers, lengths and alignments, under
// sanitizers: nothing outside an array is read or written, and the bits depend neither on the order
// nor on the threads in which turns are taken.
//
//   array_fuzz SEED COUNT
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "kernels/dense.h"
#include "kernels/keep.h"
#include "kernels/lars.h"
#include "kernels/low_bits.h"
#include "kernels/merge.h"
#include "kernels/norms.h"
#include "kernels/select.h"

using namespace tfcommx;

namespace {

std::mt19937_64 draw;

int64_t below(int64_t n) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(n)); }

// n entries that end where a memory checker's red zone begins, at any alignment of their type.
template <class T>
class Array {
 public:
  explicit Array(int64_t n) : n_(n), skip_(below(5)), data_(new T[n + skip_]()) {}
  Array(const Array& other) : Array(other.n_) { std::copy_n(other.data(), n_, data()); }
  Array& operator=(const Array&) = delete;

  T* data() const { return data_.get() + skip_; }
  T& operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return n_; }
  bool operator==(const Array& other) const {
    return std::memcmp(data(), other.data(), n_ * sizeof(T)) == 0;
  }

 private:
  int64_t n_, skip_;
  std::unique_ptr<T[]> data_;
};

void forward(int64_t turns, const std::function<void(int64_t)>& body) {
  for (int64_t i = 0; i < turns; ++i) body(i);
}

void backward(int64_t turns, const std::function<void(int64_t)>& body) {
  for (int64_t i = turns; i-- > 0;) body(i);
}

void threads(int64_t turns, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t turn; (turn = next++) < turns;) body(turn);
  };
  std::thread other(work), third(work);
  work();
  other.join();
  third.join();
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("not so: %s\n", what);
  std::exit(1);
}

// Few entries, some tiles, or enough for several turns.
int64_t length() {
  switch (below(8)) {
    case 0:
      return below(3);
    case 1:
      return 4096 * (1 + below(3)) + below(3) - 1;
    case 2:
      return below(400'000);
    default:
      return below(300);
  }
}

float hostile_number() {
  constexpr uint32_t kBits[] = {0,          0x80000000, 1,          0x807fffff, 0x00800000,
                                0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000,
                                0xffffffff, 0x7f800001, 0x0d800000};
  return float_of(kBits[below(13)]);
}

// kind 0: all alike; 1: few values; 2: any bits; else normal numbers of some scale, some hostile.
Array<float> numbers(int64_t n) {
  const Array<float> made(n);
  const int64_t kind = below(6), every = 1 + below(1000);
  std::normal_distribution<float> normal;
  const float scale = std::exp2(static_cast<float>(below(200)) - 100), alike = hostile_number();
  for (int64_t i = 0; i < n; ++i) {
    made[i] = kind == 0   ? alike
              : kind == 1 ? static_cast<float>(below(5)) - 2
              : kind == 2 ? float_of(static_cast<uint32_t>(draw()))
                          : normal(draw) * scale;
    if (kind > 3 && i % every == 0) made[i] = hostile_number();
  }
  return made;
}

Array<uint16_t> halves(int64_t n) {
  const Array<uint16_t> made(n);
  for (int64_t i = 0; i < n; ++i) made[i] = static_cast<uint16_t>(draw());
  return made;
}

Float float_type() { return static_cast<Float>(below(3)); }

template <class T>
void select(const Array<T>& gradient, Float type) {
  const int64_t n = gradient.size();
  if (n == 0) return;
  const int64_t k = 1 + below(below(3) ? std::max<int64_t>(1, n / 20) : n), states = below(3);
  const Rule rule = below(2) ? Rule::exact : Rule::mstopk;
  const uint64_t seed = draw();
  const Array<float> residual = numbers(n), velocity = numbers(n);
  std::vector<Array<int32_t>> indices;
  std::vector<Array<float>> values, residuals, velocities;
  for (const auto& each : {forward, backward, threads}) {
    indices.emplace_back(k);
    values.emplace_back(k);
    residuals.emplace_back(residual);
    velocities.emplace_back(velocity);
    select_cpu({gradient.data(), type, states ? residuals.back().data() : nullptr,
                states == 2 ? velocities.back().data() : nullptr, 0.9f, n, k, seed, rule,
                indices.back().data(), values.back().data()},
               each);
    const Array<int32_t>& chosen = indices.back();
    for (int64_t j = 0; j < k; ++j)
      require(chosen[j] >= 0 && chosen[j] < n && (j == 0 || chosen[j] > chosen[j - 1]),
              "chosen indices ascend in [0, n)");
    require(chosen == indices[0] && values.back() == values[0] &&
                residuals.back() == residuals[0] && velocities.back() == velocities[0],
            "a selection depends on no order");
  }
}

void merge() {
  const int64_t n = below(20) ? length() : 600'000, runs = 1 + below(4),
                run = 1 + below(std::max<int64_t>(1, std::min<int64_t>(n, 500))),
                pairs = runs * run;
  const Array<int32_t> indices(pairs);
  const Array<float> values = numbers(pairs);
  const bool ascending = n >= run && below(2);
  for (int64_t i = 0; i < pairs; ++i)
    indices[i] = static_cast<int32_t>(ascending ? i % run * (n / run) : below(n + 1));
  if (below(2)) indices[below(pairs)] = static_cast<int32_t>(draw());
  const auto is_outside = [n](int32_t index) { return index < 0 || index >= n; };
  const int32_t* end = indices.data() + pairs;
  const int32_t* bad = std::find_if(static_cast<const int32_t*>(indices.data()), end, is_outside);
  std::vector<Array<float>> sums;
  for (const auto& each : {forward, backward, threads}) {
    sums.emplace_back(n);
    const int64_t found = merge_cpu({indices.data(), values.data(), pairs, sums.back().data(), n},
                                    below(2) ? run : 0, each);
    require(found == (bad == end ? -1 : bad - indices.data()), "the first index outside is named");
    require(found >= 0 || sums.back() == sums[0], "a sum depends on no order");
  }
}

void keep() {
  const int64_t n = length(), k = below(50);
  const Array<int32_t> indices(k);
  for (int64_t i = 0; i < k; ++i)
    indices[i] = static_cast<int32_t>(below(8) && n ? below(n) : draw());
  const Array<float> values = numbers(k), errors = numbers(k), residual = numbers(n);
  keep_cpu({indices.data(), values.data(), errors.data(), k, residual.data(), n});
}

void dense() {
  const int64_t n = length(), parts = 1 + below(4);
  const Float type = below(2) ? Float::float16 : Float::bfloat16;
  const float scale = std::exp2(-static_cast<float>(below(20)));
  const Array<float> gradient = numbers(n), residual = numbers(n);
  const Array<uint16_t> received = halves(n * parts);
  std::vector<Array<float>> residuals, sums;
  std::vector<Array<uint16_t>> written;
  for (const auto& each : {forward, backward, threads}) {
    residuals.emplace_back(residual);
    written.emplace_back(n);
    sums.emplace_back(n);
    dense_write_cpu({type, scale, 1 / scale}, gradient.data(), residuals.back().data(),
                    written.back().data(), n, each);
    dense_add_cpu(type, received.data(), parts, 0.5f, sums.back().data(), n, each);
    require(
        residuals.back() == residuals[0] && written.back() == written[0] && sums.back() == sums[0],
        "a dense vector depends on no order");
  }
}

void low_bits() {
  const LowBits layout{1 << below(4), 1 + length()};
  const int64_t shards = 1 + below(3), n = shards * layout.entries, real = below(n + 200) - 100;
  const Array<float> gradient = numbers(n), residual = numbers(n);
  const Array<int32_t> received(shards * layout.words());
  for (int64_t i = 0; i < received.size(); ++i) received[i] = static_cast<int32_t>(draw());
  std::vector<Array<float>> residuals, numbers_read;
  std::vector<Array<int32_t>> words, sums;
  for (const auto& each : {forward, backward, threads}) {
    residuals.emplace_back(residual);
    words.emplace_back(shards * layout.words());
    sums.emplace_back(layout.words());
    numbers_read.emplace_back(n);
    float* kept = residuals.back().data();
    low_bits_write_cpu(layout, shards, gradient.data(), kept, real, words.back().data(), each);
    low_bits_add_cpu(layout, shards, received.data(), kept, real, sums.back().data(), each);
    low_bits_read_cpu(layout, shards, received.data(), 0.5f, numbers_read.back().data(), each);
    require(residuals.back() == residuals[0] && words.back() == words[0] &&
                sums.back() == sums[0] && numbers_read.back() == numbers_read[0],
            "codes depend on no order");
  }
}

void norms_and_lars() {
  const int64_t count = 1 + below(5);
  std::vector<Array<float>> weights, momenta, gradients;
  std::vector<Array<uint16_t>> narrow;
  std::vector<Vector> vectors;
  std::vector<LarsVector> updates;
  for (auto* arrays : {&weights, &momenta, &gradients}) arrays->reserve(count);
  narrow.reserve(count);
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = length();
    gradients.push_back(numbers(n));
    weights.push_back(numbers(n));
    momenta.push_back(numbers(n));
    narrow.push_back(halves(n));
    const Float type = float_type();
    vectors.push_back(
        {type == Float::float32 ? static_cast<const void*>(gradients[i].data()) : narrow[i].data(),
         n, type});
    chunks += vectors[i].chunks();
    updates.push_back(
        {weights[i].data(), momenta[i].data(), gradients[i].data(), n, below(2) ? 0.1f : 0.0f});
  }
  std::vector<Array<float>> squares;
  for (const auto& each : {forward, backward, threads}) {
    const Array<float> sums(chunks);
    squares.emplace_back(count);
    norms_cpu(vectors.data(), count, sums.data(), squares.back().data(), each);
    require(squares.back() == squares[0], "a norm depends on no order");
  }
  const Array<float> rates = numbers(count);
  lars_cpu(updates.data(), rates.data(), count, {0.9f, below(2) == 1}, threads);
}

}  // namespace

int main(int, char** arguments) {
  draw.seed(std::strtoull(arguments[1], nullptr, 10));
  const int64_t count = std::strtoll(arguments[2], nullptr, 10);
  for (int64_t n = 0; n < count; ++n) {
    switch (below(6)) {
      case 0:
        if (below(2))
          select(numbers(length()), Float::float32);
        else
          select(halves(length()), below(2) ? Float::float16 : Float::bfloat16);
        break;
      case 1:
        merge();
        break;
      case 2:
        keep();
        break;
      case 3:
        dense();
        break;
      case 4:
        low_bits();
        break;
      default:
        norms_and_lars();
    }
  }
  std::printf("ran %lld\n", static_cast<long long>(count));
}
