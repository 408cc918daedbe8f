// When a tensor is there: the clock, read in the moment in which its one entry is on the host.
#include <time.h>

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfcommx {
namespace {

// Not stateful: automatic control dependencies would chain the stamps of a function.
REGISTER_OP("TfcommxStamp")
    .Input("entry: T")
    .Attr("T: {float16, bfloat16, float, double}")
    .Output("seconds: double")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

class StampOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  // The executor runs it at once, in the thread that has made its input, and does not queue it
  bool IsExpensive() override { return false; }

  void Compute(tensorflow::OpKernelContext* context) override {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);  // As Python's time.perf_counter on Linux
    tensorflow::Tensor* seconds;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &seconds));
    seconds->scalar<double>()() = double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
  }
};

REGISTER_KERNEL_BUILDER(Name("TfcommxStamp").Device(tensorflow::DEVICE_CPU), StampOp);
#if TFCOMMX_CUDA
// On the host, so TensorFlow copies the entry there first: that waits for the kernel that makes it
REGISTER_KERNEL_BUILDER(
    Name("TfcommxStamp").Device(tensorflow::DEVICE_GPU).HostMemory("entry").HostMemory("seconds"),
    StampOp);
#endif

}  // namespace
}  // namespace tfcommx
