// The two loops over pixels of augment_cpu.cc: blend two rows of the image, then pairs of
// neighbours in the blended row.
//
// Fixed point: rows are blended to 1/64 of a grey level, then neighbours with weights of 1/16384,
// so that values differ from exact interpolation by less than 0.05 of a level, and all instruction
// sets give the same bits.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/augment.h"

namespace tfcommx {

constexpr int32_t kGroup = 16;  // values of an output row that AVX-512 makes at once
constexpr int32_t kReach = 64;  // elements of the blended row that one group can choose from
// Elements after a blended row that may be written, or read and count nothing.
constexpr int64_t kSlack = 64;
// Blended before they are read: a load that meets two stores on their way must wait for both.
constexpr int32_t kRows = 8;

// The horizontal table of one image. AVX-512 takes values in groups; the others take pixels.
struct Columns {
  // by pixel: element of the blended row where the left neighbour starts
  std::vector<int32_t> at;
  std::vector<int16_t> pair;   // by pixel, eight: (left, right) weights of 1/16384, four times over
  std::vector<int32_t> first;  // by group: the lowest element that it reads
  // by group, 32: where after `first` its values' left and right neighbours are; weights
  std::vector<int16_t> from, weight;
  std::vector<float> scale, bias;  // by value of the row, filled up to whole groups
};

// Blends n elements of rows a and b, weight of b 1/32768, to 1/64 of a grey level; returns how many
// were done, from the start.
using Blend = int64_t (*)(const uint8_t* a, const uint8_t* b, int32_t weight, int64_t n,
                          int16_t* out);

// Makes `count` rows of the output, from `out` on, of as many blended rows that start every `pitch`
// elements. Returns how many pixels of each were done, from the left.
using Rows = int32_t (*)(const int16_t* blended, int64_t pitch, int32_t count,
                         const Columns& columns, const Target& target, uint8_t* out);

struct RowCode {
  Blend blend;
  Rows rows[4];  // by Pixel
};

#if defined(__x86_64__)
const RowCode& rows_avx2();    // three channels
const RowCode& rows_avx512();  // any number of channels; needs the tables by group
#endif

}  // namespace tfcommx
