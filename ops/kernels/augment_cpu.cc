// See augment.h. Fixed point: rows are blended to 1/64 of a grey level, then pixels with weights of 1/16384, so that values
// differ from exact interpolation by less than 0.05 of a level, and the portable and the AVX2 code give the same bits.
#include "kernels/augment.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define TFCOMMX_AVX2 __attribute__((target("avx2,f16c")))
#endif

namespace tfcommx {
namespace {

bool has_avx2() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return has;
#else
  return false;
#endif
}

uint64_t mix(uint64_t x) {  // splitmix64's finaliser
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Where output position i of `out` falls in [0, in): the left neighbour, and the weight of the right one in [0, 1).
void neighbours(int32_t i, int32_t out, int32_t in, int32_t* left, float* weight) {
  const float at = (i + 0.5f) * (static_cast<float>(in) / out) - 0.5f;
  const float floor = std::floor(at);
  *left = static_cast<int32_t>(floor);
  *weight = at - floor;
  if (*left < 0) *left = 0, *weight = 0;
  if (*left >= in - 1) *left = in - 1, *weight = 0;
}

struct Columns {              // the horizontal table of one image
  std::vector<int32_t> at;    // element of the blended row, per output column
  std::vector<int16_t> pair;  // eight per output column: (left, right) weights of 1/16384, four times over
};

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

void put(int32_t level, int c, const Target& target, uint8_t* out, int64_t at) {  // level: 1/2^20 grey levels
  if (target.pixel == Pixel::kUint8) {
    out[at] = static_cast<uint8_t>((level + (1 << 19)) >> 20);
    return;
  }
  const float value = static_cast<float>(level) * target.scale[c] + target.bias[c];
  if (target.pixel == Pixel::kFloat) {
    reinterpret_cast<float*>(out)[at] = value;
  } else {
    reinterpret_cast<uint16_t*>(out)[at] = target.pixel == Pixel::kHalf ? to_half(value) : to_bfloat16(value);
  }
}

void blend_portable(const uint8_t* a, const uint8_t* b, int32_t weight, int64_t from, int64_t n, int16_t* out) {
  for (int64_t i = from; i < n; ++i) {
    const int32_t difference = (b[i] - a[i]) * 64;
    out[i] = static_cast<int16_t>(a[i] * 64 + ((difference * weight + 0x4000) >> 15));
  }
}

void columns_portable(const int16_t* row, const Columns& columns, int32_t from, const Target& target, uint8_t* out, int64_t at) {
  const int c = target.channels;
  for (int32_t x = from; x < target.width; ++x) {
    const int16_t* left = row + columns.at[x];
    for (int k = 0; k < c; ++k) {
      put(left[k] * columns.pair[8 * x] + left[c + k] * columns.pair[8 * x + 1], k, target, out, at + static_cast<int64_t>(x) * c + k);
    }
  }
}

#if defined(__x86_64__)
TFCOMMX_AVX2 int64_t blend_avx2(const uint8_t* a, const uint8_t* b, int32_t weight, int64_t n, int16_t* out) {
  const __m256i w = _mm256_set1_epi16(static_cast<int16_t>(weight));
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i)));
    const __m256i y = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i)));
    const __m256i step = _mm256_mulhrs_epi16(_mm256_slli_epi16(_mm256_sub_epi16(y, x), 6), w);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_add_epi16(_mm256_slli_epi16(x, 6), step));
  }
  return i;
}

// Two output pixels of three channels at a time; a store writes four values, so the last pair of a row is left to the caller.
template <Pixel kPixel>
TFCOMMX_AVX2 int32_t columns_avx2(const int16_t* row, const Columns& columns, const Target& target, uint8_t* out, int64_t at) {
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, -1, -1, -1, -1));
  const __m256i half = _mm256_set1_epi32(1 << 19);
  __m256 scale = _mm256_setzero_ps(), bias = _mm256_setzero_ps();
  if (kPixel != Pixel::kUint8) {
    const float* s = target.scale.data();
    const float* o = target.bias.data();
    scale = _mm256_setr_ps(s[0], s[1], s[2], 0, s[0], s[1], s[2], 0);
    bias = _mm256_setr_ps(o[0], o[1], o[2], 0, o[0], o[1], o[2], 0);
  }
  int32_t x = 0;
  for (; x + 2 < target.width; x += 2, at += 6) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + columns.at[x]));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + columns.at[x + 1]));
    const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns.pair.data() + 8 * x));
    const __m256i level = _mm256_madd_epi16(_mm256_shuffle_epi8(_mm256_set_m128i(second, first), order), weights);
    if (kPixel == Pixel::kUint8) {
      const __m256i rounded = _mm256_srai_epi32(_mm256_add_epi32(level, half), 20);
      const __m256i narrow = _mm256_packus_epi16(_mm256_packus_epi32(rounded, rounded), _mm256_setzero_si256());
      const int32_t a = _mm256_extract_epi32(narrow, 0), b = _mm256_extract_epi32(narrow, 4);
      std::memcpy(out + at, &a, 4);
      std::memcpy(out + at + 3, &b, 4);
      continue;
    }
    const __m256 value = _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(level), scale), bias);
    if (kPixel == Pixel::kFloat) {
      float* to = reinterpret_cast<float*>(out) + at;
      _mm_storeu_ps(to, _mm256_castps256_ps128(value));
      _mm_storeu_ps(to + 3, _mm256_extractf128_ps(value, 1));
      continue;
    }
    __m128i narrow;
    if (kPixel == Pixel::kHalf) {
      narrow = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
    } else {
      const __m256i bits = _mm256_castps_si256(value);
      const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i up = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), even), 16);
      const __m256i packed = _mm256_packus_epi32(up, up);
      narrow = _mm_unpacklo_epi64(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
    }
    uint16_t* to = reinterpret_cast<uint16_t*>(out) + at;
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), narrow);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 3), _mm_unpackhi_epi64(narrow, narrow));
  }
  return x;
}

TFCOMMX_AVX2 void copy_avx2(const uint8_t* from, uint8_t* to, int64_t n) {
  int64_t i = 0;
  for (; i + 128 <= n; i += 128) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 64));
    const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 96));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 64), c);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 96), d);
  }
  std::memcpy(to + i, from + i, n - i);
}
#endif

}  // namespace

const Record* record_at(const uint8_t* base, int64_t low, int64_t length, int64_t at, int64_t sample) {
  const int64_t head = static_cast<int64_t>(sizeof(Record));
  if (at < low || at % 64 || at > length - head) return nullptr;
  const Record* record = reinterpret_cast<const Record*>(base + at);
  if (record->sample != sample || record->height < 1 || record->width < 1 || record->channels < 1 || record->channels > 4) return nullptr;
  if (record->bytes != static_cast<int64_t>(record->height) * record->width * record->channels) return nullptr;
  return record->bytes <= length - head - at ? record : nullptr;
}

const Record* find(const uint8_t* slab, int64_t sample) {
  const SlabHeader* header = reinterpret_cast<const SlabHeader*>(slab);
  const int64_t* index = reinterpret_cast<const int64_t*>(slab + header->index_at);
  const int64_t at = __atomic_load_n(index + sample, __ATOMIC_ACQUIRE);
  return at ? record_at(slab, header->data_at, header->length, at, sample) : nullptr;
}

uint32_t crc32(uint32_t crc, const uint8_t* bytes, size_t length) {
  struct Tables {
    uint32_t t[8][256];
    Tables() {
      for (uint32_t i = 0; i < 256; ++i) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) value = value & 1 ? 0xEDB88320u ^ (value >> 1) : value >> 1;
        t[0][i] = value;
      }
      for (uint32_t i = 0; i < 256; ++i) {
        for (int k = 1; k < 8; ++k) t[k][i] = t[0][t[k - 1][i] & 255] ^ (t[k - 1][i] >> 8);
      }
    }
  };
  static const Tables tables;
  const auto& t = tables.t;
  crc = ~crc;
  for (; length >= 8; bytes += 8, length -= 8) {  // little-endian
    uint32_t low, high;
    std::memcpy(&low, bytes, 4);
    std::memcpy(&high, bytes + 4, 4);
    low ^= crc;
    crc = t[7][low & 255] ^ t[6][(low >> 8) & 255] ^ t[5][(low >> 16) & 255] ^ t[4][low >> 24] ^ t[3][high & 255] ^
          t[2][(high >> 8) & 255] ^ t[1][(high >> 16) & 255] ^ t[0][high >> 24];
  }
  for (; length; ++bytes, --length) crc = t[0][(crc ^ *bytes) & 255] ^ (crc >> 8);
  return ~crc;
}

bool intact(const Record& record) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&record);
  return crc32(crc32(0, bytes, offsetof(Record, crc)), bytes + sizeof(Record), record.bytes) == record.crc;
}

double uniform(uint64_t seed, uint64_t epoch, uint64_t sample, uint64_t draw) {
  return static_cast<double>(mix(mix(mix(mix(seed) + epoch) + sample) + draw) >> 11) * 0x1p-53;
}

Window window_of(const Rule& rule, uint64_t epoch, uint64_t sample, int32_t height, int32_t width) {
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
    const auto draw = [&](uint64_t k) { return uniform(rule.seed, epoch, sample, 1 + 4 * attempt + k); };
    const double area = static_cast<double>(height) * width * (rule.area_low + draw(0) * (rule.area_high - rule.area_low));
    const double aspect = std::exp(low + draw(1) * (high - low));
    const int64_t w = std::lrint(std::sqrt(area * aspect)), h = std::lrint(std::sqrt(area / aspect));
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

size_t pixel_bytes(Pixel pixel) { return pixel == Pixel::kUint8 ? 1 : pixel == Pixel::kFloat ? 4 : 2; }

void augment(const Record& record, const Window& window, const Target& wanted, void* out_pointer, bool portable) {
  const uint8_t* pixels = reinterpret_cast<const uint8_t*>(&record) + sizeof(Record);
  uint8_t* out = static_cast<uint8_t*>(out_pointer);
  const bool fast = has_avx2() && !portable;
  const int c = record.channels;
  const bool whole = !window.flip && window.height == record.height && window.width == record.width;
  if (whole && wanted.pixel == Pixel::kUint8 && wanted.height == record.height && wanted.width == record.width) {
#if defined(__x86_64__)
    if (fast) return copy_avx2(pixels, out, record.bytes);
#endif
    std::memcpy(out, pixels, record.bytes);
    return;
  }

  thread_local std::vector<int16_t> row;
  thread_local Columns columns;
  thread_local Target target;
  target = wanted;
  for (float& scale : target.scale) scale *= 0x1p-20f;  // a power of two: exact
  const int64_t n = static_cast<int64_t>(window.width) * c;
  row.assign(n + 16, 0);  // the last pixel's right neighbour has weight 0, but is read
  columns.at.resize(target.width);
  columns.pair.resize(8 * static_cast<size_t>(target.width));
  for (int32_t x = 0; x < target.width; ++x) {
    int32_t left;
    float weight;
    neighbours(window.flip ? target.width - 1 - x : x, target.width, window.width, &left, &weight);
    const int16_t right = static_cast<int16_t>(std::lrint(weight * 16384));
    columns.at[x] = left * c;
    for (int k = 0; k < 8; k += 2) {
      columns.pair[8 * x + k] = static_cast<int16_t>(16384 - right);
      columns.pair[8 * x + k + 1] = right;
    }
  }

  const int64_t pitch = static_cast<int64_t>(record.width) * c;
  for (int32_t y = 0; y < target.height; ++y) {
    int32_t above;
    float weight;
    neighbours(y, target.height, window.height, &above, &weight);
    const uint8_t* a = pixels + (window.top + above) * pitch + static_cast<int64_t>(window.left) * c;
    const uint8_t* b = above + 1 < window.height ? a + pitch : a;
    const int32_t w = std::min(32767, static_cast<int32_t>(std::lrint(weight * 32768)));
    const int64_t at = static_cast<int64_t>(y) * target.width * c;
    int64_t blended = 0;
    int32_t x = 0;
#if defined(__x86_64__)
    if (fast) {
      blended = blend_avx2(a, b, w, n, row.data());
    }
#endif
    blend_portable(a, b, w, blended, n, row.data());
#if defined(__x86_64__)
    if (fast && c == 3) {
      switch (target.pixel) {
        case Pixel::kUint8: x = columns_avx2<Pixel::kUint8>(row.data(), columns, target, out, at); break;
        case Pixel::kHalf: x = columns_avx2<Pixel::kHalf>(row.data(), columns, target, out, at); break;
        case Pixel::kBfloat16: x = columns_avx2<Pixel::kBfloat16>(row.data(), columns, target, out, at); break;
        case Pixel::kFloat: x = columns_avx2<Pixel::kFloat>(row.data(), columns, target, out, at); break;
      }
    }
#endif
    columns_portable(row.data(), columns, x, target, out, at);
  }
}

void augment_batch(const std::vector<const Record*>& records, const std::vector<Window>& windows, const Target& target, void* out,
                   const ParallelFor& parallel_for, bool portable) {
  const int64_t values = static_cast<int64_t>(target.height) * target.width * target.channels;
  const int64_t bytes = values * pixel_bytes(target.pixel);
  parallel_for(records.size(), 4 * values, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      augment(*records[i], windows[i], target, static_cast<uint8_t*>(out) + i * bytes, portable);
    }
  });
}

}  // namespace tfcommx
