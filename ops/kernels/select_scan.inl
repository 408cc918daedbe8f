// The tile loop, written once over a vector type V; included by one .cc file per instruction set,
// each of which defines V:
//   lanes, Values, load(pointer to float / Half / Bfloat), store, add, multiply(values, float),
//   at_least(values, key) -> one bit a lane, mix(bits, values for set bits, values for the others),
//   append(list, length, bits, position of lane 0) -> new length.
// Everything here has internal linkage: the same names are compiled for several instruction sets.

namespace tfcommx {
namespace {

inline uint32_t append_each(uint16_t* list, uint32_t length, uint32_t bits, uint32_t first) {
  for (; bits; bits &= bits - 1)
    list[length++] = static_cast<uint16_t>(first + __builtin_ctz(bits));
  return length;
}

template <class V, class T, bool kResidual, bool kVelocity>
Found scan(const void* gradient, float* residual, float* velocity, float momentum, uint32_t count,
           uint32_t threshold, uint16_t* candidates, uint16_t* not_finite) {
  const T* g = static_cast<const T*>(gradient);
  Found found{0, 0};
  uint32_t i = 0;
  for (; i + V::lanes <= count; i += V::lanes) {
    auto moved = V::load(g + i);
    if (kVelocity) moved = V::add(V::multiply(V::load(velocity + i), momentum), moved);
    const auto acc = kResidual ? V::add(moved, V::load(residual + i)) : moved;
    const uint32_t bad = V::at_least(acc, kNotFinite);
    if (__builtin_expect(bad != 0, 0)) {
      for (uint32_t rest = bad; rest; rest &= rest - 1)
        not_finite[found.not_finite++] = i + __builtin_ctz(rest);
      if (kResidual) V::store(residual + i, V::mix(bad, V::load(residual + i), acc));
      if (kVelocity) V::store(velocity + i, V::mix(bad, V::load(velocity + i), moved));
    } else {
      if (kResidual) V::store(residual + i, acc);
      if (kVelocity) V::store(velocity + i, moved);
    }
    found.candidates =
        V::append(candidates, found.candidates, V::at_least(acc, threshold) & ~bad, i);
  }
  for (; i < count; ++i) {
    float moved = widen(g[i]);
    if (kVelocity) moved = momentum * velocity[i] + moved;
    const float acc = kResidual ? moved + residual[i] : moved;
    const uint32_t key = key_of(acc);
    if (key >= kNotFinite) {
      not_finite[found.not_finite++] = i;
      continue;
    }
    if (key >= threshold) candidates[found.candidates++] = i;
    if (kResidual) residual[i] = acc;
    if (kVelocity) velocity[i] = moved;
  }
  return found;
}

template <class V>
Scans table() {
  return {
      {scan<V, float, false, false>, scan<V, Half, false, false>, scan<V, Bfloat, false, false>},
      {scan<V, float, true, false>, scan<V, Half, true, false>, scan<V, Bfloat, true, false>},
      {scan<V, float, true, true>, scan<V, Half, true, true>, scan<V, Bfloat, true, true>}};
}

}  // namespace
}  // namespace tfcommx
