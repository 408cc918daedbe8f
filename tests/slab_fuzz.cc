// Reads and fills hostile slabs under sanitizers, and reads hostile heads of image files: nothing
// outside their memory is touched, whatever another process writes into a slab while it is mapped.
//
//   slab_fuzz SEED COUNT
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "kernels/augment.h"
#include "kernels/fill.h"

using namespace tfcommx;

namespace {

constexpr int64_t kPage = 4096;
std::mt19937_64 draw;

int64_t below(int64_t n) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(n)); }

// A file between two pages that may not be touched.
class Mapped {
 public:
  explicit Mapped(int64_t length) : length_(length) {
    file_ = memfd_create("slab", 0);
    if (file_ < 0 || ftruncate(file_, length) != 0) std::abort();
    void* room = mmap(nullptr, length + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base_ = static_cast<uint8_t*>(room) + kPage;
    if (mmap(base_, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, 0) != base_)
      std::abort();
  }
  ~Mapped() {
    munmap(base_ - kPage, length_ + 2 * kPage);
    close(file_);
  }
  uint8_t* base() const { return base_; }
  int file() const { return file_; }

 private:
  int64_t length_;
  int file_;
  uint8_t* base_;
};

int64_t hostile_number(int64_t length) {
  constexpr int64_t kExtremes[] = {INT64_MIN, INT64_MAX, -1, 0, 1, INT32_MAX, INT32_MIN, -4096};
  switch (below(4)) {
    case 0:
      return kExtremes[below(8)];
    case 1:
      return length - below(130);
    case 2:
      return below(length / 64) * 64;
    default:
      return static_cast<int64_t>(draw());
  }
}

void store(uint8_t* at, int64_t value) { std::memcpy(at, &value, sizeof(value)); }

// Changes numbers of the header, the index or a record.
void spoil(uint8_t* base, int64_t length, int64_t count, bool header) {
  for (int64_t n = 1 + below(4); n > 0; --n) {
    const int64_t value = hostile_number(length);
    switch (below(header ? 5 : 4)) {
      case 3: {
        // A record whose numbers agree with each other and not with the file, or the other way round.
        constexpr int32_t kSides[] = {1, 7, 40, 1 << 15, 1 << 30, INT32_MAX};
        const int64_t sample = below(count);
        int64_t at;
        std::memcpy(&at, base + kPage + 8 * sample, sizeof(at));
        if (at < 2 * kPage || at % 64 || at > length - static_cast<int64_t>(sizeof(Record))) break;
        Record record = {sample, 1, 0, kSides[below(6)], kSides[below(6)], 0, 0, {}};
        record.channels = static_cast<int32_t>(1 + below(5));
        record.bytes = static_cast<int64_t>(static_cast<uint64_t>(record.height) *
                                            static_cast<uint64_t>(record.width) * record.channels);
        if (below(2)) record.bytes = 1 + below(300);
        std::memcpy(base + at, &record, sizeof(record));
        break;
      }
      case 0:
        store(base + kPage + 8 * below(count), value);
        break;
      case 1:
        store(base + 2 * kPage + 8 * below((length - 2 * kPage) / 8), value);
        break;
      case 2:
        store(base + offsetof(SlabHeader, next), value);
        break;
      default:
        store(base + 8 * (1 + below(5)), value);
    }
  }
}

void read_and_fill(int64_t turns) {
  const int64_t count = 1 + below(8), length = 3 * kPage + kPage * below(4);
  const Mapped mapped(length);
  Slab slab;
  slab.header = {{}, count, kPage, 2 * kPage, length, 2 * kPage, 7};
  slab.base = mapped.base();
  std::memcpy(slab.base, &slab.header, sizeof(SlabHeader));
  std::mutex takes, writes;
  const SlabFile file = {mapped.file(), slab, &takes, &writes};
  const auto fill = [&] {
    const int32_t height = static_cast<int32_t>(1 + below(40)),
                  width = static_cast<int32_t>(1 + below(40)),
                  channels = static_cast<int32_t>(1 + below(4));
    std::unique_ptr<uint8_t[]> pixels(new uint8_t[height * width * channels]());
    put(file, below(count), 3, {pixels.get(), height, width, channels},
        static_cast<int32_t>(below(30)));
  };
  for (int64_t n = 0; n < 3; ++n) fill();
  for (int64_t turn = 0; turn < turns; ++turn) {
    spoil(slab.base, length, count, true);
    // What a process that maps it now would make of it.
    Slab other = slab;
    std::memcpy(&other.header, slab.base, sizeof(SlabHeader));
    for (const Slab& seen : {slab, other}) {
      if (!fits(seen.header, length)) continue;
      for (int64_t sample = 0; sample < std::min<int64_t>(seen.header.count, 16); ++sample) {
        Sample found;
        foresee(seen, sample);
        if (!find(seen, sample, &found)) continue;
        spoil(slab.base, length, count, false);  // between the check and the use
        intact(found);
        const Image image = image_of(found);
        WindowRule rule;
        rule.crop = static_cast<Crop>(below(3));
        rule.flip = below(2);
        rule.seed = draw();
        Target target;
        target.height = static_cast<int32_t>(1 + below(20));
        target.width = static_cast<int32_t>(1 + below(20));
        target.channels = image.channels;
        target.pixel = static_cast<Pixel>(below(4));
        target.scale.assign(target.channels, 1.0f);
        target.bias.assign(target.channels, 0.0f);
        const int64_t bytes = static_cast<int64_t>(target.height) * target.width * target.channels *
                              static_cast<int64_t>(pixel_bytes(target.pixel));
        std::unique_ptr<uint8_t[]> out(new uint8_t[bytes]);
        const Window window = window_of(rule, 1, sample, image.height, image.width);
        augment(image, window, target, out.get(), static_cast<Code>(below(3)));
      }
    }
    fill();
  }
}

void read_heads() {
  static const std::vector<uint8_t> png = {0x89, 'P', 'N', 'G', 13, 10, 26, 10, 0, 0, 0, 13, 'I',
                                           'H',  'D', 'R', 0,   0,  0,  9,  0,  0, 0, 9, 8},
                                    jpeg = {0xFF, 0xD8, 0xFF, 0xE0, 0, 4, 1,    2,    0xFF, 0xC0,
                                            0,    11,   8,    0,    8, 0, 8,    1,    1,    17,
                                            0,    0xFF, 0xDA, 0,    8, 1, 0xFF, 0xD9, 0,    0};
  std::vector<uint8_t> bytes = below(2) ? png : jpeg;
  bytes.resize(below(static_cast<int64_t>(bytes.size()) + 1));
  for (int64_t n = below(4); !bytes.empty() && n > 0; --n)
    bytes[below(static_cast<int64_t>(bytes.size()))] =
        static_cast<uint8_t>(below(3) ? draw() : 0xFF);
  std::unique_ptr<uint8_t[]> exact(new uint8_t[bytes.size()]);
  std::copy(bytes.begin(), bytes.end(), exact.get());
  FileHead head;
  if (read_head(exact.get(), bytes.size(), &head) && (head.height < 1 || head.width < 1))
    std::abort();
}

}  // namespace

int main(int, char** arguments) {
  draw.seed(std::strtoull(arguments[1], nullptr, 10));
  const int64_t count = std::strtoll(arguments[2], nullptr, 10);
  for (int64_t n = 0; n < count; n += 8) {
    read_and_fill(8);
    for (int i = 0; i < 16; ++i) read_heads();
  }
  std::printf("read %lld\n", static_cast<long long>(count));
}
