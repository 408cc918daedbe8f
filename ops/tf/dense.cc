// TfcommxDenseWrite, TfcommxDenseAdd: a dense vector in 16 bits, and sums of several.
#include "kernels/dense.h"

#include <string>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/state.h"

namespace tfcommx {
namespace {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TfcommxDenseWrite")
    .Input("gradient: float")
    .Input("residual: resource")
    .Output("written: half")
    .Attr("type: {'float16', 'bfloat16'}")
    .Attr("start: int >= 0 = 0")
    .Attr("scale: float = 1")
    .Attr("reach: float = 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle vector;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
      c->set_output(0, vector);
      return absl::OkStatus();
    })
    .Doc(R"(Writes gradient + residual in 16 bits; ops/kernels/dense.h has the semantics.

residual: a float32 variable, of which the entries from `start` on are the gradient's; updated.
written: [n]; of bfloat16 the bits.
scale: a power of two <= 1, of what is written.
reach: a power of two >= 1: float16 carries up to 65504 times this of an entry. There at most 1 / scale,
  beyond which an entry would become infinite.
)");

REGISTER_OP("TfcommxDenseAdd")
    .Input("written: half")
    .Output("total: float")
    .Attr("type: {'float16', 'bfloat16'}")
    .Attr("parts: int >= 1 = 1")
    .Attr("factor: float = 1")
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle vector;
      tensorflow::shape_inference::DimensionHandle length;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &vector));
      int64_t parts;
      TF_RETURN_IF_ERROR(c->GetAttr("parts", &parts));
      TF_RETURN_IF_ERROR(c->Divide(c->Dim(vector, 0), parts, true, &length));
      c->set_output(0, c->Vector(length));
      return absl::OkStatus();
    })
    .Doc(R"(Adds equal parts of what TfcommxDenseWrite wrote, in their order and in float32.

written: [parts * n].
total: [n], the sums times `factor`.
)");

// Whether a number is a power of two whose reciprocal is one, too.
bool is_power_of_two(float x) {
  return x >= 0x1p-126f && x <= 0x1p126f && (bits_of(x) & 0x7fffff) == 0;
}

class DenseOp : public tensorflow::OpKernel {
 public:
  explicit DenseOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    std::string type;
    OP_REQUIRES_OK(context, context->GetAttr("type", &type));
    type_ = type == "float16" ? Float::float16 : Float::bfloat16;
  }

 protected:
  Float type_;
};

template <bool kGpu>
class DenseWriteOp : public DenseOp {
 public:
  explicit DenseWriteOp(tensorflow::OpKernelConstruction* context) : DenseOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("start", &start_));
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    OP_REQUIRES_OK(context, context->GetAttr("reach", &reach_));
    OP_REQUIRES(context, is_power_of_two(scale_) && scale_ <= 1,
                tensorflow::errors::InvalidArgument(
                    "`scale` must be a power of two in [2^-126, 1]. Received ", scale_, " (",
                    name(), "). Other numbers cannot be divided by without a rounding error."));
    OP_REQUIRES(
        context,
        is_power_of_two(reach_) && reach_ >= 1 && (type_ != Float::float16 || reach_ * scale_ <= 1),
        tensorflow::errors::InvalidArgument(
            "`reach` must be a power of two in [1, 2^126], and for float16 at most 1 / scale. "
            "Received ",
            reach_, ", scale=", scale_, " (", name(), "). Pass 1 / scale."));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& gradient = context->input(0);
    OP_REQUIRES_OK(context, check_vector(context, "gradient", gradient));
    const int64_t n = gradient.NumElements();
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 1), &variable));
    const tensorflow::mutex_lock lock(*variable->mu());
    const int64_t size = variable->tensor()->NumElements();
    OP_REQUIRES(
        context, n <= size && start_ <= size - n,  // start_ + n may not fit 64 bits
        tensorflow::errors::InvalidArgument(
            "`residual` must have ", static_cast<uint64_t>(start_) + n,
            " entries or more: `gradient` has ", n, " of them, from ", start_, " on. Received ",
            variable->DebugString(), " (", name(), "). Make it anew for this bucket."));
    float* residual;
    OP_REQUIRES_OK(context, open_state<kGpu>(context, "residual", variable.get(), size, &residual));
    tensorflow::Tensor* written;
    OP_REQUIRES_OK(context, context->allocate_output(0, {n}, &written));
    const Rounding how{type_, scale_, reach_};
    const float* from = static_cast<const float*>(gradient.data());
    uint16_t* to = static_cast<uint16_t*>(written->data());
    if constexpr (kGpu) {
      OP_REQUIRES_OK(context, launched(context, dense_write_cuda(how, from, residual + start_, to,
                                                                 n, stream_of(context))));
    } else {
      dense_write_cpu(how, from, residual + start_, to, n, shared_with_pool(context));
    }
  }

 private:
  int64_t start_;
  float scale_, reach_;
};

template <bool kGpu>
class DenseAddOp : public DenseOp {
 public:
  explicit DenseAddOp(tensorflow::OpKernelConstruction* context) : DenseOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("parts", &parts_));
    OP_REQUIRES_OK(context, context->GetAttr("factor", &factor_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& written = context->input(0);
    const int64_t n = written.NumElements() / parts_;
    OP_REQUIRES(context, written.dims() == 1 && n * parts_ == written.NumElements(),
                tensorflow::errors::InvalidArgument(
                    "`written` must be ", parts_, " equal parts. Received shape ",
                    written.shape().DebugString(), " (", name(), "). Pad the vector."));
    tensorflow::Tensor* total;
    OP_REQUIRES_OK(context, context->allocate_output(0, {n}, &total));
    const uint16_t* from = static_cast<const uint16_t*>(written.data());
    float* to = static_cast<float*>(total->data());
    if constexpr (kGpu) {
      OP_REQUIRES_OK(context, launched(context, dense_add_cuda(type_, from, parts_, factor_, to, n,
                                                               stream_of(context))));
    } else {
      dense_add_cpu(type_, from, parts_, factor_, to, n, shared_with_pool(context));
    }
  }

 private:
  int64_t parts_;
  float factor_;
};

REGISTER_KERNEL_BUILDER(Name("TfcommxDenseWrite").Device(tensorflow::DEVICE_CPU),
                        DenseWriteOp<false>);
REGISTER_KERNEL_BUILDER(Name("TfcommxDenseAdd").Device(tensorflow::DEVICE_CPU), DenseAddOp<false>);
#if TFCOMMX_CUDA
REGISTER_KERNEL_BUILDER(
    Name("TfcommxDenseWrite").Device(tensorflow::DEVICE_GPU).HostMemory("residual"),
    DenseWriteOp<true>);
REGISTER_KERNEL_BUILDER(Name("TfcommxDenseAdd").Device(tensorflow::DEVICE_GPU), DenseAddOp<true>);
#endif

}  // namespace
}  // namespace tfcommx
