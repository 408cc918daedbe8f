"""Messages between two ranks, as a Comm has them: opened when first needed, there until the end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import numpy as np
import tensorflow as tf

from tfcommx.collectives.point_to_point import Channel, PointToPoint
from tfcommx.core import MPI_LAUNCH, ConfigurationError, Topology, Traffic
from tfcommx.kernels.traced import untraced

NEED_MPI = (
    "Routes made of messages between two ranks (pipeline, tree, bidirectional) need an MPI launch: "
    f"{MPI_LAUNCH}. Received a Gloo launch. Launch with MPI, or use allreduce or torus."
)


class Messages:
    """What one rank sends to single ranks.

    Args:
        rank: this process's.
        topology: all ranks and their nodes.
        make: makes a PointToPoint, on all ranks together; None if there can be none. `lasting`:
            all ranks take part to the end; `with_centre`: so does the process that holds centres.
        centre_rank: the number of that process of elastic averaging; None: there is none.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        make: Callable[..., PointToPoint] | None = None,
        centre_rank: int | None = None,
    ) -> None:
        self.centre_rank = centre_rank
        self._rank, self._topology, self._make = rank, topology, make
        # For the steps of training; to the centres; all whose bytes count as traffic
        self._of_steps: PointToPoint | None = None
        self._to_centres: PointToPoint | None = None
        self._counted: list[PointToPoint] = []
        self._centres = 0

    @property
    def possible(self) -> bool:
        """Whether ranks can send messages here; a single rank needs none."""
        return self._make is not None or self._topology.size == 1

    def open(self) -> PointToPoint | None:
        """Get ready for `run`; return None for a single rank, which sends none.

        **Ranks:** all, outside of traced code. **Raises:** ConfigurationError without an MPI
        launch.
        """
        if self._of_steps is None and self._topology.size > 1:
            self._of_steps = self._new()
            self._counted.append(self._of_steps)
        return self._of_steps

    def _new(self, **options: bool) -> PointToPoint:
        if self._make is None:
            raise ConfigurationError(NEED_MPI)
        return self._make(**options)

    def open_own(self, counted: bool = True) -> PointToPoint:
        """Return messages that nobody else sends or takes, for ranks that do not meet in steps.

        Args:
            counted: whether they are part of the training, and so of its traffic.

        **Ranks:** all, more than one, in the same order, outside of traced code, under MPI.
        """
        opened = self._new(lasting=False)
        if counted:
            self._counted.append(opened)
        return opened

    def open_to_centre(self) -> PointToPoint:
        """Return messages of one more centre, to and from the process that holds them.

        **Ranks:** all, in the same order, where `centre_rank` is one.
        """
        if self._to_centres is None:
            self._to_centres = self._new(lasting=False, with_centre=True)
            self._counted.append(self._to_centres)
        self._centres += 1
        return Channel(self._to_centres, self._centres)

    def run(
        self, work: Callable[[np.ndarray, PointToPoint], np.ndarray], tensor: tf.Tensor, name: str
    ) -> tf.Tensor:
        """Run `work(array, messages)` on the host, eagerly or as part of a graph.

        In traced code the calls follow each other in the order in which they were traced, which is
        the plan's and so the same on every rank, also from one `tf.cond` to the next: TensorFlow
        orders what changes a variable, and each call changes one. Without that order, one rank's
        threads could all wait in one bucket while another's wait in the next one, or take the
        messages of another optimizer for their own.

        Args:
            work: takes the tensor as an array, and this rank's PointToPoint; returns an array of
                the same dtype and shape.
            tensor: its shape must be known while tracing.
            name: of the operation in the graph.

        **Ranks:** as the messages need, after `open`. **Cost:** on GPUs a copy to the host and
        back.
        """

        def call(array: np.ndarray) -> np.ndarray:
            # A single rank has none, and its work sends nothing
            return work(array, cast(PointToPoint, self._of_steps))

        if tf.executing_eagerly():
            return tf.constant(call(tensor.numpy()))
        with tf.device("/cpu:0"):
            with tf.control_dependencies([self._calls.assign_add(1)]):
                result = tf.numpy_function(
                    call, [tensor], tensor.dtype, name=name.replace("/", "_")
                )
            with tf.control_dependencies([result]):
                self._calls.assign_add(1)
        return tf.ensure_shape(result, tensor.shape)

    @functools.cached_property
    def _calls(self) -> tf.Variable:
        with untraced(), tf.device("/cpu:0"):
            return tf.Variable(0, dtype=tf.int64, trainable=False, name="tfcommx/calls")

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent, inside its node and to other nodes.

        A process that holds a centre counts as one of the last rank's node.
        """
        inside = between = 0
        mine, last = self._topology.node_of(self._rank), self._topology.size - 1
        for rank, amount in [pair for one in self._counted for pair in list(one.sent.items())]:
            if rank == self._rank:  # It may be worker and server
                continue
            if self._topology.node_of(min(rank, last)) == mine:
                inside += amount
            else:
                between += amount
        return Traffic(inside, between)
