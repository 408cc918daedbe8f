// The sum of a chunk, written once over a vector type V; included by one .cc file per instruction
// set, each of which defines V:
//   lanes, Values, zero(), load(pointer to float / Half / Bfloat), add_square(sum, values), store.
// Everything here has internal linkage: the same names are compiled for several instruction sets.
#include "kernels/select_scan.h"

namespace tfcommx {
namespace {

template <class V, class T>
float chunk_sum(const void* entries, int64_t count) {
  constexpr int64_t kParts = kLanes / V::lanes;
  const T* x = static_cast<const T*>(entries);
  typename V::Values sums[kParts];
  for (int64_t part = 0; part < kParts; ++part) sums[part] = V::zero();
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t part = 0; part < kParts; ++part)
      sums[part] = V::add_square(sums[part], V::load(x + i + part * V::lanes));
  if (whole < count) {  // zeros change no sum
    T last[kLanes] = {};
    std::memcpy(last, x + whole, (count - whole) * sizeof(T));
    for (int64_t part = 0; part < kParts; ++part)
      sums[part] = V::add_square(sums[part], V::load(last + part * V::lanes));
  }
  float lanes[kLanes];
  for (int64_t part = 0; part < kParts; ++part) V::store(lanes + part * V::lanes, sums[part]);
  fold(lanes, kLanes);
  return lanes[0];
}

template <class V>
ChunkSums table() {
  return {{chunk_sum<V, float>, chunk_sum<V, Half>, chunk_sum<V, Bfloat>}};
}

}  // namespace
}  // namespace tfcommx
