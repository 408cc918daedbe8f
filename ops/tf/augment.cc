// The ops TfcommxSlabCheck and TfcommxSlabRead: check and allocate here, work in kernels/augment.h.
#include <cstring>
#include <string>
#include <vector>

#include "kernels/augment.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/batch_memory.h"
#include "tf/scalar.h"
#include "tf/share.h"
#include "tf/slab.h"

namespace tfcommx {
namespace {

using tensorflow::DT_BFLOAT16;
using tensorflow::DT_HALF;
using tensorflow::DT_UINT8;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::errors::DataLoss;
using tensorflow::errors::InvalidArgument;
using tensorflow::errors::ResourceExhausted;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfcommxSlabCheck")
    .Input("indices: int64")
    .Input("epoch: int64")
    .Output("state: uint8")  // 0 ready, 1 absent, 2 its CRC does not hold
    .Attr("path: string")
    .Attr("id: int")              // in the header of the slab
    .Attr("verify: float = 0.0")  // share of the samples whose CRC is checked
    .Attr("seed: int = 0")
    // The slab changes between calls, which TensorFlow must therefore neither share nor fold
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle indices, scalar;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &indices));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &scalar));
      c->set_output(0, indices);
      return absl::OkStatus();
    });

REGISTER_OP("TfcommxSlabRead")
    .Input("indices: int64")
    .Input("loose: uint8")     // records that are not in the slab, each at a multiple of 64 bytes
    .Input("loose_at: int64")  // where in `loose` a sample's record starts; -1: it is in the slab
    .Input("epoch: int64")
    .Input("size: int32")  // [2]: height, width of the output; zeros: that of the samples
    .Output("images: T")
    .Output("labels: int64")
    .Output("windows: int32")  // [b, 5]: top, left, height, width, flip
    .Attr("T: {uint8, half, bfloat16, float}")
    .Attr("path: string")  // empty: all records are loose
    .Attr("id: int")       // in the header of the slab
    .Attr("channels: int")
    .Attr("crop: {'random', 'center', 'whole'}")
    .Attr("flip: bool")
    .Attr("area: list(float) = [0.08, 1.0]")
    .Attr("aspect: list(float) = [0.75, 1.3333333333]")
    .Attr("center: float = 0.875")
    .Attr("mean: list(float) = []")  // per channel, of values in [0, 1]; empty: zeros
    .Attr("std: list(float) = []")   // empty: ones
    .Attr("seed: int = 0")
    // The most that may be used of the processor.
    .Attr("code: {'fastest', 'avx2', 'portable'} = 'fastest'")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle indices, other;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &indices));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &other));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &other));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 0, &other));
      int channels;
      TF_RETURN_IF_ERROR(c->GetAttr("channels", &channels));
      DimensionHandle height = c->UnknownDim(), width = c->UnknownDim();
      const Tensor* size = c->input_tensor(4);
      if (size != nullptr && size->NumElements() == 2 && size->flat<int32_t>()(0) > 0 &&
          size->flat<int32_t>()(1) > 0) {
        height = c->MakeDim(size->flat<int32_t>()(0));
        width = c->MakeDim(size->flat<int32_t>()(1));
      }
      c->set_output(0, c->MakeShape({c->Dim(indices, 0), height, width, c->MakeDim(channels)}));
      c->set_output(1, indices);
      c->set_output(2, c->MakeShape({c->Dim(indices, 0), c->MakeDim(5)}));
      return absl::OkStatus();
    });

class SlabCheck : public OpKernel {
 public:
  explicit SlabCheck(OpKernelConstruction* context) : OpKernel(context) {
    std::string path;
    int64_t id, seed;
    OP_REQUIRES_OK(context, context->GetAttr("path", &path));
    OP_REQUIRES_OK(context, context->GetAttr("id", &id));
    OP_REQUIRES_OK(context, context->GetAttr("verify", &verify_));
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed));
    // Not the stream that draws the crops.
    seed_ = static_cast<uint64_t>(seed) ^ 0x5EED0FC5C5EEDull;
    OP_REQUIRES_OK(context, slab_.open(path, id));
  }

  void Compute(OpKernelContext* context) override {
    const auto indices = context->input(0).flat<int64_t>();
    int64_t epoch;
    OP_REQUIRES_OK(context, get_scalar(context, 1, "epoch", &epoch));
    Tensor* state = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, context->input(0).shape(), &state));
    auto out = state->flat<uint8_t>();
    for (int64_t i = 0; i < indices.size(); ++i) {
      OP_REQUIRES_OK(context, check_index(indices(i), slab_.count()));
      // All are prefetched before the first is read, because each is a cache miss
      foresee(slab_.slab(), indices(i));
    }
    for (int64_t i = 0; i < indices.size(); ++i) {
      Sample sample;
      if (!find(slab_.slab(), indices(i), &sample)) {
        out(i) = 1;
        continue;
      }
      const bool look = uniform(seed_, static_cast<uint64_t>(epoch), indices(i), 0) < verify_;
      out(i) = look && !intact(sample) ? 2 : 0;
    }
  }

 private:
  Mapping slab_;
  float verify_;
  uint64_t seed_;
};

class SlabRead : public OpKernel {
 public:
  explicit SlabRead(OpKernelConstruction* context) : OpKernel(context) {
    std::string path, crop;
    int64_t id, seed;
    float center;
    std::vector<float> area, aspect, mean, std;
    OP_REQUIRES_OK(context, context->GetAttr("path", &path));
    OP_REQUIRES_OK(context, context->GetAttr("id", &id));
    OP_REQUIRES_OK(context, context->GetAttr("channels", &target_.channels));
    OP_REQUIRES_OK(context, context->GetAttr("crop", &crop));
    OP_REQUIRES_OK(context, context->GetAttr("flip", &rule_.flip));
    OP_REQUIRES_OK(context, context->GetAttr("area", &area));
    OP_REQUIRES_OK(context, context->GetAttr("aspect", &aspect));
    OP_REQUIRES_OK(context, context->GetAttr("center", &center));
    OP_REQUIRES_OK(context, context->GetAttr("mean", &mean));
    OP_REQUIRES_OK(context, context->GetAttr("std", &std));
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed));
    std::string code;
    OP_REQUIRES_OK(context, context->GetAttr("code", &code));
    code_ = code == "fastest" ? Code::kFastest : code == "avx2" ? Code::kAvx2 : Code::kPortable;
    OP_REQUIRES(context, area.size() == 2 && 0 < area[0] && area[0] <= area[1] && area[1] <= 1,
                InvalidArgument("`area` must be two ascending shares in (0, 1]."));
    OP_REQUIRES(context, aspect.size() == 2 && 0 < aspect[0] && aspect[0] <= aspect[1],
                InvalidArgument("`aspect` must be two ascending positive numbers."));
    OP_REQUIRES(context, 0 < center && center <= 1,
                InvalidArgument("`center` must be in (0, 1]. Received ", center, "."));
    const int channels = target_.channels;
    OP_REQUIRES(context, 1 <= channels && channels <= 4,
                InvalidArgument("`channels` must be in [1, 4]. Received ", channels, "."));
    if (mean.empty()) mean.assign(channels, 0);
    if (std.empty()) std.assign(channels, 1);
    OP_REQUIRES(
        context,
        static_cast<int>(mean.size()) == channels && static_cast<int>(std.size()) == channels,
        InvalidArgument("`mean` and `std` need one number for each of ", channels,
                        " channels. Received ", mean.size(), " and ", std.size(), "."));
    rule_.crop = crop == "random" ? Crop::kRandom : crop == "center" ? Crop::kCenter : Crop::kWhole;
    rule_.area_low = area[0];
    rule_.area_high = area[1];
    rule_.aspect_low = aspect[0];
    rule_.aspect_high = aspect[1];
    rule_.center = center;
    rule_.seed = static_cast<uint64_t>(seed);
    for (int c = 0; c < channels; ++c) {
      OP_REQUIRES(
          context, std[c] > 0,
          InvalidArgument("`std` must be positive. Received ", std[c], " for channel ", c, "."));
      target_.scale.push_back(1.0f / (255.0f * std[c]));
      target_.bias.push_back(-mean[c] / std[c]);
    }
    const auto type = output_type(0);
    target_.pixel = type == DT_UINT8      ? Pixel::kUint8
                    : type == DT_HALF     ? Pixel::kHalf
                    : type == DT_BFLOAT16 ? Pixel::kBfloat16
                                          : Pixel::kFloat;
    if (!path.empty()) OP_REQUIRES_OK(context, slab_.open(path, id));
  }

  void Compute(OpKernelContext* context) override {
    const auto indices = context->input(0).flat<int64_t>();
    const auto loose = context->input(1).flat<uint8_t>();
    const auto loose_at = context->input(2).flat<int64_t>();
    int64_t epoch;
    OP_REQUIRES_OK(context, get_scalar(context, 3, "epoch", &epoch));
    const auto size = context->input(4).flat<int32_t>();
    const int64_t n = indices.size();
    OP_REQUIRES(context, loose_at.size() == n,
                InvalidArgument("`loose_at` must have one entry per index. Received ",
                                loose_at.size(), " for ", n, "."));
    OP_REQUIRES(context,
                size.size() == 2 && size(0) >= 0 && size(1) >= 0 &&
                    (size(0) == 0) == (size(1) == 0) && size(0) <= kMostSide &&
                    size(1) <= kMostSide,
                InvalidArgument("`size` must be [height, width], both in [1, 2^24] or both zero."));
    std::vector<Image> sources(n);
    std::vector<int64_t> numbers(n);  // labels
    std::vector<Window> windows(n);
    Target target = target_;
    target.height = size(0);
    target.width = size(1);
    for (int64_t i = 0; i < n; ++i) {
      if (loose_at(i) >= 0) continue;
      OP_REQUIRES_OK(context, check_index(indices(i), slab_.count()));
      foresee(slab_.slab(), indices(i));
    }
    for (int64_t i = 0; i < n; ++i) {
      Sample sample;
      const bool present = loose_at(i) >= 0 ? record_at(loose.data(), 0, loose.size(), loose_at(i),
                                                        indices(i), &sample)
                                            : find(slab_.slab(), indices(i), &sample);
      OP_REQUIRES(context, present,
                  DataLoss("Sample ", indices(i), " is not in memory, or its record is damaged."));
      const Image record = sources[i] = image_of(sample);
      numbers[i] = sample.record.label;
      OP_REQUIRES(context, record.channels == target.channels,
                  InvalidArgument("Samples of ", target.channels, " channels are required. Sample ",
                                  indices(i), " has ", record.channels, "."));
      if (target.height == 0) {
        target.height = record.height;
        target.width = record.width;
      }
      if (size(0) == 0) {
        OP_REQUIRES(context, record.height == target.height && record.width == target.width,
                    InvalidArgument(
                        "Samples of one size are required where no resolution is given. Received ",
                        target.height, "x", target.width, " and ", record.height, "x", record.width,
                        " (sample ", indices(i), "). Give the phase a resolution."));
      }
      windows[i] = window_of(rule_, epoch, indices(i), record.height, record.width);
    }
    Tensor *labels = nullptr, *taken = nullptr;
    TensorShape shape;  // made so, because its constructor ends the process over too many pixels
    OP_REQUIRES_OK(context, TensorShape::BuildTensorShape(
                                {n, target.height, target.width, target.channels}, &shape));
    Tensor images;
    if (shape.num_elements() * pixel_bytes(target.pixel) >= BatchMemory::kLeast) {
      images = Tensor(BatchMemory::instance(), output_type(0), shape);
    } else {
      OP_REQUIRES_OK(context, context->allocate_temp(output_type(0), shape, &images));
    }
    OP_REQUIRES(context, images.IsInitialized(),
                ResourceExhausted("No memory for a batch of shape ", shape.DebugString(), "."));
    context->set_output(0, images);
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({n}), &labels));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({n, 5}), &taken));
    for (int64_t i = 0; i < n; ++i) {
      labels->flat<int64_t>()(i) = numbers[i];
      std::memcpy(taken->flat<int32_t>().data() + 5 * i, &windows[i], sizeof(Window));
    }
    augment_batch(sources, windows, target, images.data(), shared_with_pool(context), code_);
  }

 private:
  BatchMemory::User user_;
  Mapping slab_;
  WindowRule rule_;
  Target target_;
  Code code_;
};

REGISTER_KERNEL_BUILDER(Name("TfcommxSlabCheck").Device(tensorflow::DEVICE_CPU), SlabCheck);
REGISTER_KERNEL_BUILDER(Name("TfcommxSlabRead").Device(tensorflow::DEVICE_CPU), SlabRead);

}  // namespace
}  // namespace tfcommx
