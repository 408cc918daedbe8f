// TfcommxSelect, TfcommxSelectResidual, TfcommxSelectMomentum: k entries of a gradient by
// magnitude; variables keep the rest.
#include <algorithm>
#include <array>
#include <cstring>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/state.h"

namespace tfcommx {
namespace {

using tensorflow::shape_inference::InferenceContext;

// Of inputs gradient, kStates variables, k, seed.
template <int kStates>
absl::Status infer_shapes(InferenceContext* c) {
  tensorflow::shape_inference::ShapeHandle unused;
  tensorflow::shape_inference::DimensionHandle k;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
  TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(1 + kStates, &k));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2 + kStates), 0, &unused));
  c->set_output(0, c->Vector(k));
  c->set_output(1, c->Vector(k));
  return absl::OkStatus();
}

REGISTER_OP("TfcommxSelect")
    .Input("gradient: T")
    .Input("k: int64")
    .Input("seed: int64")
    .Output("indices: int32")
    .Output("values: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("rule: {'exact', 'mstopk'}")
    .SetShapeFn(infer_shapes<0>)
    .Doc(R"(Chooses k entries of a gradient by magnitude; ops/kernels/select.h has the semantics.

indices: int32 [k], ascending, unique, in [0, n).
values: float32 [k], gradient[indices].
)");

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
    .SetShapeFn(infer_shapes<1>)
    .Doc(R"(Chooses k entries of gradient + residual by magnitude, and leaves the others there.

residual: a float32 [n] variable, updated in place; ops/kernels/select.h has the semantics.
indices: int32 [k], ascending, unique, in [0, n).
values: float32 [k].
)");

REGISTER_OP("TfcommxSelectMomentum")
    .Input("gradient: T")
    .Input("residual: resource")
    .Input("velocity: resource")
    .Input("k: int64")
    .Input("seed: int64")
    .Output("indices: int32")
    .Output("values: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("rule: {'exact', 'mstopk'}")
    .Attr("momentum: float")
    .SetIsStateful()
    .SetShapeFn(infer_shapes<2>)
    .Doc(R"(Moves the velocity by the gradient, then chooses k entries of velocity + residual.

residual: a float32 [n] variable, updated in place; ops/kernels/select.h has the semantics.
velocity: another one.
indices: int32 [k], ascending, unique, in [0, n).
values: float32 [k].
momentum: in [0, 1).
)");

template <class T, int kStates, bool kGpu>
class SelectOp : public tensorflow::OpKernel {
 public:
  explicit SelectOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    std::string rule;
    OP_REQUIRES_OK(construction, construction->GetAttr("rule", &rule));
    rule_ = rule == "exact" ? Rule::exact : Rule::mstopk;
    if (kStates < 2) return;
    OP_REQUIRES_OK(construction, construction->GetAttr("momentum", &momentum_));
    OP_REQUIRES(construction, momentum_ >= 0 && momentum_ < 1,
                tensorflow::errors::InvalidArgument("`momentum` must be in [0, 1). Received ",
                                                    momentum_, " (", name(), ")."));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor& gradient = context->input(0);
    const int64_t n = gradient.NumElements();
    int64_t k, seed;
    OP_REQUIRES_OK(context, get_scalar(context, 1 + kStates, "k", &k));
    OP_REQUIRES_OK(context, get_scalar(context, 2 + kStates, "seed", &seed));
    OP_REQUIRES_OK(context, check_vector(context, "gradient", gradient));
    OP_REQUIRES_OK(context, check_k(context, k, n));

    constexpr std::array names = {"residual", "velocity"};
    std::array<tensorflow::core::RefCountPtr<tensorflow::Var>, 2> variables;
    std::array<std::unique_ptr<tensorflow::mutex_lock>, 2> locks;
    std::array<float*, 2> states = {nullptr, nullptr};
    for (int i = 0; i < kStates; ++i)
      OP_REQUIRES_OK(
          context, tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 1 + i),
                                              &variables[i]));
    OP_REQUIRES(context, kStates < 2 || variables[0].get() != variables[1].get(),
                tensorflow::errors::InvalidArgument(
                    "`velocity` must be another variable than `residual`. Received ",
                    variables[0]->DebugString(), " for both (", name(), ")."));
    // In one order, so that two such operations cannot wait for each other.
    std::array<tensorflow::Var*, 2> ordered = {variables[0].get(), variables[1].get()};
    std::sort(ordered.begin(), ordered.begin() + kStates);
    for (int i = 0; i < kStates; ++i)
      locks[i] = std::make_unique<tensorflow::mutex_lock>(*ordered[i]->mu());
    for (int i = 0; i < kStates; ++i)
      OP_REQUIRES_OK(context,
                     open_state<kGpu>(context, names[i], variables[i].get(), n, &states[i]));

    tensorflow::Tensor *indices, *values;
    OP_REQUIRES_OK(context, context->allocate_output(0, {k}, &indices));
    OP_REQUIRES_OK(context, context->allocate_output(1, {k}, &values));
    OP_REQUIRES_OK(context, select_on_device<kGpu>(
                                context, {gradient.data(), float_of<T>(), states[0], states[1],
                                          momentum_, n, k, static_cast<uint64_t>(seed), rule_,
                                          static_cast<int32_t*>(indices->data()),
                                          static_cast<float*>(values->data())}));
  }

 private:
  Rule rule_;
  float momentum_ = 0;
};

#define KERNEL(T, NAME, DEVICE) Name(NAME).Device(tensorflow::DEVICE).TypeConstraint<T>("T")
#define REGISTER(T)                                                                               \
  REGISTER_KERNEL_BUILDER(KERNEL(T, "TfcommxSelect", DEVICE_CPU), SelectOp<T, 0, false>);         \
  REGISTER_KERNEL_BUILDER(KERNEL(T, "TfcommxSelectResidual", DEVICE_CPU), SelectOp<T, 1, false>); \
  REGISTER_KERNEL_BUILDER(KERNEL(T, "TfcommxSelectMomentum", DEVICE_CPU), SelectOp<T, 2, false>)
REGISTER(float);
REGISTER(Eigen::half);
REGISTER(tensorflow::bfloat16);
#undef REGISTER

#if TFCOMMX_CUDA
#define HOST(T, NAME) KERNEL(T, NAME, DEVICE_GPU).HostMemory("k").HostMemory("seed")
#define REGISTER(T)                                                                   \
  REGISTER_KERNEL_BUILDER(HOST(T, "TfcommxSelect"), SelectOp<T, 0, true>);            \
  REGISTER_KERNEL_BUILDER(HOST(T, "TfcommxSelectResidual").HostMemory("residual"),    \
                          SelectOp<T, 1, true>);                                      \
  REGISTER_KERNEL_BUILDER(                                                            \
      HOST(T, "TfcommxSelectMomentum").HostMemory("residual").HostMemory("velocity"), \
      SelectOp<T, 2, true>)
REGISTER(float);
REGISTER(Eigen::half);
REGISTER(tensorflow::bfloat16);
#undef REGISTER
#undef HOST
#endif
#undef KERNEL

}  // namespace
}  // namespace tfcommx
