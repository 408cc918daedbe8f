// The one source of chance in the kernels: an integer hash that reference.py computes too.
#pragma once

#include <cstdint>

#include "kernels/device.h"

namespace tfcommx {

// Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014 (splitmix64's
// first output).
TFCOMMX_DEVICE inline uint64_t splitmix64(uint64_t seed) {
  uint64_t z = seed + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// A number in [0, count), 1 <= count < 2^31: equally likely up to 2^-32.
TFCOMMX_DEVICE inline int64_t below(uint64_t seed, int64_t count) {
  return static_cast<int64_t>(splitmix64(seed) >> 1) % count;
}

}  // namespace tfcommx
