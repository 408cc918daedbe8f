// What the op files share: TensorFlow's GPU stream, and the checks of common inputs.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>

#include "kernels/select.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf/scalar.h"
#include "tf/share.h"
#include "xla/stream_executor/stream.h"

namespace tfcommx {

inline CUstream_st* stream_of(tensorflow::OpKernelContext* context) {
  return static_cast<CUstream_st*>(
      context->op_device_context()->stream()->platform_specific_handle().stream);
}

// error: what a kernel's _cuda function returned.
inline absl::Status launched(const tensorflow::OpKernelContext* context, const char* error) {
  if (!error) return absl::OkStatus();
  return tensorflow::errors::Internal("CUDA must launch the kernels of ",
                                      context->op_kernel().name(), ". It says: ", error,
                                      ". Was the library built for this GPU and driver?");
}

// Runs a selection on the device that holds its arrays.
template <bool kGpu>
absl::Status select_on_device(tensorflow::OpKernelContext* context, const Selection& selection) {
  if constexpr (kGpu) {
    tensorflow::Tensor workspace;
    TF_RETURN_IF_ERROR(context->allocate_temp(
        tensorflow::DT_UINT8, {select_cuda_workspace(selection.n, selection.k)}, &workspace));
    return launched(context, select_cuda(selection, workspace.data(), stream_of(context)));
  } else {
    select_cpu(selection, shared_with_pool(context));
    return absl::OkStatus();
  }
}

// A tensor that others still read (a value read from the variable before) must not change under
// them.
template <bool kGpu>
absl::Status make_own(tensorflow::OpKernelContext* context, tensorflow::Tensor* tensor) {
  if (tensor->RefCountIsOne()) return absl::OkStatus();
  tensorflow::Tensor own;
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, tensor->shape(), &own));
  if constexpr (kGpu) {
    TF_RETURN_IF_ERROR(launched(
        context, copy_cuda(own.data(), tensor->data(), tensor->TotalBytes(), stream_of(context))));
  } else {
    std::memcpy(own.data(), tensor->data(), tensor->TotalBytes());
  }
  *tensor = own;
  return absl::OkStatus();
}

template <class T>
Float float_of();
template <>
inline Float float_of<float>() {
  return Float::float32;
}
template <>
inline Float float_of<Eigen::half>() {
  return Float::float16;
}
template <>
inline Float float_of<tensorflow::bfloat16>() {
  return Float::bfloat16;
}

inline absl::Status check_vector(const tensorflow::OpKernelContext* context, const char* name,
                                 const tensorflow::Tensor& tensor) {
  if (tensor.dims() == 1 && tensor.NumElements() <= std::numeric_limits<int32_t>::max())
    return absl::OkStatus();
  return tensorflow::errors::InvalidArgument(
      "`", name, "` must be a vector of fewer than 2^31 entries. Received shape ",
      tensor.shape().DebugString(), " (", context->op_kernel().name(),
      "). Flatten it, and cut what is longer into buckets.");
}

inline absl::Status check_k(const tensorflow::OpKernelContext* context, int64_t k, int64_t n) {
  if ((k >= 1 && k <= n) || (n == 0 && k == 0)) return absl::OkStatus();
  return tensorflow::errors::InvalidArgument("`k` must be in [1, n]. Received k=", k, ", n=", n,
                                             " (", context->op_kernel().name(),
                                             "). Change `density`, or keep this variable dense.");
}

}  // namespace tfcommx
