// TfcommxMerge: the selected entries of all ranks, added into one dense vector.
#include "kernels/merge.h"

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/common.h"

namespace tfcommx {
namespace {

REGISTER_OP("TfcommxMerge")
    .Input("indices: int32")
    .Input("values: float")
    .Input("size: int64")
    .Attr("k: int >= 0 = 0")
    .Output("dense: float")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle pairs;
      tensorflow::shape_inference::DimensionHandle size;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &pairs));
      TF_RETURN_IF_ERROR(c->Merge(c->input(1), pairs, &pairs));
      TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(2, &size));
      c->set_output(0, c->Vector(size));
      return absl::OkStatus();
    })
    .Doc(R"(Adds (index, value) pairs into zeros, each entry's values in the order of the list.

indices: int32 [pairs], in [0, size).
values: float32 [pairs].
k: the list is made of runs of k pairs, each ascending without a repeated index; 0: it may be any
  list, which only CPUs merge.
dense: float32 [size].
)");

template <bool kGpu>
class MergeOp : public tensorflow::OpKernel {
 public:
  explicit MergeOp(tensorflow::OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("k", &k_));
    // Threads of a GPU count positions in 32 bits, up to a few hundred beyond the end of a run
    OP_REQUIRES(construction, !kGpu || k_ <= int64_t{1} << 30,
                tensorflow::errors::InvalidArgument("`k` must be at most 2^30 on a GPU. Received ",
                                                    k_, " (", name(), "). Merge on /cpu:0."));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor &indices = context->input(0), &values = context->input(1);
    const int64_t pairs = indices.NumElements();
    int64_t size;
    OP_REQUIRES_OK(context, get_scalar(context, 2, "size", &size));
    OP_REQUIRES(context, indices.dims() == 1 && indices.shape() == values.shape(),
                tensorflow::errors::InvalidArgument(
                    "`indices` and `values` must be vectors of one length. Received ",
                    indices.shape().DebugString(), " and ", values.shape().DebugString(), " (",
                    context->op_kernel().name(), ")."));
    OP_REQUIRES(context, size >= 0 && size <= std::numeric_limits<int32_t>::max(),
                tensorflow::errors::InvalidArgument("`size` must be in [0, 2^31). Received ", size,
                                                    " (", context->op_kernel().name(),
                                                    "). Cut what is longer into buckets."));
    OP_REQUIRES(context, k_ > 0 ? pairs % k_ == 0 : !kGpu || pairs == 0,
                tensorflow::errors::InvalidArgument(
                    "The pairs must be runs of `k`, and on a GPU `k` must be given. Received ",
                    pairs, " pairs, k=", k_, " (", context->op_kernel().name(),
                    "). Pass the entries that each rank sent as `k`, or merge on /cpu:0."));
    tensorflow::Tensor* dense;
    OP_REQUIRES_OK(context, context->allocate_output(0, {size}, &dense));
    const int32_t* first = static_cast<const int32_t*>(indices.data());
    const Merge merge{first, static_cast<const float*>(values.data()), pairs,
                      static_cast<float*>(dense->data()), size};
    if constexpr (kGpu) {
      tensorflow::Tensor workspace;
      OP_REQUIRES_OK(context,
                     context->allocate_temp(tensorflow::DT_INT32, {merge_cuda_workspace(merge, k_)},
                                            &workspace));
      OP_REQUIRES_OK(
          context, launched(context, merge_cuda(merge, k_, static_cast<int32_t*>(workspace.data()),
                                                stream_of(context))));
    } else {
      const int64_t outside = merge_cpu(merge, k_, shared_with_pool(context));
      OP_REQUIRES(context, outside < 0,
                  tensorflow::errors::InvalidArgument(
                      "Indices must be in [0, ", size, "). Received ",
                      outside < 0 ? 0 : first[outside], " at position ", outside, " (",
                      context->op_kernel().name(), "). Do all ranks have the same plan?"));
    }
  }

 private:
  int64_t k_;
};

REGISTER_KERNEL_BUILDER(Name("TfcommxMerge").Device(tensorflow::DEVICE_CPU), MergeOp<false>);
#if TFCOMMX_CUDA
REGISTER_KERNEL_BUILDER(Name("TfcommxMerge").Device(tensorflow::DEVICE_GPU).HostMemory("size"),
                        MergeOp<true>);
#endif

}  // namespace
}  // namespace tfcommx
