// Decodes hostile buffers of all wire formats, and encodes hostile entries, under sanitizers: nothing
// outside a buffer is read or written, and what is accepted has its indices in range and order.
//
//   wire_fuzz SEED COUNT
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "kernels/wire.h"

using namespace tfcommx;

namespace {

std::mt19937_64 draw;

int64_t below(int64_t n) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(n)); }

// Of a size that memory checkers know exactly.
template <class T>
std::unique_ptr<T[]> exactly(int64_t n) {
  return std::unique_ptr<T[]>(new T[n]());
}

void each(int64_t turns, const std::function<void(int64_t)>& body) {
  for (int64_t i = 0; i < turns; ++i) body(i);
}

int32_t hostile_word() {
  switch (below(6)) {
    case 0:
      return 0;
    case 1:
      return -1;
    case 2:
      return static_cast<int32_t>(below(70000));
    case 3:
      return INT32_MAX - static_cast<int32_t>(below(3));
    case 4:
      return INT32_MIN + static_cast<int32_t>(below(3));
    default:
      return static_cast<int32_t>(draw());
  }
}

bool decodes_safely() {
  const Positions places = static_cast<Positions>(below(3));
  const Values type = static_cast<Values>(below(5));
  const int64_t size = 1 + (below(4) ? below(2000) : below(200000));
  const int64_t k = below(std::min<int64_t>(size, 300) + 1);
  const WireLayout layout = {k, size, type, places};
  const int64_t shards = 1 + below(3), buffers = shards * (1 + below(3));
  const int64_t words = layout.words() * buffers;
  auto sent = exactly<int32_t>(words);
  if (below(2)) {  // whole buffers, some words of which are changed
    auto indices = exactly<int32_t>(k);
    auto values = exactly<float>(k);
    for (int64_t i = 0; i < k; ++i) {
      indices[i] = static_cast<int32_t>(i * (size / std::max<int64_t>(k, 1)));
      values[i] = static_cast<float>(below(1000)) - 500;
    }
    for (int64_t buffer = 0; buffer < buffers; ++buffer)
      wire_encode_cpu(layout, indices.get(), values.get(), sent.get() + buffer * layout.words());
    for (int64_t n = below(4); words && n > 0; --n) sent[below(words)] = hostile_word();
  } else {
    for (int64_t i = 0; i < words; ++i) sent[i] = hostile_word();
  }
  auto indices = exactly<int32_t>(buffers * k);
  auto values = exactly<float>(buffers * k);
  const int64_t bad =
      wire_decode_cpu(layout, sent.get(), buffers, shards, indices.get(), values.get(), each);
  if (bad < -1 || bad >= buffers) return false;
  for (int64_t i = 0; bad == -1 && i < buffers * k; ++i) {
    if (indices[i] < 0 || indices[i] >= shards * size) return false;
    if (places != Positions::pair && i % k && indices[i] <= indices[i - 1]) return false;
  }
  return true;
}

bool encodes_safely() {
  const Positions places = static_cast<Positions>(below(3));
  const int64_t size = below(8) ? 1 + below(below(2) ? 300 : 200000) : 0, k = below(300);
  const WireLayout layout = {k, size, static_cast<Values>(below(5)), places};
  auto indices = exactly<int32_t>(k), read = exactly<int32_t>(k);
  auto values = exactly<float>(k);
  for (int64_t i = 0; i < k; ++i) {
    indices[i] = size ? static_cast<int32_t>(below(size)) : 0;
    values[i] = float_of(static_cast<uint32_t>(draw()));
  }
  if (below(4)) {
    std::sort(indices.get(), indices.get() + k);
    std::fill(std::unique(indices.get(), indices.get() + k), indices.get() + k, INT32_MAX);
  }
  if (k && below(2)) indices[below(k)] = hostile_word();
  bool right = true;
  for (int64_t i = 0; i < k; ++i) {
    right &= indices[i] >= 0 && indices[i] < size;
    right &= places == Positions::pair || i == 0 || indices[i] > indices[i - 1];
  }
  auto words = exactly<int32_t>(layout.words());
  const int64_t bad = wire_encode_cpu(layout, indices.get(), values.get(), words.get());
  if (bad < -1 || bad >= k || (bad == -1) != right) return false;
  if (bad >= 0) return true;
  return wire_decode_cpu(layout, words.get(), 1, 1, read.get(), values.get(), each) == -1 &&
         std::equal(indices.get(), indices.get() + k, read.get());
}

}  // namespace

int main(int, char** arguments) {
  draw.seed(std::strtoull(arguments[1], nullptr, 10));
  const int64_t count = std::strtoll(arguments[2], nullptr, 10);
  for (int64_t n = 0; n < count; ++n) {
    if (!decodes_safely() || !encodes_safely()) {
      std::printf("buffer %lld was accepted with indices out of range or order, or refused\n",
                  static_cast<long long>(n));
      return 1;
    }
  }
  std::printf("decoded %lld\n", static_cast<long long>(count));
}
