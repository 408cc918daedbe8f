// The tile loop, written once over a vector type V; included by one .cc file per instruction set, each of which defines V:
//   lanes, Values, load(pointer to float / Half / Bfloat), store, add, at_least(values, key) -> one bit a lane,
//   mix(bits, where set, where not).
// Everything here has internal linkage: the same names are compiled for several instruction sets.

namespace tfcommx {
namespace {

template <class V, class T, bool kResidual>
Found scan(const void* gradient, float* residual, uint32_t count, uint32_t threshold, uint16_t* candidates, uint16_t* not_finite) {
  const T* g = static_cast<const T*>(gradient);
  Found found{0, 0};
  uint32_t i = 0;
  for (; i + V::lanes <= count; i += V::lanes) {
    auto acc = V::load(g + i);
    if (kResidual) acc = V::add(acc, V::load(residual + i));
    uint32_t reached = V::at_least(acc, threshold);
    if (__builtin_expect(reached == 0, 1)) {
      if (kResidual) V::store(residual + i, acc);
      continue;
    }
    const uint32_t bad = V::at_least(acc, kNotFinite);
    if (kResidual) V::store(residual + i, V::mix(bad, V::load(residual + i), acc));
    for (reached &= ~bad; reached; reached &= reached - 1) candidates[found.candidates++] = i + __builtin_ctz(reached);
    for (uint32_t rest = bad; rest; rest &= rest - 1) not_finite[found.not_finite++] = i + __builtin_ctz(rest);
  }
  for (; i < count; ++i) {
    const float acc = kResidual ? widen(g[i]) + residual[i] : widen(g[i]);
    const uint32_t key = key_of(acc);
    if (key >= kNotFinite) {
      not_finite[found.not_finite++] = i;
      continue;
    }
    if (key >= threshold) candidates[found.candidates++] = i;
    if (kResidual) residual[i] = acc;
  }
  return found;
}

template <class V>
Scans table() {
  return {{scan<V, float, false>, scan<V, Half, false>, scan<V, Bfloat, false>},
          {scan<V, float, true>, scan<V, Half, true>, scan<V, Bfloat, true>}};
}

}  // namespace
}  // namespace tfcommx
