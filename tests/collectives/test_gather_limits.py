"""All-gathers that Horovod would count wrongly are refused, by bytes as well as by entries."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfcommx.collectives.horovod import HEAD, ROOM, HorovodComm
from tfcommx.collectives.plain_data import encode
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import PlanError, TfcommxError, Topology
from tfcommx.watch.membership import Membership


@pytest.mark.parametrize(
    ("entries", "dtype", "refused"),
    [
        (2**29 - 1, "float32", False),
        (2**29, "float32", True),
        (2**29, "int32", True),
        (2**28, "float64", True),
        (2**30 - 1, "float16", False),
        (2**30 - 1, "uint8", False),
    ],
)
def test_an_all_gather_has_less_than_two_gib_of_each_rank(
    entries: int, dtype: str, refused: bool
) -> None:
    """Horovod's NCCL all-gather multiplies entries by their size in int32, which overflowed."""

    def work(comm: ThreadComm) -> tuple[str, list[str]]:
        gathered: list[str] = []
        comm._all_gather = lambda tensor, group, name: gathered.append(name) or tensor
        gather = tf.function(
            lambda words: comm.all_gather(words, "world", "bucket0/pairs", counted=False),
            autograph=False,
        )
        try:
            gather.get_concrete_function(tf.TensorSpec([entries], dtype))
        except TfcommxError as error:
            return str(error), gathered
        return "", gathered

    for rank, (error, gathered) in enumerate(ThreadComm.run(Topology(2, 1), work)):
        assert gathered == ([] if refused else ["bucket0/pairs"])
        size = entries * tf.as_dtype(dtype).size
        if refused:
            received = (
                rf"\b2147483647\b.*'bucket0/pairs'.*\b{size}\b.*rank {rank}, {dtype} \({entries},\)"
            )
            assert re.search(received, error), error
        else:
            assert not error


@pytest.mark.parametrize(("together", "refused"), [(2**31 - 1, False), (2**31, True)])
def test_objects_that_are_gathered_have_less_than_two_gib_together(
    together: int, refused: bool
) -> None:
    """Their bytes are entries, which Horovod counts in int32."""
    item, calls = "some text", []
    mine = len(encode(item))

    def allgather(tensor: tf.Tensor, name: str) -> tf.Tensor:
        calls.append(tensor)
        if name.endswith("heads"):
            other = (together - mine).to_bytes(8, "little").ljust(HEAD, b"?")
            return tf.concat([tensor, np.frombuffer(other, np.uint8)], 0)
        raise InterruptedError  # They are not here

    comm = of_two_ranks(allgather)
    with pytest.raises(PlanError if refused else InterruptedError) as error:
        comm._gather_objects(item)
    assert len(calls) == 1 + (not refused)
    if refused:
        received = rf"\b2147483647\b.*\b{together}\b.*\b{mine}\b.*rank 0\b"
        assert re.search(received, str(error.value))


@pytest.mark.parametrize(("longer", "collectives"), [(0, 1), (1, 2), (HEAD, 2)])
def test_small_objects_are_gathered_in_one_collective(longer: int, collectives: int) -> None:
    """An object of 0, 1 and 1024 bytes more than a head holds."""
    item, lengths = "", []
    item = "x" * (ROOM + longer - len(encode(item)))

    def allgather(tensor: tf.Tensor, name: str) -> tf.Tensor:
        lengths.append(len(tensor))
        return tf.concat([tensor, tensor], 0)

    assert of_two_ranks(allgather)._gather_objects(item) == [item, item]
    assert lengths == [HEAD, ROOM + longer][:collectives]


def of_two_ranks(allgather: Callable[..., tf.Tensor]) -> Any:
    """Return a HorovodComm with another allgather."""
    comm: Any = object.__new__(HorovodComm)
    comm.rank, comm.membership, comm._hvd = 0, Membership(), SimpleNamespace(allgather=allgather)
    return comm


def test_a_broadcast_has_as_many_entries_as_an_engine_can_count() -> None:
    """Of all collectives, broadcasts alone were not checked: of a table of 2^31 entries."""

    def work(comm: ThreadComm) -> None:
        comm._broadcast = lambda tensor, root, name: tensor
        broadcast = tf.function(lambda table: comm.broadcast(table, 0, "state0"), autograph=False)
        broadcast.get_concrete_function(tf.TensorSpec([2**31 - 1], "float16"))
        with pytest.raises(PlanError, match=str(2**31)):
            broadcast.get_concrete_function(tf.TensorSpec([2**31], "float16"))

    ThreadComm.run(Topology(2, 1), work)
