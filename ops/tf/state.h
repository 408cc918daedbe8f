// Float32 variables that a kernel updates in place.
#pragma once

#include "tensorflow/core/framework/resource_var.h"
#include "tf/common.h"

namespace tfcommx {

// The entries of a variable, which the caller has locked.
template <bool kGpu>
absl::Status open_state(tensorflow::OpKernelContext* context, const char* name,
                        tensorflow::Var* variable, int64_t n, float** data) {
  tensorflow::Tensor* state = variable->tensor();
  if (!variable->is_initialized)
    return tensorflow::errors::FailedPrecondition(
        "`", name, "` must be initialised, to zeros at first. Received the uninitialised ",
        variable->DebugString(), " (", context->op_kernel().name(), ").");
  if (state->dtype() != tensorflow::DT_FLOAT || state->NumElements() != n)
    return tensorflow::errors::InvalidArgument(
        "`", name, "` must be a float32 variable of as many entries as `gradient`, ", n,
        ". Received ", variable->DebugString(), " (", context->op_kernel().name(),
        "). Make it anew for this bucket.");
  TF_RETURN_IF_ERROR(make_own<kGpu>(context, state));
  *data = static_cast<float*>(state->data());
  return absl::OkStatus();
}

}  // namespace tfcommx
