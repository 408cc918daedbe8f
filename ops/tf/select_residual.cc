// TfcommxSelectResidual: k entries of gradient + residual by magnitude; the residual variable keeps the rest.
#include <cstring>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/common.h"

namespace tfcommx {
namespace {

REGISTER_OP("TfcommxSelectResidual")
    .Input("gradient: T")
    .Input("residual: resource")
    .Input("k: int64")
    .Input("seed: int64")
    .Output("indices: int32")
    .Output("values: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("rule: {'exact', 'mstopk'}")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle unused;
      tensorflow::shape_inference::DimensionHandle k;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 0, &unused));
      TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(2, &k));
      c->set_output(0, c->Vector(k));
      c->set_output(1, c->Vector(k));
      return absl::OkStatus();
    })
    .Doc(R"(Chooses k entries of gradient + residual by magnitude, and leaves the others in the residual.

residual: a float32 [n] variable, updated in place; ops/kernels/select.h has the semantics.
indices: int32 [k], ascending, unique, in [0, n).
values: float32 [k].
)");

// A tensor that others still read (a value read from the variable before) must not change under them.
template <bool kGpu>
absl::Status make_own(tensorflow::OpKernelContext* context, tensorflow::Tensor* tensor) {
  if (tensor->RefCountIsOne()) return absl::OkStatus();
  tensorflow::Tensor own;
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, tensor->shape(), &own));
  if constexpr (kGpu) {
    TF_RETURN_IF_ERROR(launched(context, copy_cuda(own.data(), tensor->data(), tensor->TotalBytes(), stream_of(context))));
  } else {
    std::memcpy(own.data(), tensor->data(), tensor->TotalBytes());
  }
  *tensor = own;
  return absl::OkStatus();
}

template <class T, bool kGpu>
class SelectResidualOp : public tensorflow::OpKernel {
 public:
  explicit SelectResidualOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    std::string rule;
    OP_REQUIRES_OK(construction, construction->GetAttr("rule", &rule));
    rule_ = rule == "exact" ? Rule::exact : Rule::mstopk;
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& gradient = context->input(0);
    const int64_t n = gradient.NumElements(), k = context->input(2).scalar<int64_t>()();
    OP_REQUIRES_OK(context, check_vector(context, "gradient", gradient));
    OP_REQUIRES_OK(context, check_k(context, k, n));

    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 1), &variable));
    tensorflow::mutex_lock lock(*variable->mu());
    tensorflow::Tensor* residual = variable->tensor();
    OP_REQUIRES(context, variable->is_initialized,
                tensorflow::errors::FailedPrecondition("`residual` must be initialised, to zeros at first. Received the uninitialised ",
                                                       variable->DebugString(), " (", context->op_kernel().name(), ")."));
    OP_REQUIRES(context, residual->dtype() == tensorflow::DT_FLOAT && residual->NumElements() == n,
                tensorflow::errors::InvalidArgument("`residual` must be a float32 variable of as many entries as `gradient`, ", n,
                                                    ". Received ", variable->DebugString(), " (", context->op_kernel().name(),
                                                    "). Make it anew for this bucket."));
    OP_REQUIRES_OK(context, make_own<kGpu>(context, residual));

    tensorflow::Tensor *indices, *values;
    OP_REQUIRES_OK(context, context->allocate_output(0, {k}, &indices));
    OP_REQUIRES_OK(context, context->allocate_output(1, {k}, &values));
    const uint64_t seed = static_cast<uint64_t>(context->input(3).scalar<int64_t>()());
    OP_REQUIRES_OK(context, select_on_device<kGpu>(context, {gradient.data(), float_of<T>(), static_cast<float*>(residual->data()),
                                                             nullptr, 0.0f, n, k, seed, rule_, static_cast<int32_t*>(indices->data()),
                                                             static_cast<float*>(values->data())}));
  }

 private:
  Rule rule_;
};

#define REGISTER(T)                                                                                             \
  REGISTER_KERNEL_BUILDER(Name("TfcommxSelectResidual").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), \
                          SelectResidualOp<T, false>)
REGISTER(float);
REGISTER(Eigen::half);
REGISTER(tensorflow::bfloat16);
#undef REGISTER

#if TFCOMMX_CUDA
#define REGISTER(T)                                         \
  REGISTER_KERNEL_BUILDER(Name("TfcommxSelectResidual")     \
                              .Device(tensorflow::DEVICE_GPU) \
                              .TypeConstraint<T>("T")       \
                              .HostMemory("residual")       \
                              .HostMemory("k")              \
                              .HostMemory("seed"),          \
                          SelectResidualOp<T, true>)
REGISTER(float);
REGISTER(Eigen::half);
REGISTER(tensorflow::bfloat16);
#undef REGISTER
#endif

}  // namespace
}  // namespace tfcommx
