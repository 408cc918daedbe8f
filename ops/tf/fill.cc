// The op TfcommxSlabFill: decodes JPEGs and PNGs with TensorFlow's own kernel, and puts them into
// the slab (kernels/fill.h).
//
// The kernel is called from here and not from the graph: there, one damaged file would end the
// whole batch.
#include <algorithm>
#include <memory>
#include <mutex>
#include <string>

#include "kernels/fill.h"
#include "tensorflow/core/framework/node_def_builder.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/public/version.h"
#include "tf/share.h"
#include "tf/slab.h"

namespace tfcommx {
namespace {

using tensorflow::NodeDef;
using tensorflow::NodeDefBuilder;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;
using tensorflow::errors::InvalidArgument;

REGISTER_OP("TfcommxSlabFill")
    // Files; those that are neither JPEGs nor PNGs, or have more than 8 bits, are left alone.
    .Input("encoded: string")
    .Input("samples: int64")
    .Input("labels: int64")
    .Input("state: uint8")  // 0: nothing is to be done; else anything
    // 0: this call has put the sample there; 3: another process had meanwhile; else `state`
    .Output("left: uint8")
    .Attr("path: string")
    .Attr("id: int")  // in the header of the slab
    .Attr("channels: int")
    .Attr("store: int")       // short side at which images are kept; 0: as they come
    .Attr("max_pixels: int")  // images with more are left alone
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

class SlabFill : public OpKernel {
 public:
  explicit SlabFill(OpKernelConstruction* context) : OpKernel(context) {
    std::string path;
    int64_t id;
    OP_REQUIRES_OK(context, context->GetAttr("path", &path));
    OP_REQUIRES_OK(context, context->GetAttr("id", &id));
    OP_REQUIRES_OK(context, context->GetAttr("channels", &channels_));
    OP_REQUIRES_OK(context, context->GetAttr("store", &store_));
    OP_REQUIRES_OK(context, context->GetAttr("max_pixels", &max_pixels_));
    // Else the source gives pixels, or other files.
    const bool can_decode = channels_ == 1 || channels_ == 3;
    for (int i = 0; can_decode && i < 4; ++i) {
      NodeDef node;
      OP_REQUIRES_OK(context, NodeDefBuilder("decode", "DecodeJpeg")
                                  .Input("contents", 0, tensorflow::DT_STRING)
                                  .Attr("channels", channels_)
                                  .Attr("ratio", 1 << i)
                                  .Finalize(&node));
      absl::Status status;
      decoders_[i] = tensorflow::CreateOpKernel(
          context->device_type(), context->device(),
          context->device()->GetAllocator(tensorflow::AllocatorAttributes()), node,
          TF_GRAPH_DEF_VERSION, &status);
      OP_REQUIRES_OK(context, status);
    }
    OP_REQUIRES_OK(context, slab_.open(path, id, true));
  }

  void Compute(OpKernelContext* context) override {
    const auto encoded = context->input(0).flat<tstring>();
    const auto samples = context->input(1).flat<int64_t>(),
               labels = context->input(2).flat<int64_t>();
    const auto state = context->input(3).flat<uint8_t>();
    const int64_t n = samples.size();
    OP_REQUIRES(
        context, encoded.size() == n && labels.size() == n && state.size() == n,
        InvalidArgument(
            "`encoded`, `samples`, `labels` and `state` must have one entry per sample. Received ",
            encoded.size(), ", ", n, ", ", labels.size(), " and ", state.size(), "."));
    for (int64_t i = 0; i < n; ++i) OP_REQUIRES_OK(context, check_index(samples(i), slab_.count()));
    Tensor* left = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, context->input(1).shape(), &left));
    auto out = left->flat<uint8_t>();
    shared_with_pool(context)(n, [&](int64_t i) {
      const Put done =
          state(i) == 0 ? Put::kWritten : bring(context, encoded(i), samples(i), labels(i));
      out(i) = done == Put::kWritten ? 0 : done == Put::kThere ? 3 : state(i);
    });
  }

 private:
  // Decodes a JPEG at 1/2, 1/4 or 1/8 if that is still as large as what is kept: less work.
  Put bring(OpKernelContext* context, const tstring& file, int64_t sample, int64_t label) {
    if (decoders_[0] == nullptr) return Put::kNot;
    FileHead head;
    if (!read_head(reinterpret_cast<const uint8_t*>(file.data()), file.size(), &head) ||
        head.bits > 8 || static_cast<int64_t>(head.height) * head.width > max_pixels_)
      return Put::kNot;
    const int32_t small = std::min(head.height, head.width);
    int scale = head.jpeg ? 3 : 0;
    while (scale > 0 && (store_ == 0 || small >> scale < store_)) --scale;

    Tensor contents(tensorflow::DT_STRING, {});
    // A view, because the file outlives the call, and a copy would cost another pass over it
    contents.scalar<tstring>()().assign_as_view(file);
    const tensorflow::TensorValue input(&contents);
    const tensorflow::AllocatorAttributes memory;
    OpKernelContext::Params params;
    params.op_kernel = decoders_[scale].get();
    params.device = context->device();
    params.resource_manager = context->resource_manager();
    params.output_attr_array = &memory;
    params.inputs = {&input, 1};
    OpKernelContext inner(&params);
    decoders_[scale]->Compute(&inner);
    // Whoever asks for the sample reads it again, and says what is wrong.
    if (!inner.status().ok()) return Put::kNot;
    const Tensor& pixels = *inner.mutable_output(0);
    const Image image = {pixels.flat<uint8_t>().data(), static_cast<int32_t>(pixels.dim_size(0)),
                         static_cast<int32_t>(pixels.dim_size(1)), channels_};
    return put({slab_.file(), slab_.slab(), &one_takes_, &one_writes_}, sample, label, image,
               store_);
  }

  Mapping slab_;
  std::mutex one_takes_, one_writes_;
  // At 1/1, 1/2, 1/4, 1/8; none if they do not make so many channels.
  std::unique_ptr<OpKernel> decoders_[4];
  int32_t channels_, store_;
  int64_t max_pixels_;
};

REGISTER_KERNEL_BUILDER(Name("TfcommxSlabFill").Device(tensorflow::DEVICE_CPU), SlabFill);

}  // namespace
}  // namespace tfcommx
