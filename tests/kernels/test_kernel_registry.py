"""Which of our ops a GPU can run, and which of their arguments are in the host's memory then."""

from __future__ import annotations

import re

import pytest
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.kernels import get_registered_kernels_for_op

from tfcommx.kernels import loader

# Exchanges and updates -> arguments that a GPU's kernel reads on the host: numbers that are made
# there, and handles of variables, whose contents are on the GPU. Anything else would be copied.
ON_GPUS = {
    "TfcommxDenseAdd": set(),
    "TfcommxDenseWrite": {"residual"},
    "TfcommxKeep": {"residual"},
    "TfcommxLarsUpdate": {"weights", "momenta"},
    "TfcommxLowBitsAdd": {"residual"},
    "TfcommxLowBitsRead": set(),
    "TfcommxLowBitsWrite": {"residual"},
    "TfcommxMerge": {"size"},
    "TfcommxSelect": {"k", "seed"},
    "TfcommxSelectMomentum": {"k", "seed", "residual", "velocity"},
    "TfcommxSelectResidual": {"k", "seed", "residual"},
    "TfcommxSquaredNorms": set(),
    # An entry on the host has been made, and not only asked for
    "TfcommxStamp": {"entry", "seconds"},
    "TfcommxWireDecode": set(),
    "TfcommxWireEncode": set(),
    "TfcommxWireRound": set(),
}
# Of the data cache, whose memory is the host's
ON_HOST = {"TfcommxSlabCheck", "TfcommxSlabFill", "TfcommxSlabRead"}


def ours() -> set[str]:
    """Return the names of the library's ops."""
    library = loader.library()
    if library is None:
        pytest.skip("needs the native library")
    names = [name for name in dir(library) if re.fullmatch("tfcommx_[a-z_]+", name)]
    camel = {"".join(part.title() for part in name.split("_")) for name in names}
    return {name for name in camel if op_def_registry.get(name) is not None}


def test_every_op_of_an_exchange_is_listed() -> None:
    assert ours() == ON_GPUS.keys() | ON_HOST


@pytest.mark.parametrize("name", sorted(ON_GPUS))
def test_an_op_of_an_exchange_has_a_gpu_kernel_for_each_type_of_the_cpu(name: str) -> None:
    """An op without one runs on the host, and all it reads and writes is copied, in each step."""
    ours()
    if not loader.has_gpu_kernels():
        pytest.skip("needs a library that was built with nvcc")
    kernels = get_registered_kernels_for_op(name).kernel
    types = {
        device: sorted(str(one.constraint) for one in kernels if one.device_type == device)
        for device in ("CPU", "GPU")
    }
    assert types["GPU"] == types["CPU"] != []
    for kernel in kernels:
        expected = ON_GPUS[name] if kernel.device_type == "GPU" else set()
        assert set(kernel.host_memory_arg) == expected


@pytest.mark.parametrize("name", sorted(ON_GPUS))
def test_an_argument_on_the_host_is_a_number_or_a_variables_handle(name: str) -> None:
    ours()
    definition = op_def_registry.get(name)
    kinds = {
        argument.name: argument.type_attr or argument.type
        for argument in [*definition.input_arg, *definition.output_arg]
    }
    resource, int64 = 20, 9  # DataType in TensorFlow's types.proto
    assert ON_GPUS[name] <= kinds.keys()
    if name != "TfcommxStamp":
        assert {kinds[argument] for argument in ON_GPUS[name]} <= {resource, int64}


@pytest.mark.parametrize("name", sorted(ON_HOST))
def test_the_data_caches_ops_are_the_hosts(name: str) -> None:
    ours()
    devices = {kernel.device_type for kernel in get_registered_kernels_for_op(name).kernel}
    assert devices == {"CPU"}


def test_the_sources_register_what_is_listed() -> None:
    """Also where the library was built without nvcc."""
    if not loader.in_source_tree():
        pytest.skip("needs the source tree")
    text = " ".join(path.read_text() for path in sorted((loader.SOURCES / "tf").glob("*.cc")))
    found: dict[str, set[str]] = {}
    for registered in re.findall(r"REGISTER_KERNEL_BUILDER\((.*?)\);", text, re.DOTALL):
        if "DEVICE_GPU" in registered and (name := re.search(r'Name\("(\w+)"\)', registered)):
            found[name[1]] = set(re.findall(r'HostMemory\("(\w+)"\)', registered))
    for name, of_macro in (
        ("TfcommxSelect", ""),
        ("TfcommxSelectResidual", "residual"),
        ("TfcommxSelectMomentum", "residual velocity"),
    ):
        assert f'HOST(T, "{name}")' in text
        found[name] = {"k", "seed", *of_macro.split()}
    assert found == ON_GPUS
