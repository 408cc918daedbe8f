// TfcommxLarsUpdate: the update of LARS for many variables in one pass.
#include "kernels/lars.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/common.h"

namespace tfcommx {
namespace {

REGISTER_OP("TfcommxLarsUpdate")
    .Input("weights: N * resource")
    .Input("momenta: N * resource")
    .Input("gradients: N * float")
    .Input("rates: float")
    .Attr("N: int >= 1")
    .Attr("decays: list(float)")
    .Attr("momentum: float")
    .Attr("nesterov: bool")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle unused;
      return c->WithRank(c->input(c->num_inputs() - 1), 1, &unused);
    })
    .Doc(R"(Updates weights and momenta in place; ops/kernels/lars.h has the formula.

weights: float32 variables.
momenta: others, of the same shapes.
gradients: of the same shapes.
rates: float32 [N], learning rate times trust ratio.
decays: of each variable.
)");

template <bool kGpu>
class LarsUpdateOp : public tensorflow::OpKernel {
 public:
  explicit LarsUpdateOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("decays", &decays_));
    OP_REQUIRES_OK(construction, construction->GetAttr("momentum", &options_.momentum));
    OP_REQUIRES_OK(construction, construction->GetAttr("nesterov", &options_.nesterov));
    OP_REQUIRES(construction, static_cast<int64_t>(decays_.size()) * 3 + 1 == num_inputs(),
                tensorflow::errors::InvalidArgument("`decays` must have one for each variable. "
                                                    "Received ",
                                                    decays_.size(), " (", name(), ")."));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const int64_t count = decays_.size();
    const tensorflow::Tensor& rates = context->input(3 * count);
    OP_REQUIRES(context, rates.NumElements() == count,
                tensorflow::errors::InvalidArgument(
                    "`rates` must have one for each of ", count, " variables. Received shape ",
                    rates.shape().DebugString(), " (", name(), ")."));
    // Weights, then momenta.
    std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> variables(2 * count);
    std::vector<tensorflow::Var*> ordered(2 * count);
    for (int64_t i = 0; i < 2 * count; ++i) {
      OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                  context, tensorflow::HandleFromInput(context, i), &variables[i]));
      ordered[i] = variables[i].get();
    }
    // In one order, so that two such operations cannot wait for each other.
    std::sort(ordered.begin(), ordered.end());
    const auto twice = std::adjacent_find(ordered.begin(), ordered.end());
    OP_REQUIRES(
        context, twice == ordered.end(),
        tensorflow::errors::InvalidArgument("Each variable must be given once. Received ",
                                            (*twice)->DebugString(), " twice (", name(), ")."));
    std::vector<std::unique_ptr<tensorflow::mutex_lock>> locks;
    for (tensorflow::Var* variable : ordered)
      locks.push_back(std::make_unique<tensorflow::mutex_lock>(*variable->mu()));

    std::vector<LarsVector> vectors(count);
    for (int64_t i = 0; i < count; ++i) {
      const tensorflow::Tensor& gradient = context->input(2 * count + i);
      for (tensorflow::Var* variable : {variables[i].get(), variables[count + i].get()}) {
        OP_REQUIRES(
            context,
            variable->is_initialized && variable->tensor()->dtype() == tensorflow::DT_FLOAT &&
                variable->tensor()->shape() == gradient.shape(),
            tensorflow::errors::InvalidArgument("Weight and momentum must be initialised float32 "
                                                "variables of the gradient's shape, ",
                                                gradient.shape().DebugString(), ". Received ",
                                                variable->DebugString(), " (", name(), ")."));
        OP_REQUIRES_OK(context, make_own<kGpu>(context, variable->tensor()));
      }
      vectors[i] = {static_cast<float*>(variables[i]->tensor()->data()),
                    static_cast<float*>(variables[count + i]->tensor()->data()),
                    static_cast<const float*>(gradient.data()), gradient.NumElements(), decays_[i]};
    }
    const float* each = static_cast<const float*>(rates.data());
    if constexpr (kGpu) {
      OP_REQUIRES_OK(context, launched(context, lars_cuda(vectors.data(), each, count, options_,
                                                          stream_of(context))));
    } else {
      lars_cpu(vectors.data(), each, count, options_, shared_with_pool(context));
    }
  }

 private:
  std::vector<float> decays_;
  LarsOptions options_{};
};

REGISTER_KERNEL_BUILDER(Name("TfcommxLarsUpdate").Device(tensorflow::DEVICE_CPU),
                        LarsUpdateOp<false>);
#if TFCOMMX_CUDA
REGISTER_KERNEL_BUILDER(Name("TfcommxLarsUpdate")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("weights")
                            .HostMemory("momenta"),
                        LarsUpdateOp<true>);
#endif

}  // namespace
}  // namespace tfcommx
