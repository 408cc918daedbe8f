// Claim: the CUDA kernels choose what the contract in ops/kernels says, and selection with error
// feedback takes at most 1.25 times as long as moving 16 bytes an entry. Built and started by
// scripts/check_cuda; needs neither TensorFlow nor Python.
//
// Checks, on fresh random inputs: selection against its definition, computed with sums and
// magnitudes in float64, and against the CPU kernel; merge, wire (also damaged), dense, low bits,
// norms and the update of LARS against the CPU kernels; every array lies between guards that must
// stay untouched. Then times selection (check_cuda_timing.h) in turns with a copy of 8 bytes an
// entry (which moves 16) and with the bare addition r += g. Prints one JSON object a line: {"name":
// "check", "cases", "failures"}, then those of the benchmark `select`.
#include "check_cuda_damage.h"
#include "check_cuda_timing.h"

#include "kernels/dense.h"
#include "kernels/lars.h"
#include "kernels/low_bits.h"
#include "kernels/norms.h"
#include "kernels/select_scan.h"

namespace {

int checked = 0, failures = 0;

void report(bool good, const std::string& what) {
  ++checked;
  if (good) return;
  if (++failures <= 20) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

void check_selection(int64_t number, int64_t largest, std::mt19937_64& random) {
  const Problem p = draw_problem(number, largest, random);
  const size_t skip = random() % 8;
  const std::string what =
      std::string("select ") + kKinds[number % std::size(kKinds)] + " " +
      kTypes[static_cast<int>(p.type)] + " " + kRules[static_cast<int>(p.rule)] + " n " +
      std::to_string(p.n) + " k " + std::to_string(p.k) + " skip " + std::to_string(skip) +
      (p.residual.empty() ? "" : " residual") + (p.velocity.empty() ? "" : " velocity");
  const Result right = expected(p);
  bool guarded = true;
  const Result mine = on_gpu(p, skip, &guarded);
  report(guarded, what + ": wrote beyond its arrays");
  report(same(mine, right), what + ": differs from the definition");
  if (p.velocity.empty() || !p.residual.empty())  // on CPUs a velocity needs a residual
    report(same(on_cpu(p), right), what + ": the CPU kernel differs from the definition");
}

#ifndef __CUDACC__
// A wrong result would be noticed above, but not that everything is a candidate. Each entry that is
// sampled or a candidate costs an atomic addition, and so do the bins that they fall into.
void check_prediction(std::mt19937_64& random) {
  Problem p;
  p.n = 400000;
  p.k = p.n / 100;
  p.type = Float::float32;
  p.rule = Rule::mstopk;
  p.seed = random();
  p.wide = make("normal", p.n, 0, random);
  p.gradient.resize(4 * p.n);
  std::memcpy(p.gradient.data(), p.wide.data(), 4 * p.n);
  cuda_on_cpu::atomics = 0;
  bool guarded = true;
  on_gpu(p, 0, &guarded);
  report(cuda_on_cpu::atomics < p.n / 8, "the sample must leave few candidates: atomic additions " +
                                             std::to_string(cuda_on_cpu::atomics));
}
#endif

// Ascending, unique.
std::vector<int32_t> draw_indices(int64_t k, int64_t n, std::mt19937_64& random) {
  std::vector<int32_t> result;
  for (int64_t i = 0, left = k; left > 0; ++i) {
    if (static_cast<int64_t>(random() % (n - i)) >= left) continue;
    result.push_back(static_cast<int32_t>(i));
    --left;
  }
  return result;
}

void check_merge(std::mt19937_64& random) {
  const int64_t n = 1 + random() % 20000, k = random() % (n + 1), ranks = random() % 6;
  std::normal_distribution<float> normal;
  std::vector<int32_t> indices;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const std::vector<int32_t> run = draw_indices(k, n, random);
    indices.insert(indices.end(), run.begin(), run.end());
  }
  std::vector<float> values(indices.size()), right(n);
  for (auto& one : values)
    one = normal(random) * std::pow(10.0f, static_cast<float>(random() % 7) - 3);
  const int64_t pairs = static_cast<int64_t>(indices.size());
  merge_cpu({indices.data(), values.data(), pairs, right.data(), n}, 0, in_turn);
  const bool broken = pairs && random() % 4 == 0;
  if (broken) {
    const int64_t place = random() % pairs;
    // Outside, or as the one before it
    indices[place] = random() % 3 && place % k ? indices[place - 1]
                     : random() % 2            ? -1
                                               : static_cast<int32_t>(n);
  }
  OnDevice<int32_t> from(indices);
  OnDevice<float> weights(values), dense(n, random() % 4);
  const Merge merge{from.data(), weights.data(), pairs, dense.data(), n};
  OnDevice<int32_t> workspace(merge_cuda_workspace(merge, k));
  need(merge_cuda(merge, k, workspace.data(), stream), "merge_cuda");
  workspace.get();
  const std::vector<float> mine = dense.get();
  report(
      dense.untouched && workspace.untouched && (broken ? std::isnan(mine[0]) : same(mine, right)),
      "merge n " + std::to_string(n) + " k " + std::to_string(k));
}

void check_keep(std::mt19937_64& random) {
  const int64_t n = 1 + random() % 5000, k = random() % (n + 1);
  const std::vector<int32_t> indices = draw_indices(k, n, random);
  std::normal_distribution<float> normal;
  std::vector<float> values(k), errors(k), right(n);
  for (auto* all : {&values, &errors, &right})
    for (auto& one : *all) one = normal(random);
  for (int64_t i = 0; i < k; i += 1 + random() % 9) values[i] = i % 2 ? NAN : -INFINITY;
  OnDevice<int32_t> places(indices);
  OnDevice<float> chosen(values), left(errors), residual(right);
  keep_cpu({indices.data(), values.data(), errors.data(), k, right.data(), n});
  need(keep_cuda({places.data(), chosen.data(), left.data(), k, residual.data(), n}, stream),
       "keep_cuda");
  report(same(residual.get(), right) && residual.untouched,
         "keep n " + std::to_string(n) + " k " + std::to_string(k));
}

void check_codes(const CodeLayout& layout, const std::vector<float>& values,
                 const std::string& what) {
  std::vector<float> right(layout.k), left(layout.k);
  codes_round_cpu(layout, values.data(), right.data(), left.data());
  OnDevice<float> from(values), written(layout.k), errors(layout.k);
  need(codes_round_cuda(layout, from.data(), written.data(), errors.data(), stream),
       "codes_round_cuda");
  report(same(written.get(), right) && same(errors.get(), left) && written.untouched &&
             errors.untouched,
         what + ": round");
}

void check_wire(std::mt19937_64& random) {
  const int64_t size =
      random() % 3 ? 1 + random() % 5000 : 65536 * (random() % 5) + 1 + random() % 3;
  const int64_t k = std::min<int64_t>(size, random() % 3000), shards = 1 + random() % 3,
                buffers = shards * (1 + random() % 2);
  const WireLayout layout{k, size, static_cast<Values>(random() % 5),
                          static_cast<Positions>(random() % 3)};
  const bool elias = layout.places == Positions::elias;
  const std::string what = "wire size " + std::to_string(size) + " k " + std::to_string(k) +
                           " positions " + std::to_string(static_cast<int>(layout.places)) +
                           " values " + std::to_string(static_cast<int>(layout.type));
  std::vector<int32_t> all;
  for (int64_t buffer = 0; buffer < buffers; ++buffer) {
    const std::vector<int32_t> indices = draw_indices(k, size, random);
    std::vector<float> values(k);
    // Any bits, or some decades, whose codes differ
    const bool any = random() % 2;
    std::normal_distribution<float> normal;
    for (auto& one : values)
      one = any ? float_of(static_cast<uint32_t>(random())) : normal(random) * 1e-3f;
    if (layout.coded()) check_codes(layout.codes(), values, what);
    std::vector<int32_t> right(layout.words());
    wire_encode_cpu(layout, indices.data(), values.data(), right.data());
    OnDevice<int32_t> from(indices), words(layout.words());
    OnDevice<float> weights(values);
    need(wire_encode_cuda(layout, from.data(), weights.data(), words.data(), stream),
         "wire_encode_cuda");
    report(words.get() == right && words.untouched, what + ": encode");
    all.insert(all.end(), right.begin(), right.end());
  }
  const bool broken = layout.places != Positions::pair && k && random() % 4 == 0,
             outside = layout.places == Positions::pair && k && random() % 4 == 0;
  // Of an index that is out of its shard.
  const int64_t place = outside ? random() % (buffers * k) : 0;
  std::vector<int32_t> right(buffers * k);
  std::vector<float> right_values(buffers * k);
  wire_decode_cpu(layout, all.data(), buffers, shards, right.data(), right_values.data(), in_turn);
  if (broken) {
    int32_t& head = all[random() % layout.counts()];
    if (elias) {
      head ^= 1 << random() % 32;
    } else {
      head += random() % 2 ? 1 : -5000;
    }
    std::fill_n(right.begin(), k, -1);
  }
  if (elias && k && !broken) {  // The low bits of the first buffer's last index, all set
    const int width = layout.elias().low_bits;
    for (int64_t bit = (k - 1) * width; bit < k * width; ++bit)
      all[layout.counts() + bit / 32] |= 1 << bit % 32;
    right[k - 1] |= (1 << width) - 1;
    if (right[k - 1] >= size) right[k - 1] = -1;
  }
  if (outside) {
    all[place / k * layout.words() + place % k] = random() % 2 ? -1 : static_cast<int32_t>(size);
    right[place] = -1;
  }
  OnDevice<int32_t> from(all), indices(buffers * k);
  OnDevice<float> values(buffers * k);
  need(
      wire_decode_cuda(layout, from.data(), buffers, shards, indices.data(), values.data(), stream),
      "wire_decode_cuda");
  report(indices.get() == right && same(values.get(), right_values) && indices.untouched &&
             values.untouched,
         what + ": decode");
}

void check_dense(std::mt19937_64& random) {
  const int64_t n = 1 + random() % 5000, parts = 1 + random() % 4;
  const Float type = random() % 2 ? Float::float16 : Float::bfloat16;
  const float power = static_cast<float>(1 << random() % 8);
  const Rounding how{type, 1 / power, random() % 2 ? 1 : power};
  const std::string what = "dense n " + std::to_string(n) + " " + kTypes[static_cast<int>(type)];
  std::vector<float> gradient(n), kept(n), stays(n);
  for (auto& one : gradient) one = float_of(static_cast<uint32_t>(random()));
  for (auto& one : kept) one = std::ldexp(1.0f, static_cast<int>(random() % 40) - 30);
  stays = kept;
  std::vector<uint16_t> right(n), all;
  dense_write_cpu(how, gradient.data(), stays.data(), right.data(), n, in_turn);
  OnDevice<float> from(gradient, random() % 4), residual(kept, random() % 4);
  OnDevice<uint16_t> written(n, random() % 4);
  need(dense_write_cuda(how, from.data(), residual.data(), written.data(), n, stream),
       "dense_write_cuda");
  // A NaN is any NaN
  const auto widened = [&](const std::vector<uint16_t>& bits) {
    std::vector<float> wide;
    for (const uint16_t one : bits)
      wide.push_back(type == Float::float16 ? from_float16(one) : from_bfloat16(one));
    return wide;
  };
  report(same(widened(written.get()), widened(right)) && written.untouched &&
             same(residual.get(), stays) && residual.untouched,
         what + ": write");
  for (int64_t i = 0; i < parts * n; ++i) all.push_back(static_cast<uint16_t>(random()));
  std::vector<float> sums(n);
  dense_add_cpu(type, all.data(), parts, power, sums.data(), n, in_turn);
  OnDevice<uint16_t> each(all, random() % 4);
  OnDevice<float> total(n, random() % 4);
  need(dense_add_cuda(type, each.data(), parts, power, total.data(), n, stream), "dense_add_cuda");
  report(same(total.get(), sums) && total.untouched, what + ": add");
}

void check_low_bits(std::mt19937_64& random) {
  const LowBits layout{1 << random() % 4, static_cast<int64_t>(1 + random() % 4000)};
  const int64_t shards = 1 + random() % 3, n = shards * layout.entries,
                padding = random() % 2 ? 0 : random() % (n + 1);
  const std::string what = "low bits " + std::to_string(layout.bits) + " n " +
                           std::to_string(layout.entries) + " x " + std::to_string(shards);
  // Any bits, of which a few are not finite; or numbers of some decades; or in each block a number
  // between two steps, and two that raise the step only if they are added to each other first; or the
  // largest numbers
  const int kind = random() % 4;
  std::normal_distribution<float> normal;
  std::vector<float> gradient(n), kept(n);
  if (kind < 2)
    for (auto& one : kept) one = std::ldexp(normal(random), -static_cast<int>(random() % 20));
  for (auto& one : gradient)
    one = kind == 0   ? float_of(static_cast<uint32_t>(random()))
          : kind == 1 ? normal(random) * 1e-3f
          : kind == 3 ? std::copysign(std::numeric_limits<float>::max(), normal(random))
                      : 0.0f;
  const int block = layout.block(), halvings = low_bits_log2(layout.bits);
  for (int64_t first = 0; kind == 2 && first + block <= n; first += block) {
    const int64_t large = random() % block, one = large ^ 1 << random() % halvings,
                  other = one ^ 1 << random() % halvings;
    gradient[first + one] = gradient[first + other] = 0x1.4p-25f;
    gradient[first + large] = 0x1.01p0f;
  }
  std::fill(kept.end() - padding, kept.end(), 0.0f);
  std::vector<float> stays = kept;
  std::vector<int32_t> right(shards * layout.words());
  low_bits_write_cpu(layout, shards, gradient.data(), stays.data(), n - padding, right.data(),
                     in_turn);
  OnDevice<float> from(gradient, random() % 4), residual(kept, random() % 4);
  OnDevice<int32_t> words(right.size(), random() % 4);
  need(low_bits_write_cuda(layout, shards, from.data(), residual.data(), n - padding, words.data(),
                           stream),
       "low_bits_write_cuda");
  report(
      words.get() == right && words.untouched && same(residual.get(), stays) && residual.untouched,
      what + ": write");
  const float factor = 1.0f / static_cast<float>(shards);
  std::vector<float> numbers(n);
  low_bits_read_cpu(layout, shards, right.data(), factor, numbers.data(), in_turn);
  OnDevice<float> total(n, random() % 4);
  need(low_bits_read_cuda(layout, shards, words.data(), factor, total.data(), stream),
       "low_bits_read_cuda");
  report(same(total.get(), numbers) && total.untouched, what + ": read");
  // The shards as parts of the first one's sum
  const int64_t real = layout.entries - std::min(layout.entries, padding);
  std::vector<int32_t> sum(layout.words());
  low_bits_add_cpu(layout, shards, right.data(), stays.data(), real, sum.data(), in_turn);
  OnDevice<int32_t> added(layout.words(), random() % 4);
  need(low_bits_add_cuda(layout, shards, words.data(), residual.data(), real, added.data(), stream),
       "low_bits_add_cuda");
  report(added.get() == sum && added.untouched && same(residual.get(), stays) && residual.untouched,
         what + ": add");
}

// Up to 2,000 vectors, so that they need several launches; any alignment and type.
void check_norms(std::mt19937_64& random) {
  const int64_t count = random() % 8 ? 1 + random() % 9 : 1 + random() % 2000;
  const int64_t largest = count > 9 ? 70 : 20000;
  std::vector<std::unique_ptr<OnDevice<char>>> on_device;
  std::vector<std::vector<char>> on_host;
  std::vector<Vector> vectors, others;
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Float type = static_cast<Float>(random() % 3);
    const int64_t entries = random() % 8 ? random() % largest : 0;
    const char* const kind = kKinds[random() % std::size(kKinds)];
    const std::vector<float> wide =
        make(std::string(kind) == "misled" ? "normal" : kind, entries, 0, random);
    std::vector<char> data(entries * (type == Float::float32 ? 4 : 2));
    for (int64_t j = 0; j < entries; ++j) {
      const uint16_t bits = type == Float::float16 ? to_float16(wide[j]) : to_bfloat16(wide[j]);
      if (type == Float::float32)
        std::memcpy(&data[4 * j], &wide[j], 4);
      else
        std::memcpy(&data[2 * j], &bits, 2);
    }
    on_device.push_back(std::make_unique<OnDevice<char>>(data, 4 * (random() % 8)));
    on_host.push_back(std::move(data));
    vectors.push_back({on_device.back()->data(), entries, type});
    chunks += vectors.back().chunks();
  }
  for (int64_t i = 0; i < count; ++i)
    others.push_back({on_host[i].data(), vectors[i].entries, vectors[i].type});
  std::vector<float> room(chunks), right(count);
  norms_cpu(others.data(), count, room.data(), right.data(), in_turn);
  OnDevice<float> sums(chunks), squares(count);
  need(norms_cuda(vectors.data(), count, sums.data(), squares.data(), stream), "norms_cuda");
  const std::vector<float> mine = squares.get();
  sums.get();
  report(
      std::memcmp(mine.data(), right.data(), 4 * count) == 0 && squares.untouched && sums.untouched,
      "norms of " + std::to_string(count) + " vectors");
}

void check_lars(std::mt19937_64& random) {
  const int64_t count = random() % 8 ? 1 + random() % 5 : 1 + random() % 900;
  const int64_t largest = count > 5 ? 20 : 12000;
  const LarsOptions options{random() % 2 ? 0.9f : 0.0f, random() % 2 == 0};
  // Weights, momenta, gradients of each vector.
  std::vector<std::vector<float>> host;
  std::vector<std::unique_ptr<OnDevice<float>>> device;
  std::vector<LarsVector> on_host, on_device;
  std::vector<float> rates(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t entries = random() % largest;
    for (const char* kind : {"normal", "octaves", random() % 4 ? "laplace" : "bits"}) {
      host.push_back(make(kind, entries, 0, random));
      device.push_back(std::make_unique<OnDevice<float>>(host.back(), random() % 8));
    }
    rates[i] = static_cast<float>(random() % 100) / 64;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float decay = random() % 2 ? 0.01f : 0.0f;
    const int64_t entries = static_cast<int64_t>(host[3 * i].size());
    on_host.push_back(
        {host[3 * i].data(), host[3 * i + 1].data(), host[3 * i + 2].data(), entries, decay});
    on_device.push_back({device[3 * i]->data(), device[3 * i + 1]->data(),
                         device[3 * i + 2]->data(), entries, decay});
  }
  OnDevice<float> device_rates(rates);
  need(lars_cuda(on_device.data(), device_rates.data(), count, options, stream), "lars_cuda");
  lars_cpu(on_host.data(), rates.data(), count, options, in_turn);
  bool good = true;
  for (size_t i = 0; i < host.size(); ++i)
    good = same(device[i]->get(), host[i]) && device[i]->untouched && good;
  report(good, "lars of " + std::to_string(count) + " vectors");
}

#ifdef __CUDACC__
// An exchange captured in a graph gives the same bits at each replay; and two exchanges that run on
// two streams at once change nothing of each other.
void check_graph_and_streams(std::mt19937_64& random) {
  const WireLayout kind{0, 0, Values::int4, Positions::elias};
  const auto exchange = [&] {
    Problem p = timed_problem(300000, Float::float32, random);
    p.rule = Rule::mstopk;
    return std::make_unique<Exchange>(p, kind, 3);
  };
  const auto one = exchange(), other = exchange();
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  need(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  one->run(stream);
  need(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  need(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
  for (int replay = 0; replay < 3; ++replay) {
    one->residual.put(one->p.residual);
    need(cudaGraphLaunch(ready, stream), "cudaGraphLaunch");
    report(one->right(), "replay " + std::to_string(replay) + " of a graph");
  }
  need(cudaGraphExecDestroy(ready), "cudaGraphExecDestroy");
  need(cudaGraphDestroy(graph), "cudaGraphDestroy");

  cudaStream_t second;
  need(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), "cudaStreamCreate");
  for (int turn = 0; turn < 20; ++turn) {
    one->residual.put(one->p.residual);
    other->residual.put(other->p.residual);
    one->run(stream);
    other->run(second);
    need(cudaStreamSynchronize(second), "a kernel");
    if (turn % 5 == 0)
      report(one->right() && other->right(), "two streams, turn " + std::to_string(turn));
  }
  need(cudaStreamDestroy(second), "cudaStreamDestroy");
}
#endif

}  // namespace

int main(int count, char** words) {
  int64_t cases = 600, largest = 3000000, rounds = 51, n = 0, type = 0, peers = 0, skipped = 0;
  uint64_t seed = std::random_device{}();
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i];
    const int64_t value = std::atoll(words[i + 1]);
    if (name == "--cases")
      cases = value;
    else if (name == "--largest")
      largest = value;
    else if (name == "--rounds")
      rounds = value;
    else if (name == "--n")
      n = value;
    else if (name == "--type" && value >= 0 && value < 3)
      type = value;
    else if (name == "--first" && value >= 0)
      skipped = value;
    else if (name == "--peers" && value >= 0)
      peers = value;
    else if (name == "--seed")
      seed = value;
    else
      count = 0;
  }
  if (count % 2 == 0) {
    std::fprintf(
        stderr,
        "Options, each with a number: --cases, --largest (entries in a case), --first (number "
        "of the first case: kinds and\nsizes take turns, and from 75 to 89 all have the largest "
        "size), --seed; of the timing --n (entries), --type\n(0 float32, 1 float16, 2 bfloat16), "
        "--rounds (0: no timing), --peers (of an exchange, which is timed then)\n");
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr,
                 "No GPU was found: nothing was checked. Run this where nvidia-smi lists one.\n");
    return 2;
  }
  cudaDeviceProp properties;
  need(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  need(cudaStreamCreate(&stream), "cudaStreamCreate");
  std::mt19937_64 random(seed);
  for (int64_t number = skipped; number < skipped + cases; ++number) {
    check_selection(number, largest, random);
    check_merge(random);
    check_keep(random);
    check_wire(random);
    const std::string problem = problem_with_damage(random);
    report(problem.empty(), problem);
    check_dense(random);
    check_low_bits(random);
    check_norms(random);
    check_lars(random);
  }
#ifdef __CUDACC__
  if (cases > 0) check_graph_and_streams(random);
#else
  check_prediction(random);
#endif
  std::printf(
      "{\"name\": \"check\", \"device\": \"%s\", \"seed\": %llu, \"cases\": %d, \"failures\": "
      "%d}\n",
      properties.name, static_cast<unsigned long long>(seed), checked, failures);
  std::fflush(stdout);
  bool good = failures == 0;
  for (const int64_t entries :
       n ? std::vector<int64_t>{n} : std::vector<int64_t>{25600000, 128000000}) {
    if (rounds == 0) continue;
    const Problem p = timed_problem(entries, static_cast<Float>(type), random);
    for (const double density : {0.001, 0.01, 0.1})
      good = time_selection(p, density, static_cast<int>(rounds), properties.name) && good;
  }
  if (peers > 0 && rounds > 0) {
    const int64_t entries = n ? n : 25600000;
    const Problem p = timed_problem(entries, Float::float32, random);
    for (const WireLayout& kind : {WireLayout{0, 0, Values::int4, Positions::elias},
                                   WireLayout{0, 0, Values::float32, Positions::pair},
                                   WireLayout{0, 0, Values::bfloat16, Positions::block}})
      for (const double density : {0.1, 0.01})
        good = time_exchange(p, density, kind, peers, static_cast<int>(rounds), properties.name) &&
               good;
    time_dense(entries, 160, peers, static_cast<int>(rounds), properties.name, random);
    time_low_bits(entries, peers, static_cast<int>(rounds), properties.name, random);
  }
  return good ? 0 : 1;
}
