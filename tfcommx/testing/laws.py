"""Steps of a plan on ranks that are threads, and the laws that hold for them."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import Plan, Scheme, Topology
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.runtime.gradient_state import GradientState

ONE_LEVEL = (Topology(1, 1), Topology(2, 1), Topology(3, 1))
TWO_LEVELS = (Topology(2, 2),)

# No length is divisible by 2 or 4, so that shards end with padding
SHAPES = {"first/kernel": (37, 11), "first/bias": (11,), "last/kernel": (11, 53)}

Values = dict[str, np.ndarray]
# (rank, step) -> a gradient of each variable
Source = Callable[[int, int], Values]


class LawBroken(AssertionError):
    """A member of a family breaks a law of its family."""


def require(holds: bool, law: str, where: str, received: str) -> None:
    """Raise LawBroken unless a law holds."""
    if not holds:
        raise LawBroken(f"{law} {received} With {where}.")


def check_traces(work: Callable[..., object], where: str, *shapes: tuple[int, ...]) -> None:
    """Require that a function of float32 tensors is graph code.

    Steps are traced without AutoGraph, so Python's `if` and `for` on tensors are no graph code.
    """
    try:
        tf.function(work, autograph=False).get_concrete_function(*map(tf.TensorSpec, shapes))
    except Exception as error:  # Any class, because the member is a user's code
        raise LawBroken(
            f"A step must be traceable by tf.function, with static shapes. {error} With {where}."
        ) from error


class Step(NamedTuple):
    """Record of one step on one rank."""

    # Gradients of this rank
    came: Values
    result: Values
    # Residuals after the step, flat
    kept: Values
    state: GradientState
    # Bytes sent so far, inside and between
    sent: np.ndarray


def whole_numbers(rank: int, step: int) -> Values:
    """Return integers over 64, because their sums are exact in float32 in any order."""
    numbers = np.random.default_rng([rank, step])
    return {
        path: (numbers.integers(-999, 1000, shape) / 64).astype(np.float32)
        for path, shape in SHAPES.items()
    }


def normal_numbers(rank: int, step: int) -> Values:
    """Return numbers whose sums depend on the order."""
    numbers = np.random.default_rng([7, rank, step])
    return {path: numbers.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}


def plan_of(scheme: Scheme, topology: Topology) -> Plan:
    """Return the plan of SHAPES, which sums over the ranks."""
    gradients = [Gradient(path, shape, "float32") for path, shape in SHAPES.items()]
    return make_plan(gradients, {"*": scheme}, topology, "sum")


def play(plan: Plan, source: Source, steps: int = 3) -> list[list[Step]]:
    """Take steps on every rank; return the records of each."""

    def work(comm: Comm) -> list[Step]:
        running = PlanExecutor(plan, comm)
        return [take(running, source(comm.rank, step)) for step in range(steps)]

    return ThreadComm.run(plan.topology, work)


def take(running: PlanExecutor, gradients: Values) -> Step:
    result = running.exchange({path: tf.constant(value) for path, value in gradients.items()})
    state = running.export()
    # A variable that is sent whole has no residual
    zeros = {path: np.zeros(math.prod(shape), np.float32) for path, shape in SHAPES.items()}
    return Step(
        gradients,
        {path: value.numpy() for path, value in result.items()},
        zeros | state.residuals,
        state,
        np.array(running.comm.traffic()),
    )


def check_on_sparse_routes(name: str, **named: Any) -> None:
    """Check the laws for a scheme, on every sparse route, on one node and on several.

    Args:
        name: of the member, for messages.
        named: fields of the scheme: its selection, and others that differ from the default.
    """
    for route in routes.SPARSE.values():
        # Two buckets, because the last kernel alone has more than 2000 bytes. With the default of
        # dense_below, 1024, both kernels would be sent whole
        scheme = Scheme(route.name, density=0.1, dense_below=8, bucket_bytes=2000, **named)
        for topology in (*ONE_LEVEL, *TWO_LEVELS):
            plan = plan_of(scheme, topology)
            where = f"{name} on {route.name!r}, {topology.nodes} x {topology.slots} ranks"
            # Sums of whole numbers are exact, so that nothing may be lost; agreement is harder for
            # numbers whose sums depend on the order
            logs = play(plan, whole_numbers)
            check_conservation(logs, where)
            check_agreement(play(plan, normal_numbers), where)
            check_count(plan, logs, where)
        # Only with the last topology, of two levels, because each of these takes seconds
        check_non_finite(plan, where)
        check_continues(plan, where)


def check_conservation(logs: list[list[Step]], where: str, tolerance: float = 0.0) -> None:
    """Require that sent + kept = gradient + previous residual, entry by entry.

    Args:
        logs: of all ranks, of steps without NaN and Inf.
        where: for the message.
        tolerance: relative to the largest gradient entry, >= 0.
    """
    before: dict[str, np.ndarray | int] = {
        path: np.zeros(math.prod(shape), np.float32) for path, shape in SHAPES.items()
    }
    for step in range(len(logs[0])):
        for path in SHAPES:
            expected = sum(log[step].came[path].ravel() for log in logs) + before[path]
            residuals = sum(log[step].kept[path] for log in logs)
            # Rank 0's result stands for all, which `check_agreement` compares
            off = np.abs(logs[0][step].result[path].ravel() + residuals - expected)
            # Not `off > allowed`, because NaN is off, too
            wrong = ~(off <= tolerance * np.abs(expected).max())
            require(
                not wrong.any(),
                "The sum of sent values and residuals must equal the sum of the inputs.",
                where,
                f"{np.count_nonzero(wrong)} entries of {path!r} are off in step {step + 1}, by up "
                f"to {np.nanmax(off):g}.",
            )
            before[path] = residuals


def check_agreement(logs: list[list[Step]], where: str) -> None:
    """Require the same bits on all ranks."""
    for rank, log in enumerate(logs):
        for number, (step, first) in enumerate(zip(log, logs[0], strict=True), 1):
            for path in SHAPES:
                # By bytes, because NaN would not equal itself, and 0 would equal -0
                require(
                    step.result[path].tobytes() == first.result[path].tobytes(),
                    "All ranks must get the same bits.",
                    where,
                    f"Rank {rank} has others than rank 0 for {path!r} in step {number}.",
                )


def check_count(plan: Plan, logs: list[list[Step]], where: str) -> None:
    """Require that the bytes sent are those that the prices count."""
    # `wire_bytes` counts the mean, because some ranks of a tree send more than others
    sent = np.mean([log[-1].sent for log in logs], axis=0)
    traffic = [routes.of(bucket).wire_bytes(bucket, plan.topology) for bucket in plan.buckets]
    promised = len(logs[0]) * np.sum(traffic, axis=0)
    require(
        bool(np.allclose(sent, promised, rtol=1e-9)),
        "The bytes sent must be those of `wire_bytes`.",
        where,
        f"{len(logs[0])} steps sent {sent.tolist()} bytes a rank (inside, between), and "
        f"{promised.tolist()} are counted.",
    )


def check_non_finite(plan: Plan, where: str) -> None:
    """Require that a NaN or Inf of one rank reaches all, and stays in no residual and no state."""
    last = plan.topology.size - 1
    for bad in (np.nan, np.inf, -np.inf):

        def source(rank: int, step: int, bad: float = bad) -> Values:
            gradients = whole_numbers(rank, step)
            # In the second of three steps: there are residuals before it, and a step after it
            if step == 1 and rank == last:
                for values in gradients.values():
                    values.flat[values.size // 2] = bad
            return gradients

        for rank, (_, poisoned, after) in enumerate(play(plan, source)):
            for path in SHAPES:
                require(
                    not np.isfinite(poisoned.result[path]).all(),
                    "NaN and Inf must reach every rank in the same step.",
                    where,
                    f"Rank {rank} got finite numbers for {path!r} while rank {last} had {bad}.",
                )
                require(
                    bool(np.isfinite(after.result[path]).all()),
                    "The step after a NaN or Inf must be finite.",
                    where,
                    f"Rank {rank} got others for {path!r}.",
                )
            states = [*after.state.residuals.values(), *after.state.compressions.values()]
            require(
                all(np.isfinite(state).all() for state in states),
                "NaN and Inf must enter no residual and no state.",
                where,
                f"Rank {rank} keeps some.",
            )


def check_continues(plan: Plan, where: str) -> None:
    """Require that a restored state continues with the same bits."""

    def work(comm: Comm) -> bool:
        first, second = PlanExecutor(plan, comm), PlanExecutor(plan, comm)
        # A step before, because residuals and states are zeros at first
        take(first, normal_numbers(comm.rank, 0))
        second.load(first.export())
        uninterrupted, restored = (
            take(each, normal_numbers(comm.rank, 1)) for each in (first, second)
        )
        return all(
            np.array_equal(uninterrupted.result[path], restored.result[path]) for path in SHAPES
        )

    require(
        all(ThreadComm.run(plan.topology, work)),
        "A restored state must lead to the same bits.",
        where,
        "It did not.",
    )
