// See augment.h, and augment_rows.h for the arithmetic.
#include "kernels/augment.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/augment_rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tfcommx {
namespace {

// Values that a thread makes at once: 5 to 50 microseconds, far more than taking a turn.
constexpr int64_t kTurn = 1 << 17;
// Bytes; a core's caches hold less, so its consumer reads it from memory in any case.
constexpr int64_t kLargeBatch = 8 << 20;

uint64_t mix(uint64_t x) {  // splitmix64's finaliser
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Where output position i of `out` falls in [0, in): the left neighbour, and the weight of the
// right one in [0, 1).
void neighbours(int32_t i, int32_t out, int32_t in, int32_t* left, float* weight) {
  const float at = (i + 0.5f) * (static_cast<float>(in) / out) - 0.5f;
  const float floor = std::floor(at);
  *left = static_cast<int32_t>(floor);
  *weight = at - floor;
  if (*left < 0) *left = 0, *weight = 0;
  if (*left >= in - 1) *left = in - 1, *weight = 0;
}

uint16_t to_half(float value) {  // round to nearest even, as F16C does
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7FFFFFFF;
  if (bits >= 0x47800000) return sign | (bits > 0x7F800000 ? 0x7E00 : 0x7C00);
  if (bits < 0x38800000) {  // subnormal: let the float unit round
    float magnitude, magic = 0.5f;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += magic;
    uint32_t rounded;
    std::memcpy(&rounded, &magnitude, 4);
    return sign | static_cast<uint16_t>(rounded - 0x3F000000);
  }
  return sign | static_cast<uint16_t>((bits + 0xC8000FFF + ((bits >> 13) & 1)) >> 13);
}

uint16_t to_bfloat16(float value) {  // values are finite here
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// level: 1/2^20 grey levels
void put(int32_t level, int c, const Target& target, uint8_t* out, int64_t at) {
  if (target.pixel == Pixel::kUint8) {
    out[at] = static_cast<uint8_t>((level + (1 << 19)) >> 20);
    return;
  }
  const float value = static_cast<float>(level) * target.scale[c] + target.bias[c];
  if (target.pixel == Pixel::kFloat) {
    reinterpret_cast<float*>(out)[at] = value;
  } else {
    reinterpret_cast<uint16_t*>(out)[at] =
        target.pixel == Pixel::kHalf ? to_half(value) : to_bfloat16(value);
  }
}

void blend_portable(const uint8_t* a, const uint8_t* b, int32_t weight, int64_t from, int64_t n,
                    int16_t* out) {
  for (int64_t i = from; i < n; ++i) {
    const int32_t difference = (b[i] - a[i]) * 64;
    out[i] = static_cast<int16_t>(a[i] * 64 + ((difference * weight + 0x4000) >> 15));
  }
}

void rows_portable(const int16_t* blended, int64_t pitch, int32_t count, const Columns& columns,
                   int32_t from, const Target& target, uint8_t* out) {
  const int c = target.channels;
  for (int64_t y = 0; y < count; ++y, blended += pitch) {
    for (int32_t x = from; x < target.width; ++x) {
      const int16_t* left = blended + columns.at[x];
      for (int k = 0; k < c; ++k) {
        const int32_t level = left[k] * columns.pair[8 * x] + left[c + k] * columns.pair[8 * x + 1];
        put(level, k, target, out, (y * target.width + x) * c + k);
      }
    }
  }
}

// The tables by pixel, for the portable code and AVX2.
void fill_pixels(const Window& window, const Target& target, Columns* columns) {
  columns->at.resize(target.width);
  columns->pair.resize(8 * static_cast<size_t>(target.width));
  for (int32_t x = 0; x < target.width; ++x) {
    int32_t left;
    float weight;
    neighbours(window.flip ? target.width - 1 - x : x, target.width, window.width, &left, &weight);
    const int16_t right = static_cast<int16_t>(std::lrint(weight * 16384));
    columns->at[x] = left * target.channels;
    for (int k = 0; k < 8; k += 2) {
      columns->pair[8 * x + k] = static_cast<int16_t>(16384 - right);
      columns->pair[8 * x + k + 1] = right;
    }
  }
}

#if defined(__x86_64__)
// The tables by group, from those by pixel, for AVX-512; false if a group's neighbours lie too
// far apart.
bool fill_groups(const Target& target, Columns* columns) {
  const int c = target.channels;
  const int64_t values = static_cast<int64_t>(target.width) * c,
                groups = (values + kGroup - 1) / kGroup;
  columns->first.resize(groups);
  for (auto* table : {&columns->from, &columns->weight}) table->resize(2 * kGroup * groups);
  for (auto* table : {&columns->scale, &columns->bias}) table->resize(kGroup * groups);
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = kGroup * group, end = std::min(begin + kGroup, values);
    const int32_t one = columns->at[begin / c], other = columns->at[(end - 1) / c],
                  first = std::min(one, other);
    if (std::max(one, other) - first + 2 * c > kReach) return false;
    columns->first[group] = first;
    int64_t x = begin / c;
    int k = static_cast<int>(begin % c);
    for (int64_t v = begin; v < end; ++v) {
      const int32_t left = columns->at[x] - first + k;
      columns->from[2 * v] = static_cast<int16_t>(left);
      columns->from[2 * v + 1] = static_cast<int16_t>(left + c);
      std::memcpy(&columns->weight[2 * v], &columns->pair[8 * x], 4);
      if (target.pixel != Pixel::kUint8) {
        columns->scale[v] = target.scale[k];
        columns->bias[v] = target.bias[k];
      }
      if (++k == c) k = 0, ++x;
    }
  }
  return true;
}
#endif

#if defined(__x86_64__)
// Copies n bytes from one address divisible by 64 to another, past the caches; returns how many
// were done, from the start. The next lines are asked for because no processor predicts where the
// next record lies.
__attribute__((target("avx512f"))) int64_t copy_past_caches(const uint8_t* from, int64_t n,
                                                            uint8_t* to) {
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(from + i + 2048), _MM_HINT_NTA);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
  }
  // Streaming stores are weakly ordered: the pixels must be in memory before the turn ends
  _mm_sfence();
  return i;
}
#endif

// Fills the tables, and returns the fastest code for them that is allowed; null: the portable code.
const RowCode* choose(Code code, const Window& window, const Target& target, Columns* columns) {
  fill_pixels(window, target, columns);
#if defined(__x86_64__)
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (code == Code::kFastest && has_avx512 && fill_groups(target, columns)) return &rows_avx512();
  if (code != Code::kPortable && has_avx2 && target.channels == 3) return &rows_avx2();
#endif
  return nullptr;
}

}  // namespace

double uniform(uint64_t seed, uint64_t epoch, uint64_t sample, uint64_t draw) {
  return static_cast<double>(mix(mix(mix(mix(seed) + epoch) + sample) + draw) >> 11) * 0x1p-53;
}

Window window_of(const WindowRule& rule, uint64_t epoch, uint64_t sample, int32_t height,
                 int32_t width) {
  Window window{0, 0, height, width, 0};
  if (rule.flip) window.flip = uniform(rule.seed, epoch, sample, 0) < 0.5;
  const auto center = [&](int64_t h, int64_t w) {
    window.height = static_cast<int32_t>(std::clamp<int64_t>(h, 1, height));
    window.width = static_cast<int32_t>(std::clamp<int64_t>(w, 1, width));
    window.top = (height - window.height) / 2;
    window.left = (width - window.width) / 2;
  };
  if (rule.crop == Crop::kWhole) return window;
  if (rule.crop == Crop::kCenter) {
    const int64_t side = std::lrint(std::min(height, width) * rule.center);
    center(side, side);
    return window;
  }
  const double low = std::log(rule.aspect_low), high = std::log(rule.aspect_high);
  for (uint64_t attempt = 0; attempt < 10; ++attempt) {
    const auto draw = [&](uint64_t k) {
      return uniform(rule.seed, epoch, sample, 1 + 4 * attempt + k);
    };
    const double area = static_cast<double>(height) * width *
                        (rule.area_low + draw(0) * (rule.area_high - rule.area_low));
    const double aspect = std::exp(low + draw(1) * (high - low));
    const int64_t w = std::lrint(std::sqrt(area * aspect)),
                  h = std::lrint(std::sqrt(area / aspect));
    if (w < 1 || h < 1 || w > width || h > height) continue;
    window.height = static_cast<int32_t>(h);
    window.width = static_cast<int32_t>(w);
    window.top = static_cast<int32_t>(draw(2) * (height - h + 1));
    window.left = static_cast<int32_t>(draw(3) * (width - w + 1));
    return window;
  }
  const double aspect = static_cast<double>(width) / height;
  if (aspect < rule.aspect_low) {
    center(std::lrint(width / rule.aspect_low), width);
  } else if (aspect > rule.aspect_high) {
    center(height, std::lrint(height * rule.aspect_high));
  }
  return window;
}

size_t pixel_bytes(Pixel pixel) {
  return pixel == Pixel::kUint8 ? 1 : pixel == Pixel::kFloat ? 4 : 2;
}

Image image_of(const Sample& sample) {
  return {sample.pixels, sample.record.height, sample.record.width, sample.record.channels};
}

void augment(const Image& image, const Window& window, const Target& wanted, void* out_pointer,
             Code most) {
  uint8_t* out = static_cast<uint8_t*>(out_pointer);
  const int c = image.channels;
  const bool whole = !window.flip && window.height == image.height && window.width == image.width;
  if (whole && wanted.pixel == Pixel::kUint8 && wanted.height == image.height &&
      wanted.width == image.width) {
    const int64_t bytes = static_cast<int64_t>(image.height) * image.width * c;
    int64_t done = 0;
#if defined(__x86_64__)
    static const bool has_avx512 = __builtin_cpu_supports("avx512f");
    const bool aligned =
        (reinterpret_cast<uintptr_t>(image.pixels) | reinterpret_cast<uintptr_t>(out)) % 64 == 0;
    if (most == Code::kFastest && has_avx512 && wanted.past_caches && aligned)
      done = copy_past_caches(image.pixels, bytes, out);
#endif
    std::memcpy(out + done, image.pixels + done, bytes - done);
    return;
  }

  thread_local std::vector<int16_t> blended;
  thread_local Columns columns;
  thread_local Target target;
  target = wanted;
  for (float& scale : target.scale) scale *= 0x1p-20f;  // a power of two: exact
  const int64_t n = static_cast<int64_t>(window.width) * c, pitch = (n + kSlack + 31) / 32 * 32;
  blended.resize(pitch * kRows);
  // Read with weight 0.
  for (int32_t y = 0; y < kRows; ++y) std::fill_n(blended.begin() + y * pitch + n, kSlack, 0);
  const RowCode* code = choose(most, window, target, &columns);

  const int64_t stride = static_cast<int64_t>(image.width) * c;
  const int64_t row_bytes = static_cast<int64_t>(target.width) * c * pixel_bytes(target.pixel);
  const uint8_t* corner =
      image.pixels + window.top * stride + static_cast<int64_t>(window.left) * c;
  for (int32_t y = 0, asked = 0; y < target.height; y += kRows) {
    const int32_t count = std::min(kRows, target.height - y);
    // A window's rows are no stream that processors predict: ask for those of the next turn.
    const int64_t wanted_rows =
        2 + static_cast<int64_t>(y + 2 * kRows) * window.height / target.height;
    for (; asked < std::min<int64_t>(wanted_rows, window.height); ++asked) {
      for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(corner + asked * stride + i);
    }
    for (int32_t i = 0; i < count; ++i) {
      int32_t above;
      float weight;
      neighbours(y + i, target.height, window.height, &above, &weight);
      const uint8_t* a = corner + above * stride;
      const uint8_t* b = above + 1 < window.height ? a + stride : a;
      const int32_t w = std::min(32767, static_cast<int32_t>(std::lrint(weight * 32768)));
      int16_t* row = blended.data() + i * pitch;
      blend_portable(a, b, w, code == nullptr ? 0 : code->blend(a, b, w, n, row), n, row);
    }
    uint8_t* to = out + y * row_bytes;
    const Rows fast = code == nullptr ? nullptr : code->rows[static_cast<int>(target.pixel)];
    const int32_t x = fast == nullptr ? 0 : fast(blended.data(), pitch, count, columns, target, to);
    if (x < target.width) rows_portable(blended.data(), pitch, count, columns, x, target, to);
  }
}

void augment_batch(const std::vector<Image>& images, const std::vector<Window>& windows,
                   const Target& wanted, void* out, const ParallelFor& parallel_for, Code code) {
  const int64_t values = static_cast<int64_t>(wanted.height) * wanted.width * wanted.channels;
  const int64_t bytes = values * pixel_bytes(wanted.pixel);
  Target target = wanted;
  target.past_caches = bytes * static_cast<int64_t>(images.size()) >= kLargeBatch;
  const int64_t n = images.size(),
                turn_images = std::max<int64_t>(1, kTurn / std::max<int64_t>(1, values));
  parallel_for((n + turn_images - 1) / turn_images, [&](int64_t turn) {
    for (int64_t i = turn * turn_images; i < std::min(n, (turn + 1) * turn_images); ++i) {
      augment(images[i], windows[i], target, static_cast<uint8_t*>(out) + i * bytes, code);
    }
  });
}

}  // namespace tfcommx
