// Numbers that an op reads from an input on the host.
#pragma once

#include <cstdint>

#include "tensorflow/core/framework/op_kernel.h"

namespace tfcommx {

// Reads input number `input`, an int64. Tensor::scalar ends the process if the input has another
// number of entries than one, and eager mode runs no shape function that would refuse it.
inline absl::Status get_scalar(const tensorflow::OpKernelContext* context, int input,
                               const char* name, int64_t* number) {
  const tensorflow::Tensor& tensor = context->input(input);
  if (tensor.dims() != 0)
    return tensorflow::errors::InvalidArgument("`", name, "` must be a scalar. Received shape ",
                                               tensor.shape().DebugString(), " (",
                                               context->op_kernel().name(), ").");
  *number = tensor.scalar<int64_t>()();
  return absl::OkStatus();
}

}  // namespace tfcommx
