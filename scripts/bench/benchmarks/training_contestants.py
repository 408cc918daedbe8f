"""The contestants of the benchmark of training: a model under each scheme."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
from bench.benchmarks import training_models
from bench.peers import plain_optimizer

import tfcommx as cx
from tfcommx import routes
from tfcommx.collectives.comm import Comm
from tfcommx.compression import COMPRESSIONS
from tfcommx.core import ConfigurationError, Links, Plan, Profile, Scheme, VariableProfile
from tfcommx.keras_internals.names import VariableNames
from tfcommx.planner.plan import Gradient, make_plan

# The scheme that exchanges nothing. Predictions of the others start from its measured step
ALONE = "none"
# In front of a scheme by which LowBitSGD's momentum travels, and not a gradient
MOMENTUM = "momentum "


@dataclasses.dataclass
class Contestant:
    """A model that is trained under one scheme."""

    name: str
    model: keras.Model
    batch: training_models.Batch
    # Of the slowest rank, step by step
    seconds: list[float] = dataclasses.field(default_factory=list)
    # That this rank has sent to other nodes in the steps that count
    sent: float = 0.0

    @property
    def exchanger(self) -> Any:
        """The exchanger of the wrapped optimizer; None if it is not wrapped."""
        return getattr(self.model.optimizer, "exchanger", None)

    def plan(self, comm: Comm) -> Plan | None:
        """Return the plan of the exchange; for plain Horovod, one bucket for each gradient."""
        if self.name == ALONE:
            return None
        if self.exchanger is not None:
            plans = self.exchanger.plans()
            # The plan of momenta, the last one, replaces that of a phase with gradients, which has
            # the same buckets, because most steps follow it
            buckets = {bucket.variables: bucket for plan in plans for bucket in plan.buckets}
            return dataclasses.replace(plans[0], buckets=tuple(buckets.values()))
        rows = zip(self.names(), self.model.trainable_variables, strict=True)
        gradients = [Gradient(name, tuple(one.shape), "float32") for name, one in rows]
        return make_plan(gradients, {"*": Scheme(merging="each")}, comm.topology)

    def names(self) -> list[str]:
        """Return the plan's names of the variables."""
        names = VariableNames() if self.exchanger is None else self.exchanger.names
        return names.of(self.model.trainable_variables)

    def named(self, profile: Profile) -> tuple[VariableProfile, ...]:
        """Return the rows of a profile of an equal model, under this one's names."""
        names = reversed(self.names())
        return tuple(
            dataclasses.replace(row, name=name)
            for row, name in zip(profile.variables, names, strict=True)
        )


def split_name(name: str, chosen: argparse.Namespace) -> tuple[str, float]:
    """Return a scheme's name without the density that may follow it, and its density."""
    first, _, last = name.rpartition(" ")
    return (first, float(last)) if last[:1] in ("0", ".") else (name, chosen.density)


def optimizer_of(name: str, links: Links, chosen: argparse.Namespace) -> keras.optimizers.Optimizer:
    """Return the optimizer of a scheme.

    **Raises:** ConfigurationError if the scheme cannot be carried out.
    """
    if name == ALONE:
        return plain_optimizer(keras.optimizers.SGD(0.01), None)
    if name == "horovod":
        return plain_optimizer(keras.optimizers.SGD(0.01))
    name, density = split_name(name, chosen)
    by_momentum = name.startswith(MOMENTUM)
    route, _, wire = name.removeprefix(MOMENTUM).partition(" ")
    route, _, peers = route.partition("+")
    how: dict[str, Any] = {"peer_route": peers or "allreduce", "bucket_bytes": chosen.bucket_bytes}
    if wire == "sparse" or route in routes.SPARSE:
        how |= {"selection": chosen.selection, "density": density}
    if wire.partition("/")[0] in COMPRESSIONS:
        how["compression"] = wire
    elif wire and wire != "sparse":
        how["wire"] = wire
    scheme = Scheme(route, **how)
    sgd = cx.optimizers.LowBitSGD(0.01) if by_momentum else keras.optimizers.SGD(0.01)
    return cx.DistributedOptimizer(sgd, scheme, links=links, check_replicas_every=None)


def contestants(
    comm: Comm, model: str, links: Links, chosen: argparse.Namespace
) -> Iterator[Contestant]:
    """Make a model for each scheme; say which schemes are refused. **Ranks:** all."""
    for name in dict.fromkeys([ALONE, *chosen.schemes]):
        try:
            optimizer = optimizer_of(name, links, chosen)
        except ConfigurationError as refusal:
            if comm.rank == 0:
                print(f"{model}, {name}: left out: {refusal}", flush=True)
            continue
        made = training_models.make(model, optimizer, chosen.batch, comm.rank)
        yield Contestant(name, *made)
