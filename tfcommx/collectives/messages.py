"""Messages of a Comm between two ranks, opened at their first use and kept until the end."""

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
    """Messages of one rank to and from single ranks.

    Args:
        make: makes a PointToPoint, on all ranks together; None if messages are impossible. Its
            `lasting`: all ranks take part until the end; `with_centre`: it reaches the process that
            holds centres.
        centre_rank: number of that process of elastic averaging; None if there is none.
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
        # PointToPoint of training steps; that of the centres; those whose bytes count as traffic
        self._of_steps: PointToPoint | None = None
        self._to_centres: PointToPoint | None = None
        self._counted: list[PointToPoint] = []
        self._centres = 0

    @property
    def possible(self) -> bool:
        """True if ranks can send messages in this launch, or one rank needs none."""
        return self._make is not None or self._topology.size == 1

    def open(self) -> PointToPoint | None:
        """Prepare for `run`; return None for a single rank, which sends no messages.

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
        """Return separate messages, for ranks that do not meet in steps.

        Args:
            counted: True if they are part of the training, and therefore of its traffic.

        **Ranks:** all, more than one, in the same order, outside of traced code, under MPI.
        """
        opened = self._new(lasting=False)
        if counted:
            self._counted.append(opened)
        return opened

    def open_to_centre(self) -> PointToPoint:
        """Return the messages of one more centre, to and from the process that holds centres.

        **Ranks:** all, in the same order, if `centre_rank` is not None.
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

        In traced code the calls run in the order in which they were traced: that of the plan.

        Args:
            work: takes the tensor as an array, and this rank's PointToPoint; returns an array of
                the same dtype and shape.
            tensor: a tensor whose shape is known while tracing.

        **Ranks:** as the messages need, after `open`. **Cost:** on GPUs a copy to the host and
        back.
        """

        def call(array: np.ndarray) -> np.ndarray:
            # A single rank has no messages, and its work sends none
            return work(array, cast(PointToPoint, self._of_steps))

        if tf.executing_eagerly():
            return tf.constant(call(tensor.numpy()))
        with tf.device("/cpu:0"):
            # Each call changes a variable, because TensorFlow keeps the order of such ops, also
            # from one `tf.cond` to the next. Otherwise all threads of one rank could wait in one
            # bucket while another's wait in the next, or receive the messages of another optimizer
            with tf.control_dependencies([self._calls.assign_add(1)]):
                result = tf.numpy_function(
                    call, [tensor], tensor.dtype, name=name.replace("/", "_")
                )
            # Again after the result, so that the next call's change waits for the end of this one
            with tf.control_dependencies([result]):
                self._calls.assign_add(1)
        return tf.ensure_shape(result, tensor.shape)

    @functools.cached_property
    def _calls(self) -> tf.Variable:
        with untraced(), tf.device("/cpu:0"):
            return tf.Variable(0, dtype=tf.int64, trainable=False, name="tfcommx/calls")

    def traffic(self) -> Traffic:
        """Return the bytes that this rank has sent, inside its node and to other nodes.

        A process that holds a centre counts as part of the last rank's node.
        """
        inside = between = 0
        own_node, last = self._topology.node_of(self._rank), self._topology.size - 1
        # Copied, because another thread of this rank may send to a new rank in the meantime
        pairs = [pair for messages in self._counted for pair in list(messages.sent.items())]
        for rank, amount in pairs:
            if rank == self._rank:  # It may be worker and server
                continue
            if self._topology.node_of(min(rank, last)) == own_node:
                inside += amount
            else:
                between += amount
        return Traffic(inside, between)
