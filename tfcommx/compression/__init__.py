"""Transform gradients before and after a dense sum: the table of compressions.

    powersgd/R   each matrix as a product of two of rank R, warm-started

A selection chooses entries, and a wire format writes them in fewer bits. A compression turns a
bucket's gradients into other, shorter vectors, which any dense route sums, and turns the sums back.
`runtime.bucket_runner` puts error feedback around any compression: the part of a gradient that a
rank did not send stays in its residual. A compression may keep state, equal on all ranks, which is
saved and follows its variables as residuals do.

Laws: the sum of all sent parts and residuals equals the sum of the gradients, to float32 rounding;
all ranks get the same bits; NaN and Inf reach all ranks, and enter neither a residual nor a state.

To add one:
    1. A file here with a frozen class derived from `compression.Compression`, and `read`, which
       makes one from the part of a name after the slash, "" if there is none.
    2. A row of COMPRESSIONS below.
    `cx.testing.check_compression` checks the laws; call it from a test. The planner and the
    simulator price the entries that `sums` counts.
    From outside of this package: `Scheme(compression="module:MEMBER")`.

Importing this package loads no TensorFlow, because plans and prices need only sizes.
"""

from tfcommx.compression.compression import Compression, CompressionResult
from tfcommx.core import check_name, is_member, load_member

# Name -> module:member of the function that makes it from the part of its name after the slash
COMPRESSIONS = {
    "powersgd": "tfcommx.compression.powersgd:read",
}

__all__ = ["COMPRESSIONS", "Compression", "CompressionResult", "get"]


def get(name: str) -> Compression:
    """Return the compression of a name such as "powersgd/4", or "module:MEMBER".

    >>> get("powersgd/2").sums([(100, 50), (50,)])
    (250, 100)

    **Raises:** PlanError for an unknown name, with the nearest one, and for an invalid argument.
    """
    if is_member(name):
        outside: Compression = load_member("compression", name, Compression)
        return outside
    kind, _, argument = name.partition("/")
    read = load_member("compression", COMPRESSIONS[check_name("compression", kind, COMPRESSIONS)])
    result: Compression = read(argument)
    return result
