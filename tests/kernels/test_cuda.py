"""The CUDA kernels, as far as a machine without a GPU can tell.

They compile, and on an emulated GPU they keep the contract.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from contract import check_contract
from launching import ROOT
from tensorflow.python.framework import kernels as registered
from vectors import KINDS, make

from tfcommx.core import SPARSE_WIRES
from tfcommx.kernels import loader, select, sparse, wire

needs_nvcc = pytest.mark.skipif(
    not shutil.which("nvcc"), reason="nvcc is not on PATH: the CUDA sources are not compiled here"
)


def check_cuda(folder, *options):
    environment = {**os.environ, "CHECK_CUDA_FOLDER": str(folder)}
    return subprocess.run(
        [ROOT / "scripts" / "check_cuda", *options], capture_output=True, text=True, env=environment
    )


# In `make test` those of test_cuda_race.py do, compiled once for both checks
@pytest.mark.exhaustive
def test_kernels_keep_the_contract_on_an_emulated_gpu(tmp_path):
    done = check_cuda(
        tmp_path,
        "--on-cpu",
        "--cases",
        "360",
        "--largest",
        "60000",
        "--seed",
        "7",
        "--rounds",
        "1",
        "--n",
        "20000",
        "--peers",
        "2",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_contract(done.stdout, cases=360)


def test_gpu_day_says_what_it_does():
    script = ROOT / "scripts" / "gpu_day"
    told = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    assert told.startswith("Everything that only a GPU can show") and "gpu_training.py" in told
    wrong = subprocess.run([script, "--all"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "Received: --all" in wrong.stderr


# `make test` builds the library with nvcc already
@pytest.mark.exhaustive
@needs_nvcc
def test_kernels_compile_without_warnings(tmp_path):
    done = check_cuda(tmp_path, "--build")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
@needs_nvcc
def test_kernels_keep_the_contract_on_a_gpu_or_the_check_says_that_there_is_none(tmp_path):
    done = check_cuda(tmp_path, "--cases", "120", "--largest", "1000000", "--rounds", "0")
    if done.returncode == 2:
        assert "No GPU was found: nothing was checked." in done.stderr, done.stderr
    else:
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "TfcommxSelect",
        "TfcommxSelectResidual",
        "TfcommxSelectMomentum",
        "TfcommxMerge",
        "TfcommxKeep",
        "TfcommxWireEncode",
        "TfcommxWireDecode",
        "TfcommxWireRound",
        "TfcommxDenseWrite",
        "TfcommxDenseAdd",
        "TfcommxLowBitsWrite",
        "TfcommxLowBitsAdd",
        "TfcommxLowBitsRead",
        "TfcommxSquaredNorms",
        "TfcommxLarsUpdate",
    ],
)
def test_ops_have_gpu_kernels_if_the_library_was_built_with_nvcc(name):
    assert loader.library() is not None
    devices = {
        kernel.device_type for kernel in registered.get_registered_kernels_for_op(name).kernel
    }
    assert devices == ({"CPU", "GPU"} if loader.has_gpu_kernels() else {"CPU"})


def through_the_ops(device, kind, rule, wire_format):
    """Select, encode, decode and merge on a device, twice; return all as arrays.

    The second selection starts from the residual of the first.
    """
    n, k, found = 300_007, 3_000, []
    with tf.device(device):
        residual = tf.Variable(make("laplace", n, 2))
        for seed in (3, 4):
            old = residual.read_value()  # must not change with the variable
            chosen = select.select_with_residual(
                tf.constant(make(kind, n, seed)), residual, k, seed, rule
            )
            indices, values = wire.decode(
                tf.tile(wire.encode(chosen, wire_format), [2]), k, n, wire_format
            )
            found += [
                old,
                *chosen[:2],
                residual.read_value(),
                indices,
                values,
                sparse.merge(indices, values, n, k),
            ]
    return [one.numpy() for one in found]


@pytest.mark.skipif(
    not tf.config.list_physical_devices("GPU"),
    reason="TensorFlow finds no GPU: its kernels were not run",
)
@pytest.mark.parametrize("wire_format", SPARSE_WIRES)
@pytest.mark.parametrize("rule", ["exact", "mstopk"])
@pytest.mark.parametrize("kind", KINDS)
def test_ops_on_a_gpu_equal_those_on_the_cpu(kind, rule, wire_format):
    assert loader.has_gpu_kernels()
    for mine, right in zip(
        through_the_ops("/gpu:0", kind, rule, wire_format),
        through_the_ops("/cpu:0", kind, rule, wire_format),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, right)
