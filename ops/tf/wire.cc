// TfcommxWireEncode, TfcommxWireDecode: selected entries as one buffer of int32 words, and back.
// TfcommxWireRound: values as codes write them, and what that leaves.
#include "kernels/wire.h"

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/common.h"

namespace tfcommx {
namespace {

constexpr char kFormats[] =
    "format: {'pair32', 'pair16/float16', 'pair16/bfloat16', 'block16/float32', 'block16/float16', "
    "'block16/bfloat16', 'elias/float32', 'elias/float16', 'elias/int8', 'elias/int4'}";

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

// The layout that the attributes name, all except k. Words are counted in 64 bits without overflow
// if sizes are below 2^31.
template <class Context>
absl::Status layout_of(Context* context, WireLayout* layout) {
  std::string format;
  TF_RETURN_IF_ERROR(context->GetAttr("format", &format));
  TF_RETURN_IF_ERROR(context->GetAttr("size", &layout->size));
  if (layout->size > kMost)
    return tensorflow::errors::InvalidArgument("`size` must be in [0, 2^31). Received ",
                                               layout->size, ". Cut what is longer into buckets.");
  const size_t slash = format.find('/');
  const std::string places = format.substr(0, slash);
  const std::string type = slash == std::string::npos ? "float32" : format.substr(slash + 1);
  layout->places = places == "elias"     ? Positions::elias
                   : places == "block16" ? Positions::block
                                         : Positions::pair;
  layout->type = type == "float32"    ? Values::float32
                 : type == "float16"  ? Values::float16
                 : type == "bfloat16" ? Values::bfloat16
                 : type == "int8"     ? Values::int8
                                      : Values::int4;
  return absl::OkStatus();
}

REGISTER_OP("TfcommxWireEncode")
    .Input("indices: int32")
    .Input("values: float")
    .Attr("size: int >= 0")
    .Attr(kFormats)
    .Output("words: int32")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle entries;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &entries));
      TF_RETURN_IF_ERROR(c->Merge(c->input(1), entries, &entries));
      WireLayout layout{};
      TF_RETURN_IF_ERROR(layout_of(c, &layout));
      const bool known = c->ValueKnown(c->Dim(entries, 0));
      if (known) layout.k = c->Value(c->Dim(entries, 0));
      c->set_output(0, c->Vector(known ? c->MakeDim(layout.words()) : c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(
        R"(Writes k entries of a vector of `size` as int32 words; ops/kernels/wire.h has the layout.

indices: int32 [k] in [0, size), ascending except for the pair formats.
values: float32 [k], rounded to the format's value dtype.
)");

REGISTER_OP("TfcommxWireDecode")
    .Input("words: int32")
    .Attr("k: int >= 0")
    .Attr("size: int >= 0")
    .Attr("shards: int >= 1 = 1")
    .Attr(kFormats)
    .Output("indices: int32")
    .Output("values: float")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle words;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &words));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->output(0));
      return absl::OkStatus();
    })
    .Doc(R"(Reads the k entries of each of several buffers, one after another.

words: int32 [buffers * words of one], as many buffers for each of `shards` equal parts of a vector,
  which the indices point into.
indices: int32 [buffers * k].
values: float32 [buffers * k].
)");

REGISTER_OP("TfcommxWireRound")
    .Input("values: float")
    .Attr("type: {'int8', 'int4'}")
    .Output("written: float")
    .Output("errors: float")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle values;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &values));
      c->set_output(0, values);
      c->set_output(1, values);
      return absl::OkStatus();
    })
    .Doc(R"(Rounds values to codes of 8 or 4 bits; ops/kernels/wire_codes.h has the rule.

values: float32 [k].
written: float32 [k], what TfcommxWireEncode writes for them, and for these again.
errors: float32 [k], values - written; 0 where a value is not finite.
)");

class WireOp : public tensorflow::OpKernel {
 public:
  explicit WireOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, layout_of(context, &layout_));
  }

 protected:
  WireLayout layout_{};
};

template <bool kGpu>
class EncodeOp : public WireOp {
 public:
  using WireOp::WireOp;

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor &indices = context->input(0), &values = context->input(1);
    OP_REQUIRES(context, indices.dims() == 1 && indices.shape() == values.shape(),
                tensorflow::errors::InvalidArgument(
                    "`indices` and `values` must be vectors of one length. Received ",
                    indices.shape().DebugString(), " and ", values.shape().DebugString(), " (",
                    name(), ")."));
    WireLayout layout = layout_;
    layout.k = indices.NumElements();
    tensorflow::Tensor* words;
    OP_REQUIRES_OK(context, context->allocate_output(0, {layout.words()}, &words));
    const int32_t* from = static_cast<const int32_t*>(indices.data());
    const float* numbers = static_cast<const float*>(values.data());
    int32_t* to = static_cast<int32_t*>(words->data());
    if constexpr (kGpu) {
      OP_REQUIRES_OK(context, launched(context, wire_encode_cuda(layout, from, numbers, to,
                                                                 stream_of(context))));
    } else {
      const int64_t bad = wire_encode_cpu(layout, from, numbers, to);
      OP_REQUIRES(context, bad < 0,
                  tensorflow::errors::InvalidArgument(
                      "Indices must be in [0, ", layout.size, ")",
                      layout.places != Positions::pair ? " and ascending" : "", ". Received ",
                      bad < 0 ? 0 : from[bad], " at position ", bad, " (", name(),
                      "). Does the selection rule sort them?"));
    }
  }
};

template <bool kGpu>
class DecodeOp : public WireOp {
 public:
  explicit DecodeOp(tensorflow::OpKernelConstruction* context) : WireOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("k", &layout_.k));
    OP_REQUIRES_OK(context, context->GetAttr("shards", &shards_));
    OP_REQUIRES(context, layout_.k <= kMost,
                tensorflow::errors::InvalidArgument("`k` must be in [0, 2^31). Received ",
                                                    layout_.k, " (", name(), ")."));
    OP_REQUIRES(context, layout_.size == 0 || shards_ <= kMost / layout_.size,
                tensorflow::errors::InvalidArgument(
                    "`shards` * `size` must be below 2^31. Received ", shards_, " and ",
                    layout_.size, " (", name(), "). Cut what is longer into buckets."));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& words = context->input(0);
    const int64_t length = layout_.words(), buffers = length ? words.NumElements() / length : 0;
    OP_REQUIRES(
        context,
        words.dims() == 1 && words.NumElements() == buffers * length && buffers % shards_ == 0,
        tensorflow::errors::InvalidArgument("`words` must be buffers of ", length,
                                            " words, as many for each of ", shards_,
                                            " shards. Received shape ", words.shape().DebugString(),
                                            " (", name(), "). Do all ranks have the same plan?"));
    tensorflow::Tensor *indices, *values;
    OP_REQUIRES_OK(context, context->allocate_output(0, {buffers * layout_.k}, &indices));
    OP_REQUIRES_OK(context, context->allocate_output(1, {buffers * layout_.k}, &values));
    const int32_t* from = static_cast<const int32_t*>(words.data());
    int32_t* places = static_cast<int32_t*>(indices->data());
    float* numbers = static_cast<float*>(values->data());
    if constexpr (kGpu) {
      OP_REQUIRES_OK(context,
                     launched(context, wire_decode_cuda(layout_, from, buffers, shards_, places,
                                                        numbers, stream_of(context))));
    } else {
      const int64_t bad = wire_decode_cpu(layout_, from, buffers, shards_, places, numbers,
                                          shared_with_pool(context));
      OP_REQUIRES(context, bad < 0,
                  tensorflow::errors::InvalidArgument(
                      "Each buffer must hold ", layout_.k,
                      layout_.places != Positions::pair ? " ascending" : "", " indices in [0, ",
                      layout_.size, "). Buffer ", bad, " does not (", name(),
                      "). Do all ranks have the same plan?"));
    }
  }

 private:
  int64_t shards_;
};

template <bool kGpu>
class RoundOp : public tensorflow::OpKernel {
 public:
  explicit RoundOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    std::string type;
    OP_REQUIRES_OK(context, context->GetAttr("type", &type));
    bits_ = type == "int8" ? 8 : 4;
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& values = context->input(0);
    OP_REQUIRES(
        context, values.dims() == 1,
        tensorflow::errors::InvalidArgument("`values` must be a vector. Received shape ",
                                            values.shape().DebugString(), " (", name(), ")."));
    tensorflow::Tensor *written, *errors;
    OP_REQUIRES_OK(context, context->allocate_output(0, values.shape(), &written));
    OP_REQUIRES_OK(context, context->allocate_output(1, values.shape(), &errors));
    const CodeLayout layout{values.NumElements(), bits_};
    const float* from = static_cast<const float*>(values.data());
    float* to = static_cast<float*>(written->data());
    float* left = static_cast<float*>(errors->data());
    if constexpr (kGpu) {
      OP_REQUIRES_OK(
          context, launched(context, codes_round_cuda(layout, from, to, left, stream_of(context))));
    } else {
      codes_round_cpu(layout, from, to, left);
    }
  }

 private:
  int bits_;
};

REGISTER_KERNEL_BUILDER(Name("TfcommxWireRound").Device(tensorflow::DEVICE_CPU), RoundOp<false>);
REGISTER_KERNEL_BUILDER(Name("TfcommxWireEncode").Device(tensorflow::DEVICE_CPU), EncodeOp<false>);
REGISTER_KERNEL_BUILDER(Name("TfcommxWireDecode").Device(tensorflow::DEVICE_CPU), DecodeOp<false>);
#if TFCOMMX_CUDA
REGISTER_KERNEL_BUILDER(Name("TfcommxWireRound").Device(tensorflow::DEVICE_GPU), RoundOp<true>);
REGISTER_KERNEL_BUILDER(Name("TfcommxWireEncode").Device(tensorflow::DEVICE_GPU), EncodeOp<true>);
REGISTER_KERNEL_BUILDER(Name("TfcommxWireDecode").Device(tensorflow::DEVICE_GPU), DecodeOp<true>);
#endif

}  // namespace
}  // namespace tfcommx
