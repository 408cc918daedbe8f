// The update of LARS on CPUs.
#include "kernels/lars.h"

namespace tfcommx {

void lars_cpu(const LarsVector* vectors, const float* rates, int64_t count,
              const LarsOptions& options, const ParallelFor& parallel_for) {
  const float momentum = options.momentum;
  const bool nesterov = options.nesterov;
  each_chunk(
      count, [&](int64_t i) { return vectors[i].entries; }, parallel_for,
      [&](int64_t i, int64_t start, int64_t entries, int64_t) {
        float* __restrict w = vectors[i].weight + start;
        float* __restrict m = vectors[i].momentum + start;
        const float* __restrict g = vectors[i].gradient + start;
        const float rate = rates[i], decay = vectors[i].decay;
        // One condition each outside of the loops, so that the compiler makes vectors of them.
        const auto update = [&](auto decayed, auto move) {
          for (int64_t j = 0; j < entries; ++j) {
            const float step = rate * decayed(g[j], w[j]);
            const float moved = momentum * m[j] - step;
            m[j] = moved;
            w[j] += move(moved, step);
          }
        };
        const auto plain = [](float moved, float) { return moved; };
        const auto ahead = [=](float moved, float step) { return momentum * moved - step; };
        const auto alone = [](float gradient, float) { return gradient; };
        const auto with_decay = [=](float gradient, float weight) {
          return gradient + decay * weight;
        };
        if (decay == 0 && nesterov) {
          update(alone, ahead);
        } else if (decay == 0) {
          update(alone, plain);
        } else if (nesterov) {
          update(with_decay, ahead);
        } else {
          update(with_decay, plain);
        }
      });
}

}  // namespace tfcommx
