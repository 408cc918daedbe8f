// TfcommxLowBitsWrite, TfcommxLowBitsAdd, TfcommxLowBitsRead: a dense vector in codes of few bits.
#include "kernels/low_bits.h"

#include <algorithm>
#include <string>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/state.h"

namespace tfcommx {
namespace {

using tensorflow::shape_inference::InferenceContext;

// The layout that the attributes `type` and `entries` describe.
template <class Context>
absl::Status get_layout(Context* context, LowBits* layout) {
  std::string type;
  TF_RETURN_IF_ERROR(context->GetAttr("type", &type));
  TF_RETURN_IF_ERROR(context->GetAttr("entries", &layout->entries));
  if (layout->entries > std::numeric_limits<int32_t>::max())
    return tensorflow::errors::InvalidArgument("`entries` must be in [1, 2^31). Received ",
                                               layout->entries,
                                               ". Cut what is longer into buckets.");
  layout->bits = type.back() - '0';  // of int8, int4, int2, int1
  return absl::OkStatus();
}

// The length of a vector input is a multiple of `from`; sets the output's to as many times `to`.
absl::Status scale_length(InferenceContext* c, int64_t from, int64_t to) {
  tensorflow::shape_inference::ShapeHandle vector;
  tensorflow::shape_inference::DimensionHandle shards, length;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
  TF_RETURN_IF_ERROR(c->Divide(c->Dim(vector, 0), from, true, &shards));
  TF_RETURN_IF_ERROR(c->Multiply(shards, to, &length));
  c->set_output(0, c->Vector(length));
  return absl::OkStatus();
}

REGISTER_OP("TfcommxLowBitsWrite")
    .Input("gradient: float")
    .Input("residual: resource")
    .Output("words: int32")
    .Attr("type: {'int8', 'int4', 'int2', 'int1'}")
    .Attr("entries: int >= 1")
    .Attr("real: int")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      LowBits layout;
      TF_RETURN_IF_ERROR(get_layout(c, &layout));
      return scale_length(c, layout.entries, layout.words());
    })
    .Doc(R"(Writes gradient + residual in codes; ops/kernels/low_bits.h has the semantics.

gradient: [shards * entries].
residual: a float32 variable of as many entries; updated.
words: of each shard in turn.
entries: of a shard.
real: entries of the gradient that are no padding.
)");

REGISTER_OP("TfcommxLowBitsAdd")
    .Input("words: int32")
    .Input("residual: resource")
    .Output("total: int32")
    .Attr("type: {'int8', 'int4', 'int2', 'int1'}")
    .Attr("entries: int >= 1")
    .Attr("start: int >= 0")
    .Attr("real: int")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      LowBits layout;
      TF_RETURN_IF_ERROR(get_layout(c, &layout));
      TF_RETURN_IF_ERROR(scale_length(c, layout.words(), layout.words()));
      c->set_output(0, c->Vector(layout.words()));
      return absl::OkStatus();
    })
    .Doc(R"(Adds a shard as several ranks wrote it, and a residual, and writes the sum in codes.

words: of each rank in turn, which are added in this order and in float32.
residual: a float32 variable, of which the entries from `start` on are the shard's; updated.
total: the words of the sum.
entries: of the shard.
real: of its entries, those that are no padding.
)");

REGISTER_OP("TfcommxLowBitsRead")
    .Input("words: int32")
    .Output("total: float")
    .Attr("type: {'int8', 'int4', 'int2', 'int1'}")
    .Attr("entries: int >= 1")
    .Attr("factor: float = 1")
    .SetShapeFn([](InferenceContext* c) {
      LowBits layout;
      TF_RETURN_IF_ERROR(get_layout(c, &layout));
      return scale_length(c, layout.words(), layout.entries);
    })
    .Doc(R"(Reads shards that TfcommxLowBitsWrite or TfcommxLowBitsAdd wrote.

words: of each shard in turn.
entries: of a shard.
total: [shards * entries], times `factor`.
)");

class LowBitsOp : public tensorflow::OpKernel {
 public:
  explicit LowBitsOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, get_layout(context, &layout_));
  }

 protected:
  // Sets how many shards the first input has, of `length` numbers each.
  absl::Status count_shards(tensorflow::OpKernelContext* context, const char* input, int64_t length,
                            int64_t* shards) const {
    const tensorflow::Tensor& given = context->input(0);
    TF_RETURN_IF_ERROR(check_vector(context, input, given));
    *shards = given.NumElements() / length;
    if (*shards >= 1 && *shards * length == given.NumElements()) return absl::OkStatus();
    return tensorflow::errors::InvalidArgument(
        "`", input, "` must have a multiple of ", length, " numbers, as its shards have. Received ",
        given.NumElements(), " (", name(), "). Pad the vector.");
  }

  LowBits layout_;
};

// Of an op that updates a residual.
template <bool kGpu>
class LowBitsStateOp : public LowBitsOp {
 public:
  explicit LowBitsStateOp(tensorflow::OpKernelConstruction* context) : LowBitsOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("real", &real_));
    real_ = std::max<int64_t>(real_, 0);  // the entries before a shard are subtracted from it
  }

 protected:
  // Calls body(the residual's entries from `start` on, of which there must be n) while it is locked.
  template <class Body>
  absl::Status with_residual(tensorflow::OpKernelContext* context, int64_t start, int64_t n,
                             const Body& body) const {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    TF_RETURN_IF_ERROR(
        tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 1), &variable));
    const tensorflow::mutex_lock lock(*variable->mu());
    const int64_t size = variable->tensor()->NumElements();
    if (n > size || start > size - n)  // start + n may not fit 64 bits
      return tensorflow::errors::InvalidArgument(
          "`residual` must have ", static_cast<uint64_t>(start) + n,
          " entries or more: the shards have ", n, " of them, from ", start, " on. Received ",
          variable->DebugString(), " (", name(), "). Make it anew for this bucket.");
    float* residual;
    TF_RETURN_IF_ERROR(open_state<kGpu>(context, "residual", variable.get(), size, &residual));
    return body(residual + start);
  }

  int64_t real_;
};

template <bool kGpu>
class LowBitsWriteOp : public LowBitsStateOp<kGpu> {
 public:
  using LowBitsStateOp<kGpu>::LowBitsStateOp;

  void Compute(tensorflow::OpKernelContext* context) override {
    const LowBits& layout = this->layout_;
    const tensorflow::Tensor& gradient = context->input(0);
    int64_t shards;
    OP_REQUIRES_OK(context, this->count_shards(context, "gradient", layout.entries, &shards));
    tensorflow::Tensor* words;
    OP_REQUIRES_OK(context, context->allocate_output(0, {shards * layout.words()}, &words));
    const float* from = static_cast<const float*>(gradient.data());
    int32_t* to = static_cast<int32_t*>(words->data());
    const auto write = [&](float* residual) {
      if constexpr (kGpu)
        return launched(context, low_bits_write_cuda(layout, shards, from, residual, this->real_,
                                                     to, stream_of(context)));
      low_bits_write_cpu(layout, shards, from, residual, this->real_, to,
                         shared_with_pool(context));
      return absl::OkStatus();
    };
    OP_REQUIRES_OK(context, this->with_residual(context, 0, shards * layout.entries, write));
  }
};

template <bool kGpu>
class LowBitsAddOp : public LowBitsStateOp<kGpu> {
 public:
  explicit LowBitsAddOp(tensorflow::OpKernelConstruction* context) : LowBitsStateOp<kGpu>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("start", &start_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const LowBits& layout = this->layout_;
    int64_t parts;
    OP_REQUIRES_OK(context, this->count_shards(context, "words", layout.words(), &parts));
    tensorflow::Tensor* total;
    OP_REQUIRES_OK(context, context->allocate_output(0, {layout.words()}, &total));
    const int32_t* from = static_cast<const int32_t*>(context->input(0).data());
    int32_t* to = static_cast<int32_t*>(total->data());
    const auto add = [&](float* residual) {
      if constexpr (kGpu)
        return launched(context, low_bits_add_cuda(layout, parts, from, residual, this->real_, to,
                                                   stream_of(context)));
      low_bits_add_cpu(layout, parts, from, residual, this->real_, to, shared_with_pool(context));
      return absl::OkStatus();
    };
    OP_REQUIRES_OK(context, this->with_residual(context, start_, layout.entries, add));
  }

 private:
  int64_t start_;
};

template <bool kGpu>
class LowBitsReadOp : public LowBitsOp {
 public:
  explicit LowBitsReadOp(tensorflow::OpKernelConstruction* context) : LowBitsOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("factor", &factor_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    int64_t shards;
    OP_REQUIRES_OK(context, count_shards(context, "words", layout_.words(), &shards));
    tensorflow::Tensor* total;
    OP_REQUIRES_OK(context, context->allocate_output(0, {shards * layout_.entries}, &total));
    const int32_t* from = static_cast<const int32_t*>(context->input(0).data());
    float* to = static_cast<float*>(total->data());
    if constexpr (kGpu) {
      OP_REQUIRES_OK(context, launched(context, low_bits_read_cuda(layout_, shards, from, factor_,
                                                                   to, stream_of(context))));
    } else {
      low_bits_read_cpu(layout_, shards, from, factor_, to, shared_with_pool(context));
    }
  }

 private:
  float factor_;
};

REGISTER_KERNEL_BUILDER(Name("TfcommxLowBitsWrite").Device(tensorflow::DEVICE_CPU),
                        LowBitsWriteOp<false>);
REGISTER_KERNEL_BUILDER(Name("TfcommxLowBitsAdd").Device(tensorflow::DEVICE_CPU),
                        LowBitsAddOp<false>);
REGISTER_KERNEL_BUILDER(Name("TfcommxLowBitsRead").Device(tensorflow::DEVICE_CPU),
                        LowBitsReadOp<false>);
#if TFCOMMX_CUDA
REGISTER_KERNEL_BUILDER(
    Name("TfcommxLowBitsWrite").Device(tensorflow::DEVICE_GPU).HostMemory("residual"),
    LowBitsWriteOp<true>);
REGISTER_KERNEL_BUILDER(
    Name("TfcommxLowBitsAdd").Device(tensorflow::DEVICE_GPU).HostMemory("residual"),
    LowBitsAddOp<true>);
REGISTER_KERNEL_BUILDER(Name("TfcommxLowBitsRead").Device(tensorflow::DEVICE_GPU),
                        LowBitsReadOp<true>);
#endif

}  // namespace
}  // namespace tfcommx
