// TfcommxSelect: k entries of a gradient by magnitude, without a residual.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/common.h"

namespace tfcommx {
namespace {

REGISTER_OP("TfcommxSelect")
    .Input("gradient: T")
    .Input("k: int64")
    .Input("seed: int64")
    .Output("indices: int32")
    .Output("values: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("rule: {'exact', 'mstopk'}")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle unused;
      tensorflow::shape_inference::DimensionHandle k;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 0, &unused));
      TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(1, &k));
      c->set_output(0, c->Vector(k));
      c->set_output(1, c->Vector(k));
      return absl::OkStatus();
    })
    .Doc(R"(Chooses k entries of a gradient by magnitude; ops/kernels/select.h has the semantics.

indices: int32 [k], ascending, unique, in [0, n).
values: float32 [k], gradient[indices].
)");

template <class T, bool kGpu>
class SelectOp : public tensorflow::OpKernel {
 public:
  explicit SelectOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    std::string rule;
    OP_REQUIRES_OK(construction, construction->GetAttr("rule", &rule));
    rule_ = rule == "exact" ? Rule::exact : Rule::mstopk;
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& gradient = context->input(0);
    const int64_t n = gradient.NumElements(), k = context->input(1).scalar<int64_t>()();
    OP_REQUIRES_OK(context, check_vector(context, "gradient", gradient));
    OP_REQUIRES_OK(context, check_k(context, k, n));
    tensorflow::Tensor *indices, *values;
    OP_REQUIRES_OK(context, context->allocate_output(0, {k}, &indices));
    OP_REQUIRES_OK(context, context->allocate_output(1, {k}, &values));
    const uint64_t seed = static_cast<uint64_t>(context->input(2).scalar<int64_t>()());
    OP_REQUIRES_OK(context, select_on_device<kGpu>(context, {gradient.data(), float_of<T>(), nullptr, nullptr, 0.0f, n, k, seed, rule_,
                                                             static_cast<int32_t*>(indices->data()),
                                                             static_cast<float*>(values->data())}));
  }

 private:
  Rule rule_;
};

#define REGISTER(T) \
  REGISTER_KERNEL_BUILDER(Name("TfcommxSelect").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), SelectOp<T, false>)
REGISTER(float);
REGISTER(Eigen::half);
REGISTER(tensorflow::bfloat16);
#undef REGISTER

#if TFCOMMX_CUDA
#define REGISTER(T)                                                                                                               \
  REGISTER_KERNEL_BUILDER(                                                                                                        \
      Name("TfcommxSelect").Device(tensorflow::DEVICE_GPU).TypeConstraint<T>("T").HostMemory("k").HostMemory("seed"), \
      SelectOp<T, true>)
REGISTER(float);
REGISTER(Eigen::half);
REGISTER(tensorflow::bfloat16);
#undef REGISTER
#endif

}  // namespace
}  // namespace tfcommx
