// The wire formats on CPUs.
#include "kernels/wire.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/clones.h"
#include "kernels/wire_float.h"

namespace tfcommx {
namespace {

template <uint16_t (*convert)(float)>
void narrow(const float* values, int64_t k, int32_t* words) {
  uint16_t* narrowed = reinterpret_cast<uint16_t*>(words);
  for (int64_t i = 0; i < k; ++i) narrowed[i] = convert(values[i]);
  // Written, because equal entries must have equal bytes, and the memory is not cleared
  if (k % 2) narrowed[k] = 0;
}

template <float (*convert)(uint16_t)>
void widen(const int32_t* words, int64_t k, float* values) {
  const uint16_t* narrowed = reinterpret_cast<const uint16_t*>(words);
  for (int64_t i = 0; i < k; ++i) values[i] = convert(narrowed[i]);
}

// Whether each offset is above the one before it.
TFCOMMX_CLONES
bool ascend(const uint16_t* offsets, int64_t count) {
  uint16_t wrong = 0;  // as wide as the offsets, so that as many fit a register
  for (int64_t i = 1; i < count; ++i) wrong |= offsets[i] <= offsets[i - 1];
  return wrong == 0;
}

// Adds `first` to the indices of one buffer; false if they are not k in [0, size), or do not ascend
// where the format's do.
bool decode_positions(const WireLayout& layout, const int32_t* words, int64_t first,
                      int32_t* indices) {
  if (layout.places == Positions::elias)
    return elias_decode_cpu(layout.elias(), words, first, indices);
  if (layout.places == Positions::pair) {
    bool outside = false;
    for (int64_t i = 0; i < layout.k; ++i) {
      outside |= words[i] < 0 || words[i] >= layout.size;
      indices[i] = static_cast<int32_t>(first + words[i]);
    }
    return !outside;
  }
  const uint16_t* offsets = reinterpret_cast<const uint16_t*>(words + layout.counts());
  int64_t done = 0;
  for (int64_t block = 0; block < layout.counts(); ++block) {
    const int64_t count = words[block], start = block * 65536;
    if (count < 0 || done + count > layout.k || !ascend(offsets + done, count)) return false;
    for (int64_t i = done; i < done + count; ++i)
      indices[i] = static_cast<int32_t>(first + start + offsets[i]);
    done += count;
    if (count && start + offsets[done - 1] >= layout.size) return false;
  }
  return done == layout.k;
}

// Returns the position of the first index that is refused; -1: none.
int64_t encode_positions(const WireLayout& layout, const int32_t* indices, int32_t* words) {
  if (layout.places == Positions::elias) return elias_encode_cpu(layout.elias(), indices, words);
  const bool blocks = layout.places == Positions::block;
  int64_t before = -1;
  std::fill_n(words, layout.counts(), 0);
  uint16_t* offsets = reinterpret_cast<uint16_t*>(words + layout.counts());
  for (int64_t i = 0; i < layout.k; ++i) {
    const int64_t index = indices[i];
    if (index < 0 || index >= layout.size || (blocks && index <= before)) return i;
    if (blocks) {
      ++words[index >> 16];
      offsets[i] = index & 0xffff;
      before = index;
    } else {
      words[i] = indices[i];
    }
  }
  if (blocks && layout.k % 2) offsets[layout.k] = 0;
  return -1;
}

void encode_values(const WireLayout& layout, const float* values, int32_t* words) {
  switch (layout.type) {
    case Values::float32:
      std::memcpy(words, values, 4 * layout.k);
      break;
    case Values::float16:
      narrow<to_float16>(values, layout.k, words);
      break;
    case Values::bfloat16:
      narrow<to_bfloat16>(values, layout.k, words);
      break;
    case Values::int8:
    case Values::int4:
      codes_write_cpu(layout.codes(), values, words);
  }
}

void decode_values(const WireLayout& layout, const int32_t* words, float* values) {
  switch (layout.type) {
    case Values::float32:
      std::memcpy(values, words, 4 * layout.k);
      break;
    case Values::float16:
      widen<from_float16>(words, layout.k, values);
      break;
    case Values::bfloat16:
      widen<from_bfloat16>(words, layout.k, values);
      break;
    case Values::int8:
    case Values::int4:
      codes_read_cpu(layout.codes(), words, values);
  }
}

}  // namespace

int64_t wire_encode_cpu(const WireLayout& layout, const int32_t* indices, const float* values,
                        int32_t* words) {
  const int64_t refused = encode_positions(layout, indices, words);
  if (refused < 0) encode_values(layout, values, words + layout.counts() + layout.positions());
  return refused;
}

int64_t wire_decode_cpu(const WireLayout& layout, const int32_t* words, int64_t buffers,
                        int64_t shards, int32_t* indices, float* values,
                        const ParallelFor& parallel_for) {
  std::atomic<int64_t> bad{buffers};
  parallel_for(buffers, [&](int64_t buffer) {
    const int32_t* mine = words + buffer * layout.words();
    const int32_t* last = mine + layout.counts() + layout.positions();
    float* to = values + buffer * layout.k;
    const int64_t first = buffer / (buffers / shards) * layout.size;
    if (!decode_positions(layout, mine, first, indices + buffer * layout.k)) {
      // The first of several, whichever thread finds it, so that all ranks report the same
      int64_t least = bad.load();
      while (buffer < least && !bad.compare_exchange_weak(least, buffer)) {
      }
    }
    decode_values(layout, last, to);
  });
  return bad == buffers ? -1 : bad.load();
}

}  // namespace tfcommx
