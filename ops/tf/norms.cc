// TfcommxSquaredNorms: the squared norms of many tensors, in one pass.
#include "kernels/norms.h"

#include <vector>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tf/common.h"

namespace tfcommx {
namespace {

REGISTER_OP("TfcommxSquaredNorms")
    .Input("tensors: T")
    .Attr("T: list({float, half, bfloat16}) >= 1")
    .Output("squares: float")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(c->num_inputs()));
      return absl::OkStatus();
    })
    .Doc(R"(Adds the squares of each tensor's entries; ops/kernels/norms.h has the order.

squares: float32, one for each tensor.
)");

template <bool kGpu>
class SquaredNormsOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    const int64_t count = context->num_inputs();
    std::vector<Vector> vectors(count);
    int64_t chunks = 0;
    for (int64_t i = 0; i < count; ++i) {
      const tensorflow::Tensor& tensor = context->input(i);
      vectors[i] = {tensor.data(), tensor.NumElements(), float_of(tensor.dtype())};
      chunks += vectors[i].chunks();
    }
    tensorflow::Tensor sums, *squares;
    OP_REQUIRES(context, chunks <= std::numeric_limits<int32_t>::max(),
                tensorflow::errors::InvalidArgument(
                    "The tensors must have fewer than 2^43 entries in all. Received ", chunks,
                    " chunks of 4096 (", name(), ")."));
    OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_FLOAT, {chunks}, &sums));
    OP_REQUIRES_OK(context, context->allocate_output(0, {count}, &squares));
    float *to = static_cast<float*>(squares->data()), *room = static_cast<float*>(sums.data());
    if constexpr (kGpu) {
      OP_REQUIRES_OK(context, launched(context, norms_cuda(vectors.data(), count, room, to,
                                                           stream_of(context))));
    } else {
      norms_cpu(vectors.data(), count, room, to, shared_with_pool(context));
    }
  }

 private:
  static Float float_of(tensorflow::DataType type) {
    return type == tensorflow::DT_FLOAT  ? Float::float32
           : type == tensorflow::DT_HALF ? Float::float16
                                         : Float::bfloat16;
  }
};

REGISTER_KERNEL_BUILDER(Name("TfcommxSquaredNorms").Device(tensorflow::DEVICE_CPU),
                        SquaredNormsOp<false>);
#if TFCOMMX_CUDA
REGISTER_KERNEL_BUILDER(Name("TfcommxSquaredNorms").Device(tensorflow::DEVICE_GPU),
                        SquaredNormsOp<true>);
#endif

}  // namespace
}  // namespace tfcommx
