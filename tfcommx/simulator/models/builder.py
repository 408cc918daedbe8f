"""Builder: lists the layers of a model in the terms of its architecture."""

from __future__ import annotations

from tfcommx.core import ConfigurationError, Layer, LayerTable

# (name, shape) of the variables of a layer
Variables = tuple[tuple[str, tuple[int, ...]], ...]


class Builder:
    """Follows the shape of one image through a model, and lists the layers.

    >>> model = Builder(8, 3)
    >>> model.convolve("conv", 16, 3, stride=2, bias=True)
    >>> model.height, model.width, model.channels
    (4, 4, 16)
    >>> model.dense("top", 10)
    >>> [(layer.name, layer.operations) for layer in model.layers]
    [('conv', 6912), ('top', 2560)]

    Operations are multiply-adds. Those of normalization are two for each entry; pooling,
    activations and additions are not counted.
    """

    def __init__(self, size: int, channels: int, layers: list[Layer] | None = None) -> None:
        """Begin with an input of size x size x channels; branches share their model's `layers`."""
        self.height = self.width = size
        self.channels = channels
        self.layers: list[Layer] = [] if layers is None else layers

    def convolve(
        self,
        name: str,
        filters: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        valid: bool = False,
        groups: int = 1,
        bias: bool = False,
        norm: bool = False,
    ) -> None:
        """Add a convolution, padded unless `valid`, and a normalization after it if `norm`."""
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        self._shrink(high, wide, stride, valid)
        shape = (high, wide, self.channels // groups, filters)
        variables: Variables = (("kernel", shape),)
        if bias:
            variables += (("bias", (filters,)),)
        each = high * wide * (self.channels // groups) * filters
        self.layers.append(Layer(name, each * self.height * self.width, variables))
        self.channels = filters
        if norm:
            entries = self.height * self.width * filters
            self.layers.append(normalization(f"{name}/norm", filters, entries))

    def pool(self, size: int, stride: int, *, valid: bool = False) -> None:
        """Take the largest or the mean of each window."""
        self._shrink(size, size, stride, valid)

    def pool_all(self) -> None:
        """Take the mean over the whole image."""
        self.height = self.width = 1

    def dense(self, name: str, units: int) -> None:
        """Add a dense layer with a bias on all entries."""
        inputs = self.height * self.width * self.channels
        self.layers.append(dense(name, inputs, units))
        self.height = self.width = 1
        self.channels = units

    def branch(self) -> Builder:
        """Return a builder that continues from here and adds to the same list of layers."""
        copy = Builder(1, self.channels, self.layers)
        copy.height, copy.width = self.height, self.width
        return copy

    def module(self, name: str, text: str, *, bias: bool = False, norm: bool = False) -> None:
        """Add branches that start from the same image, and concatenate their channels.

        >>> model = Builder(8, 3)
        >>> model.module("m", "pool 4@1 | 8@1 6@1x7 | 5@3 *2")
        >>> [layer.name for layer in model.layers], model.channels
        (['m/1b', 'm/2a', 'm/2b', 'm/3a', 'm/3_flat', 'm/3_tall'], 14)

        Args:
            name: the first part of the layers' names.
            text: branches, divided by `|`. A step is a convolution, filters@kernel, with "V"
                without padding, or with "/2" with stride 2 and without padding; "pool", of stride
                1; "pool/2"; or "*filters", which splits the branch into convolutions by 1 x 3 and
                3 x 1.
            bias, norm: of all convolutions.
        """
        ends, splits = [], []
        for number, steps in enumerate(text.split("|"), start=1):
            branch = self.branch()
            for position, step in enumerate(steps.split()):
                stride = 2 if step.endswith("/2") else 1
                valid = step.endswith(("/2", "V"))
                first, _, kernel = step.removesuffix("/2").rstrip("V").partition("@")
                if first == "pool":
                    branch.pool(3, stride, valid=valid)
                elif first.startswith("*"):
                    splits.append((number, branch, int(first[1:])))
                else:
                    high, _, wide = kernel.partition("x")
                    branch.convolve(
                        f"{name}/{number}{'abcde'[position]}",
                        int(first),
                        (int(high), int(wide or high)),
                        stride=stride,
                        valid=valid,
                        bias=bias,
                        norm=norm,
                    )
            ends.append(branch)
        for number, branch, filters in splits:
            # A split branch ends in two parts, whose channels are counted instead
            ends.remove(branch)
            for kind, kernel_size in (("flat", (1, 3)), ("tall", (3, 1))):
                ends.append(branch.branch())
                ends[-1].convolve(f"{name}/{number}_{kind}", filters, kernel_size, norm=norm)
        self.height, self.width = ends[0].height, ends[0].width
        self.channels = sum(end.channels for end in ends)

    def table(self, name: str, sample: str) -> LayerTable:
        """Return the layers as a table."""
        return LayerTable(name, tuple(self.layers), sample)

    def _shrink(self, high: int, wide: int, stride: int, valid: bool) -> None:
        if valid:
            self.height -= high - 1
            self.width -= wide - 1
        if self.height < 1 or self.width < 1:
            raise ConfigurationError(
                f"This model needs larger images: a window of {high} x {wide} does not fit into "
                "the remaining pixels. Leave `size` out for the usual ones."
            )
        # Rounded up, also where the window has been subtracted: that is the number of whole windows
        self.height = -(-self.height // stride)
        self.width = -(-self.width // stride)


def dense(name: str, inputs: int, units: int, *, times: int = 1, bias: bool = True) -> Layer:
    """Make a dense layer that is applied to `times` vectors of a sample."""
    variables: Variables = (("kernel", (inputs, units)),)
    if bias:
        variables += (("bias", (units,)),)
    return Layer(name, inputs * units * times, variables)


def normalization(name: str, channels: int, entries: int) -> Layer:
    """Make a normalization with a scale and an offset, over `entries` entries of a sample."""
    return Layer(name, 2 * entries, (("scale", (channels,)), ("offset", (channels,))))
