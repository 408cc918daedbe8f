// TfcommxWireEncode, TfcommxWireDecode: selected entries as one buffer of int32 words, and back.
#include "kernels/wire.h"

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/common.h"

namespace tfcommx {
namespace {

constexpr char kFormats[] =
    "format: {'pair32', 'pair16/float16', 'pair16/bfloat16', 'block16/float32', 'block16/float16', "
    "'block16/bfloat16'}";

// The layout that the attributes name, all except k.
template <class Context>
absl::Status layout_of(Context* context, WireLayout* layout) {
  std::string format;
  TF_RETURN_IF_ERROR(context->GetAttr("format", &format));
  TF_RETURN_IF_ERROR(context->GetAttr("size", &layout->size));
  layout->blocks = format.rfind("block16", 0) == 0;
  layout->type = format == "pair32" || format == "block16/float32" ? Float::float32
                 : format.find("bfloat16") != std::string::npos    ? Float::bfloat16
                                                                   : Float::float16;
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

indices: int32 [k] in [0, size), ascending for the block formats.
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

class WireOp : public tensorflow::OpKernel {
 public:
  explicit WireOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, layout_of(context, &layout_));
    OP_REQUIRES(
        context, layout_.size <= std::numeric_limits<int32_t>::max(),
        tensorflow::errors::InvalidArgument("`size` must be in [0, 2^31). Received ", layout_.size,
                                            " (", name(), "). Cut what is longer into buckets."));
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
                      layout.blocks ? " and ascending" : "", ". Received ", bad < 0 ? 0 : from[bad],
                      " at position ", bad, " (", name(), "). Does the selection rule sort them?"));
    }
  }
};

template <bool kGpu>
class DecodeOp : public WireOp {
 public:
  explicit DecodeOp(tensorflow::OpKernelConstruction* context) : WireOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("k", &layout_.k));
    OP_REQUIRES_OK(context, context->GetAttr("shards", &shards_));
    OP_REQUIRES(context, shards_ * layout_.size <= std::numeric_limits<int32_t>::max(),
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
                  tensorflow::errors::InvalidArgument("Each buffer must hold ", layout_.k,
                                                      " indices in [0, ", layout_.size,
                                                      "). Buffer ", bad, " does not (", name(),
                                                      "). Do all ranks have the same plan?"));
    }
  }

 private:
  int64_t shards_;
};

REGISTER_KERNEL_BUILDER(Name("TfcommxWireEncode").Device(tensorflow::DEVICE_CPU), EncodeOp<false>);
REGISTER_KERNEL_BUILDER(Name("TfcommxWireDecode").Device(tensorflow::DEVICE_CPU), DecodeOp<false>);
#if TFCOMMX_CUDA
REGISTER_KERNEL_BUILDER(Name("TfcommxWireEncode").Device(tensorflow::DEVICE_GPU), EncodeOp<true>);
REGISTER_KERNEL_BUILDER(Name("TfcommxWireDecode").Device(tensorflow::DEVICE_GPU), DecodeOp<true>);
#endif

}  // namespace
}  // namespace tfcommx
