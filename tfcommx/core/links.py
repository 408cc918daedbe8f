"""Links: the costs of messages inside a node and between nodes, fitted to measured times.

They have the settings of the engine that carries collectives out, and its measured times.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfcommx.core.checks import check_whole
from tfcommx.core.errors import ConfigurationError
from tfcommx.core.files import local_path, reading
from tfcommx.core.topology import Topology


@dataclass(frozen=True)
class EngineSettings:
    """What prices must know of the engine besides the links; `tfcommx.engines` has the prices.

    >>> EngineSettings("nccl", nics=2).name
    'nccl'
    """

    # In the table of `tfcommx.engines`. The default is no engine of its own: rings on an idle
    # network, as the papers price them.
    name: str = "ring"
    # Network adapters of a node, >= 1. The rate of a port is that of all of them together.
    nics: int = 1
    # What joins the ranks of a node, in the table of `engines.engine`. It decides which latencies
    # NCCL assumes there.
    wiring: str = "nvlink"
    # Seconds between two looks of Horovod's background thread at what waits (HOROVOD_CYCLE_TIME),
    # >= 0. The default is one that looks all the time.
    cycle_s: float = 0.0
    # Bytes of the buffer in which allreduces are fused (HOROVOD_FUSION_THRESHOLD), >= 0, if the
    # links say that they are. Horovod's own default.
    fusion_bytes: int = 2**27

    def __post_init__(self) -> None:
        check_whole("nics", self.nics, least=1)
        check_whole("fusion_bytes", self.fusion_bytes, least=0)
        if not isinstance(self.cycle_s, int | float) or not 0 <= self.cycle_s < math.inf:
            raise ConfigurationError(f"`cycle_s` must be >= 0. Received {self.cycle_s!r}.")


@dataclass(frozen=True)
class Calibration:
    """What an engine's allreduces of short vectors took in the probe.

    >>> Calibration.of(4, [(1024, 2e-4), (65536, 1e-4)]).points
    ((1024, 0.0001), (65536, 0.0001))
    """

    # That took part; 0: nothing was measured.
    ranks: int = 0
    # (bytes of the vector, seconds without the engine's own time), both ascending; two or more.
    points: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        sizes, seconds = [size for size, _ in self.points], [one for _, one in self.points]
        numbers = all(math.isfinite(one) for one in seconds)
        if self.points and not (
            numbers and sizes == sorted(set(sizes)) and [0, *seconds] == sorted([0, *seconds])
        ):
            raise ConfigurationError(
                "A calibration needs sizes that grow and seconds >= 0 that do not fall. Received "
                f"{self.points}."
            )

    @staticmethod
    def of(ranks: int, measured: Sequence[tuple[int, float]]) -> Calibration:
        """Make one of measured times: a vector takes at most as long as a longer one took.

        Disturbances only lengthen times, so a longer vector's shorter time counts for both.
        """
        sizes = [size for size, _ in measured]
        backwards = [max(one, 0.0) for _, one in reversed(measured)]
        seconds = list(itertools.accumulate(backwards, min))[::-1]
        return Calibration(ranks, tuple(zip(sizes, seconds, strict=True)))


@dataclass(frozen=True)
class Link:
    """One kind of connection: what a message costs on it.

    A message of b bytes takes alpha + b * beta seconds, and reducing b bytes takes b * gamma.
    """

    # Seconds before the first byte arrives, >= 0.
    alpha_s: float
    # Seconds per byte sent, > 0.
    beta_s_per_byte: float
    # Seconds per byte reduced, >= 0.
    gamma_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.alpha_s < 0 or self.beta_s_per_byte <= 0 or self.gamma_s_per_byte < 0:
            raise ConfigurationError(
                "A link needs alpha_s >= 0, beta_s_per_byte > 0, gamma_s_per_byte >= 0. "
                f"Received {self}."
            )


class Links(NamedTuple):
    """The two kinds of link of a cluster, and what was tuned to them."""

    # Between ranks of one node.
    inside: Link
    # Between nodes.
    between: Link
    # Bytes of a block of the linear pipeline, >= 8. The default fills the pipe soon: from 64 KB on
    # (the paper's size) Open MPI over TCP agrees with the receiver before it sends each block.
    block_bytes: int = 49152
    # What the engine needs for each collective besides its price, >= 0: negotiation, its cycle,
    # waking its thread. Under MPI messages between two ranks do not pay it.
    engine_s: float = 0.0
    # By how much longer a message takes while the ranks compute, >= 0: 0.5 is half as long again.
    contention: float = 0.0
    # Whether the engine fuses all allreduces that wait for it into one.
    fuses: bool = False
    # Which engine carries collectives out, and how it was set.
    engine: EngineSettings = EngineSettings()
    # Standard deviation / mean of what messages took in the probe, >= 0.
    spread: float = 0.0
    # What the engine's allreduces of short vectors took there.
    calibration: Calibration = Calibration()

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can write."""
        return {
            **self._asdict(),
            "inside": dataclasses.asdict(self.inside),
            "between": dataclasses.asdict(self.between),
            "engine": dataclasses.asdict(self.engine),
            "calibration": dataclasses.asdict(self.calibration),
        }

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Links:
        """Read what `to_dict` returned.

        **Raises:** ValueError, KeyError or TypeError for anything else.
        """
        links = Links(
            Link(**found["inside"]),
            Link(**found["between"]),
            found["block_bytes"],
            found.get("engine_s", 0.0),
            found.get("contention", 0.0),
            found.get("fuses", False),
            EngineSettings(**found.get("engine", {})),
            found.get("spread", 0.0),
            _calibration(found.get("calibration", {"ranks": 0, "points": ()})),
        )
        numbers = [*dataclasses.astuple(links.inside), *dataclasses.astuple(links.between)]
        more = [links.engine_s, links.contention, links.spread]
        if (
            not all(math.isfinite(number) for number in [*numbers, *more])
            or min(more) < 0
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
        """Read what `tfcommx probe` wrote.

        Args:
            path: of the file.
            topology: of the cluster that it must have been measured on; None: of any.

        **Raises:** ConfigurationError if the file is missing or says something else, or if it was
        measured on a cluster without a kind of link that this topology has.
        """
        remedy = "Measure them: `horovodrun ... tfcommx probe`, and copy the file to every node."
        with reading("A file of links", path, remedy):
            found = json.loads(local_path("path", path).read_text())
            links, points = Links.from_dict(found["links"]), dict(found.get("points", {}))
        if topology is not None:
            _check_kinds(path, points, topology)
        return links


def _calibration(found: Mapping[str, Any]) -> Calibration:
    return Calibration(found["ranks"], tuple((size, one) for size, one in found["points"]))


def _check_kinds(path: str | Path, points: Mapping[str, Any], topology: Topology) -> None:
    """Refuse links of another cluster; a file without points, written by hand, says nothing."""
    for kind, ranks in (("inside", topology.slots), ("between", topology.nodes)):
        if ranks > 1 and points.get(kind) == []:
            raise ConfigurationError(
                f"Links of this cluster, {topology}, are required. Received {path}, which was "
                f"measured without links {kind} nodes. Measure them: `horovodrun ... tfcommx "
                "probe`."
            )


# Before anything was measured: NVLink or shared memory inside, 10 Gbit/s Ethernet between. Only
# their ratio matters to a plan.
NOMINAL = Links(inside=Link(5e-6, 1e-10, 1e-11), between=Link(5e-5, 8e-10, 1e-11))


class Traffic(NamedTuple):
    """Bytes that one rank sends, as the mean over the ranks."""

    # To ranks of its own node.
    inside: float
    # To ranks of other nodes.
    between: float


# Seconds per byte, faster than any memory: noise must not make a link free
SMALLEST_BETA = 1e-13


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit a latency and a time per byte to measured times.

    >>> alpha, beta = fit([(1, 1000, 1.5), (1, 2000, 2.5)])
    >>> round(alpha, 9), round(beta, 9)
    (0.5, 0.001)

    It minimizes the squared relative error: small messages count as much as large ones, or alpha
    would vanish in beta's noise.

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
    rows = np.stack([latencies, sizes], axis=1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0]
    if alpha < 0:  # Fit without latency
        alpha, beta = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    if beta < SMALLEST_BETA:
        alpha, beta = rows[:, 0].sum() / (rows[:, 0] ** 2).sum(), SMALLEST_BETA
    return float(alpha), float(beta)
