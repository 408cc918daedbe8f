"""Links: the costs of messages inside a node and between nodes, fitted to measured times.

They include the settings and the measured times of the engine that carries out collectives.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tfcommx.core.checks import check_number, check_whole
from tfcommx.core.errors import ConfigurationError
from tfcommx.core.files import local_path, reading
from tfcommx.core.topology import Topology

# Eight times the adapters of the node that has most, of 32; more are a number of another kind
MOST_NICS = 256


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine that its prices in `tfcommx.engines` depend on.

    >>> EngineSettings("nccl", nics=2).name
    'nccl'
    """

    # Name in the table of `tfcommx.engines`. The default is not a real engine: rings on an idle
    # network, as the papers price them.
    name: str = "ring"
    # Network adapters of a node, in [1, MOST_NICS]. The rate of a port is that of all together.
    nics: int = 1
    # Connection of the ranks of a node, a name in the table of `engines.engine`. NCCL's assumed
    # latencies depend on it.
    wiring: str = "nvlink"
    # Seconds between two polls of the queue by Horovod's background thread (HOROVOD_CYCLE_TIME),
    # >= 0. The default polls all the time.
    cycle_s: float = 0.0
    # Bytes of the buffer in which allreduces are fused (HOROVOD_FUSION_THRESHOLD), >= 0, if
    # `Links.fuses`. The default is Horovod's.
    fusion_bytes: int = 2**27

    def __post_init__(self) -> None:
        if check_whole("nics", self.nics, least=1) > MOST_NICS:
            raise ConfigurationError(
                f"`nics` must be at most {MOST_NICS}, the network adapters of one node. Received "
                f"{self.nics}."
            )
        check_whole("fusion_bytes", self.fusion_bytes, least=0)
        check_number("cycle_s", self.cycle_s, ">= 0")


Size = TypeVar("Size", int, float)


@dataclass(frozen=True)
class Calibration:
    """Measured times of an engine's collectives, without the engine's own time."""

    # Number of ranks in the allreduces, >= 2 with points; 0: not measured.
    ranks: int = 0
    # (bytes of the vector, > 0, seconds) of allreduces of all ranks, both ascending.
    points: tuple[tuple[int, float], ...] = ()
    # Number of nodes in the all-gathers, >= 2 with gathers; 0: not measured.
    nodes: int = 0
    # (bytes through a node's port, > 0, seconds) of all-gathers among peers, while those of all
    # slots travel, both ascending.
    gathers: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        for members, points in (("ranks", self.points), ("nodes", self.gathers)):
            sizes, seconds = [size for size, _ in points], [time_s for _, time_s in points]
            numbers = all(math.isfinite(time_s) for time_s in seconds)
            growing = [0, *sizes] == sorted({0, *sizes})
            if not (numbers and growing and [0, *seconds] == sorted([0, *seconds])):
                raise ConfigurationError(
                    "A calibration needs sizes > 0 that grow and seconds >= 0 that do not fall. "
                    f"Received {points}."
                )
            if points:
                check_whole(f"{members} of a calibration", getattr(self, members), least=2)


def not_falling(measured: Sequence[tuple[Size, float]]) -> tuple[tuple[Size, float], ...]:
    """Return measured (size, seconds), ascending by size, with seconds >= 0 that do not fall.

    >>> not_falling([(64, -1.0), (1024, 3.0), (4096, 2.0)])
    ((64, 0.0), (1024, 2.0), (4096, 2.0))
    """
    # A longer vector's shorter time counts for both, because disturbances only lengthen times
    sizes = [size for size, _ in measured]
    backwards = [max(time_s, 0.0) for _, time_s in reversed(measured)]
    seconds = list(itertools.accumulate(backwards, min))[::-1]
    return tuple(zip(sizes, seconds, strict=True))


@dataclass(frozen=True)
class Link:
    """The cost of a message on one kind of connection.

    A message of b bytes takes alpha + b * beta seconds, and reducing b bytes takes b * gamma.
    """

    # Seconds before the first byte arrives, >= 0.
    alpha_s: float
    # Seconds per byte sent, > 0.
    beta_s_per_byte: float
    # Seconds per byte reduced, >= 0.
    gamma_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        # Also because a price that is NaN would win every comparison of times, as if it were free
        for name, wanted in (
            ("alpha_s", ">= 0"),
            ("beta_s_per_byte", "> 0"),
            ("gamma_s_per_byte", ">= 0"),
        ):
            check_number(name, getattr(self, name), wanted)


class Links(NamedTuple):
    """The two kinds of link of a cluster, and the settings tuned to them."""

    # Link between ranks of one node.
    inside: Link
    # Link between nodes.
    between: Link
    # Bytes of a block of the linear pipeline, >= 8. The default fills the pipe early. It is below
    # 64 KB, the paper's size, because from there on Open MPI over TCP agrees with the receiver
    # before it sends each block.
    block_bytes: int = 49152
    # Seconds of the engine for each collective in addition to its price, >= 0: negotiation, its
    # cycle, waking its thread. Under MPI, messages between two ranks do not pay it.
    engine_s: float = 0.0
    # Relative slowdown of messages while the ranks compute, >= 0; 0.5: half as long again.
    contention: float = 0.0
    # True if the engine fuses all allreduces that wait for it into one.
    fuses: bool = False
    # Engine that carries out collectives, and its settings.
    engine: EngineSettings = EngineSettings()
    # Standard deviation / mean of the times of messages in the probe, >= 0.
    spread: float = 0.0
    # Times of the engine's collectives in the probe.
    calibration: Calibration = Calibration()

    def slowest(self, topology: Topology) -> Link:
        """Return the link that limits the pace: the one between nodes if there are several."""
        return self.between if topology.nodes > 1 else self.inside

    def to_dict(self) -> dict[str, Any]:
        """Return a mapping that JSON can write."""
        nested = ("inside", "between", "engine", "calibration")
        return self._asdict() | {name: dataclasses.asdict(getattr(self, name)) for name in nested}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Links:
        """Make links from the mapping that `to_dict` returns.

        **Raises:** ValueError, KeyError or TypeError for anything else.
        """
        links = Links(
            Link(**fields["inside"]),
            Link(**fields["between"]),
            fields["block_bytes"],
            # A file that was written by hand may lack these
            fields.get("engine_s", 0.0),
            fields.get("contention", 0.0),
            fields.get("fuses", True),  # As NOMINAL
            EngineSettings(**fields.get("engine", {})),
            fields.get("spread", 0.0),
            _calibration(fields.get("calibration", {"ranks": 0, "points": ()})),
        )
        if (
            not all(0 <= n < math.inf for n in (links.engine_s, links.contention, links.spread))
            or not isinstance(links.block_bytes, int)
            or links.block_bytes < 8
            or not isinstance(links.fuses, bool)
        ):
            raise ValueError(
                "finite numbers, engine_s, contention and spread >= 0, block_bytes an integer >= "
                f"8, and fuses true or false are required. Received {links}"
            )
        return links

    @staticmethod
    def read(path: str | Path, topology: Topology | None = None) -> Links:
        """Read the file that `tfcommx probe` wrote.

        Args:
            topology: cluster on which the links must have been measured; None: any.

        **Raises:** DataError if the file is missing or invalid; ConfigurationError if it was
        measured on a cluster without a kind of link that this topology has.
        """
        remedy = "Measure them: `horovodrun ... tfcommx probe`, and copy the file to every node."
        with reading("A file of links", path, remedy):
            content = json.loads(local_path("path", path).read_text())
            links, points = Links.from_dict(content["links"]), dict(content.get("points", {}))
        if topology is not None:
            _check_kinds(path, points, topology)
        return links

    @staticmethod
    def unmeasured(path: str | Path) -> tuple[str, ...]:
        """Return the kinds of link in a file of `tfcommx probe` whose cluster lacked them.

        Empty for a file without points, written by hand.
        """
        points = json.loads(local_path("path", path).read_text()).get("points", {})
        return tuple(kind for kind in ("inside", "between") if points.get(kind) == [])


def _calibration(fields: Mapping[str, Any]) -> Calibration:
    curves = {
        name: tuple((size, time_s) for size, time_s in fields.get(name, ()))
        for name in ("points", "gathers")
    }
    return Calibration(**{**fields, **curves})


def _check_kinds(path: str | Path, points: Mapping[str, Any], topology: Topology) -> None:
    """Refuse links of another cluster; a file without points, written by hand, is accepted."""
    for kind, ranks in (("inside", topology.slots), ("between", topology.nodes)):
        if ranks > 1 and points.get(kind) == []:
            raise ConfigurationError(
                f"Links of this cluster, {topology}, are required. Received {path}, which was "
                f"measured without links {kind} nodes. Measure them: `horovodrun ... tfcommx "
                "probe`."
            )


# Links before any measurement: NVLink or shared memory inside, 10 Gbit/s Ethernet between. Only
# their ratio matters to a plan. Horovod fuses unless HOROVOD_FUSION_THRESHOLD is 0.
NOMINAL = Links(inside=Link(5e-6, 1e-10, 1e-11), between=Link(5e-5, 8e-10, 1e-11), fuses=True)


class Traffic(NamedTuple):
    """Bytes that one rank sends, as the mean over the ranks."""

    # Bytes to ranks of the same node.
    inside: float
    # Bytes to ranks of other nodes.
    between: float


# Lower limit of seconds per byte, faster than any memory; noise must not make a link free
SMALLEST_BETA = 1e-13


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit a latency and a time per byte to measured times.

    >>> alpha, beta = fit([(1, 1000, 1.5), (1, 2000, 2.5)])
    >>> round(alpha, 9), round(beta, 9)
    (0.5, 0.001)

    Args:
        points: (latency terms, bytes, seconds) of each measurement.

    Returns:
        alpha (seconds, >= 0) and beta (seconds per byte, > 0).

    **Raises:** ConfigurationError for fewer than two sizes or times that are not positive.
    """
    latencies, sizes, seconds = np.array(points, np.float64).reshape(-1, 3).T
    if len(set(sizes)) < 2 or (seconds <= 0).any():
        raise ConfigurationError(
            "A fit of alpha and beta needs times > 0 of two or more sizes. Received "
            f"{list(points)}."
        )
    # The relative error, in which small messages count as much as large ones, because alpha would
    # otherwise vanish in beta's noise
    rows = np.stack([latencies, sizes], axis=1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0]
    if alpha < 0:  # Fit without latency
        alpha, beta = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    if beta < SMALLEST_BETA:
        alpha, beta = rows[:, 0].sum() / (rows[:, 0] ** 2).sum(), SMALLEST_BETA
    return float(alpha), float(beta)
