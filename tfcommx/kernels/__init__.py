"""One file per kernel: the native op, with its definition in plain TensorFlow.

    select    k entries of a gradient by magnitude, with and without error feedback
    sparse    (index, value) pairs added into zeros; their rounding errors
    wire      selected entries to one buffer of words, and back
    wire_codes  values as codes of 8 or 4 bits
    dense     a vector in 16 bits and its rounding errors; sums of several
    lars      squared norms of many tensors, and the update of LARS, in one pass each
    augment   cut, resize, mirror and normalise images
    crc32c    the checksum of TFRecord files
    loader    finds and loads the native library; no other file does
    draws     random numbers as pure functions of integers
    traced    in traced code: small numbers on the host, times at which tensors are ready
    device    the device of the residuals, and a comparison of its kernels with the CPU's
    build     the GPUs that the library and Horovod's kernels are built for, and the sources

Each public function calls the native op if the library exists, otherwise its definition, which is a
function in the same file whose name ends in `_definition`. Both give the same bits (law 6;
`augment` is equal to within 1/255).

To add one: native code without a framework in ops/kernels/NAME.h and NAME_cpu.cc, its op in
ops/tf/NAME.cc, and NAME.py here with the public function and its definition; then a test in
tests/kernels that compares the two.
"""
