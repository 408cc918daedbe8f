"""The native kernels, each beside its definition in plain TensorFlow."""
