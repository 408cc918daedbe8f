// TfcommxKeep: what rounding leaves of selected entries, put into their residual.
#include "kernels/keep.h"

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/state.h"

namespace tfcommx {
namespace {

REGISTER_OP("TfcommxKeep")
    .Input("residual: resource")
    .Input("indices: int32")
    .Input("values: float")
    .Input("errors: float")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle entries;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &entries));
      TF_RETURN_IF_ERROR(c->Merge(c->input(2), entries, &entries));
      return c->Merge(c->input(3), entries, &entries);
    })
    .Doc(R"(Writes errors at their indices, where the value is finite.

residual: a float32 variable [n], updated.
indices: int32 [k], in [0, n), none twice.
values: float32 [k], what was selected.
errors: float32 [k], what of it was not written.
)");

template <bool kGpu>
class KeepOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor &indices = context->input(1), &values = context->input(2),
                             &errors = context->input(3);
    OP_REQUIRES(context,
                indices.dims() == 1 && indices.shape() == values.shape() &&
                    indices.shape() == errors.shape(),
                tensorflow::errors::InvalidArgument(
                    "`indices`, `values` and `errors` must be vectors of one length. Received ",
                    indices.shape().DebugString(), ", ", values.shape().DebugString(), " and ",
                    errors.shape().DebugString(), " (", name(), ")."));
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &variable));
    const tensorflow::mutex_lock lock(*variable->mu());
    const int64_t n = variable->tensor()->NumElements();
    float* residual;
    OP_REQUIRES_OK(context, open_state<kGpu>(context, "residual", variable.get(), n, &residual));
    const int32_t* places = static_cast<const int32_t*>(indices.data());
    const Keep keep{places,
                    static_cast<const float*>(values.data()),
                    static_cast<const float*>(errors.data()),
                    indices.NumElements(),
                    residual,
                    n};
    if constexpr (kGpu) {
      OP_REQUIRES_OK(context, launched(context, keep_cuda(keep, stream_of(context))));
    } else {
      const int64_t outside = keep_cpu(keep);
      OP_REQUIRES(context, outside < 0,
                  tensorflow::errors::InvalidArgument("Indices must be in [0, ", n, "). Received ",
                                                      outside < 0 ? 0 : places[outside],
                                                      " at position ", outside, " (", name(),
                                                      "). Is the residual this bucket's?"));
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("TfcommxKeep").Device(tensorflow::DEVICE_CPU), KeepOp<false>);
#if TFCOMMX_CUDA
REGISTER_KERNEL_BUILDER(Name("TfcommxKeep").Device(tensorflow::DEVICE_GPU).HostMemory("residual"),
                        KeepOp<true>);
#endif

}  // namespace
}  // namespace tfcommx
