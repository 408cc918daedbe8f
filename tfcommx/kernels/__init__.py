"""One file a kernel: the native op beside its definition in plain TensorFlow.

    select    k entries of a gradient by magnitude, with and without error feedback
    merge     (index, value) pairs added into zeros
    wire      selected entries as one buffer of words, and back
    dense     a vector in 16 bits, with what rounding loses kept; and sums of several
    norms     squared norms of many tensors in one pass
    lars      the update of LARS for all variables in one pass
    augment   cut, resize, mirror and normalise images
    crc32c    the checksum of TFRecord files
    stamp     the time at which a tensor is ready
    loader    finds and loads the native library: the only file that does
    draws     random numbers as pure functions of integers
    host      small numbers that kernels read on the host
    device    the device of the residuals, and a check of its kernels against the CPU's
    gpu_architectures  which GPUs the library and Horovod's kernels are built for
    build_digest  which sources the library was built from

Each public function calls the native op if there is a library, else its definition, a function of
the same file whose name ends in `_definition`. Both give the same bits (law 6; `augment` is equal
to within 1/255).

To add one: native code without framework in ops/kernels/NAME.h and NAME_cpu.cc, its op in
ops/tf/NAME.cc, and NAME.py here with the public function and its definition; then a test in
tests/kernels that compares the two.
"""
