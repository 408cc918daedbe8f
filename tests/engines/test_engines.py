"""Prices of engines against cases worked out by hand, and their choice by size and ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tfcommx import engines, routes
from tfcommx.core import (
    NOMINAL,
    Bucket,
    Calibration,
    ConfigurationError,
    DataError,
    EngineSettings,
    Link,
    Links,
    Topology,
    cost,
)
from tfcommx.core.links import not_falling
from tfcommx.engines import engine as wiring
from tfcommx.engines import nccl, open_mpi

# A port ten times as slow as the links inside a node, and the other way round
INSIDE, PORT = Link(1, 0.5, 0.25), Link(10, 5.0, 0.25)
LINKS = Links(INSIDE, PORT)
FLAT, PAIRS = Topology(4, 1), Topology(2, 2)
REAL = Links(Link(2e-6, 1e-10), Link(2e-5, 8e-10))


def by(name: str, links: Links = LINKS, **more: object) -> Links:
    return links._replace(engine=EngineSettings(name, **more))


@pytest.mark.parametrize("name", engines.ENGINES)
def test_every_engine_has_prices_that_grow_with_bytes_and_are_nothing_alone(name: str) -> None:
    engine = engines.get(name)
    priced = (engine.all_reduce, engine.reduce_scatter, engine.all_gather, engine.all_to_all)
    for price in priced:
        assert price(1e9, Topology(1, 1), REAL) == 0
        for topology in (Topology(1, 4), Topology(4, 1), Topology(4, 4), Topology(3, 2)):
            few, many = price(1e6, topology, REAL), price(1e8, topology, REAL)
            assert 0 < few < many, (name, price, topology)


@pytest.mark.parametrize("name", engines.ENGINES)
@pytest.mark.parametrize("topology", [Topology(4, 1), Topology(1, 8), Topology(4, 4)])
def test_no_engine_is_faster_than_its_bytes(name: str, topology: Topology) -> None:
    """An allreduce sends and receives 2 (p - 1) / p of the vector at each rank."""
    links = by(name, REAL)
    ranks = topology.slots if topology.nodes > 1 else topology.size
    least = 2 * (ranks - 1) / ranks * 1e8 * links.inside.beta_s_per_byte if ranks > 1 else 0
    if topology.nodes > 1:
        m = topology.nodes
        least = max(least, 2 * (m - 1) / m * 1e8 * links.between.beta_s_per_byte)
    assert engines.get(name).all_reduce(1e8, topology, links) >= least * (1 - 1e-9)


def test_the_identity_is_the_papers_ring() -> None:
    ring = engines.get("ring")
    assert ring.all_reduce(1000, FLAT, LINKS) == cost.all_reduce(1000, 4, PORT)
    assert ring.reduce_scatter(1000, FLAT, LINKS) == cost.reduce_scatter(1000, 4, PORT)
    assert ring.all_gather(1000, FLAT, LINKS) == cost.all_gather(1000, 4, PORT)
    assert Links(INSIDE, PORT).engine.name == "ring"


@pytest.mark.parametrize("name", engines.ENGINES)
def test_links_inside_slow_an_allreduce_down(name: str) -> None:
    """Of a long vector, with an inside that is slower than the port by a factor of ten."""
    route, bucket = routes.get("allreduce"), Bucket("b", ("w",), (10**7,), "float32", "allreduce")
    fast, slow = (by(name, Links(Link(1e-6, beta), Link(1e-6, 1e-10))) for beta in (1e-11, 1e-9))
    ratio = route.seconds(bucket, PAIRS, slow) / route.seconds(bucket, PAIRS, fast)
    assert ratio > 4


def test_a_flat_ring_goes_at_the_pace_of_its_slowest_hop() -> None:
    """2 x 2 ranks: every second hop is inside; latencies count as their mean."""
    hop = engines.get("ring").flat_ring(PAIRS, LINKS)
    assert hop == Link(5.5, 5.0, 0.25)
    slow_inside = LINKS._replace(inside=Link(1, 50.0))
    assert engines.get("ring").flat_ring(PAIRS, slow_inside).beta_s_per_byte == 50


def test_one_ring_uses_one_adapter_unless_the_engine_spreads_it() -> None:
    """A port of 5 s a byte with 2 adapters; 4 streams use both, and share them."""
    two = by("gloo", nics=2)
    gloo, spreads = engines.get("gloo"), engines.get("nccl")
    assert gloo.port(two, 1).beta_s_per_byte == 10
    assert gloo.port(two, 4).beta_s_per_byte == 20
    assert spreads.port(two, 1).beta_s_per_byte == 5
    shared = gloo.shared_port(two, 4)
    assert gloo.port(shared, 1).beta_s_per_byte == 20


def test_gloo_overlaps_additions_with_the_next_segment() -> None:
    """16 bytes on 4 ranks in segments of 2: 6 rounds down, 6 up, two in flight.

    2 bytes take 10 s to send and 0.5 s to add, and half of 10 + 10 + 0.5 is longer: 10.25 down,
    10 up.
    """
    assert engines.get("gloo").all_reduce(16, FLAT, LINKS) == 6 * 10.25 + 6 * 10


def test_an_all_to_all_by_hand() -> None:
    """16 bytes on 2 x 2: 4 stay in the node, 8 leave it through a port that two share.

    In pairs: 3 latencies, then both. At once: one latency more for the sizes, and the slower.
    """
    inside, leaving = 4 * 0.5, 8 * 2 * 5
    for name in ("ring", "open_mpi_1"):
        in_pairs = engines.get(name).all_to_all(16, PAIRS, LINKS)
        assert in_pairs == pytest.approx(3 * 10 + inside + leaving)
    for name in ("gloo", "open_mpi"):
        assert engines.get(name).all_to_all(16, PAIRS, LINKS) == 2 * 10 + leaving
    assert engines.get("gloo").all_to_all(16, Topology(1, 4), LINKS) == 2 * 1 + 12 * 0.5
    assert engines.get("gloo").reduce_scatter(16, FLAT, LINKS) == 2 * 10 + 12 * 5 + 12 * 0.25


@pytest.mark.parametrize("ranks", [2, 3, 64, 127, 256, 1023])
def test_open_mpi_exchanges_in_pairs_by_the_number_of_ranks(ranks: int) -> None:
    engine = engines.get("open_mpi")
    pairs = 10 + engines.get("ring").all_to_all(16, Topology(ranks, 1), LINKS)
    assert engine.all_to_all(16, Topology(ranks, 1), LINKS) == pytest.approx(pairs)
    for other in (4, 63, 128, 255, 1024):
        at_once = engine.all_at_once(16, Topology(other, 1), LINKS)
        assert engine.all_to_all(16, Topology(other, 1), LINKS) == at_once


def test_nccl_sends_sixteen_messages_at_once() -> None:
    """Rounds of 16, each with the network's latency in Simple; the sizes before them; the bytes."""
    hop, size = REAL.between.alpha_s + 9.6e-6 - 2.7e-6, 1e6
    for ranks, rounds in ((2, 1), (17, 1), (18, 2), (34, 3)):
        waits = REAL.between.alpha_s + 8.4e-6 + rounds * hop
        sent = (ranks - 1) / ranks * size * REAL.between.beta_s_per_byte
        for name in ("nccl", "horovod_hierarchical"):
            found = engines.get(name).all_to_all(size, Topology(ranks, 1), REAL)
            assert found == pytest.approx(waits + sent)


@pytest.mark.parametrize(
    ("size", "ranks", "algorithm"),
    [
        (4, 2, "ring"),
        (4000, 2, "doubling"),
        (5000, 2, "ring"),
        (262144, 2, "rabenseifner"),
        (8191, 8, "doubling"),
        (8192, 8, "rabenseifner"),
        (100, 33, "ring"),
        (100_000, 100, "doubling"),
        (100_000, 200, "tree"),
        (1e9, 5000, "rabenseifner"),
    ],
)
def test_open_mpi_decides_by_bytes_and_ranks(size: float, ranks: int, algorithm: str) -> None:
    assert open_mpi.decide(size, ranks) == algorithm


def test_open_mpi_by_hand() -> None:
    """4 nodes of one rank: 4 bytes by doubling, 10,000 bytes in halves and back."""
    priced = engines.get("open_mpi").all_reduce
    assert priced(4096, FLAT, LINKS) == pytest.approx(2 * (10 + 4096 * 5.25))
    halves = 5000 + 2500
    assert priced(10_000, FLAT, LINKS) == pytest.approx(4 * 10 + halves * (2 * 5 + 0.25))
    # 3 ranks: one first sends its vector to another, in halves, and receives the sum at the end
    beyond = 2 * (10 + 150_000 * 5) + 150_000 * 0.25 + 10 + 300_000 * 5
    pair = 2 * (10 + 150_000 * 5) + 150_000 * 0.25
    assert priced(300_000, Topology(3, 1), LINKS) == pytest.approx(pair + beyond)


def test_older_open_mpi_doubles_short_vectors_and_sends_long_ones_around() -> None:
    priced = engines.get("open_mpi_1").all_reduce
    assert priced(9999, FLAT, LINKS) == pytest.approx(2 * (10 + 9999 * 5.25))
    assert priced(10_000, FLAT, LINKS) == cost.all_reduce(10_000, 4, PORT)


def test_han_sends_a_vector_five_times_through_a_root_of_four_nodes() -> None:
    """16 MB at 200 Mbit/s on 4 nodes of 2, as measured: 3.18 s; a ring needs 1.12 s."""
    links = Links(Link(1e-6, 1e-10), Link(5e-5, 4e-8))
    found = engines.get("open_mpi").all_reduce(16e6, Topology(4, 2), links)
    assert found == pytest.approx(5 * 16e6 * 4e-8, rel=0.05) == pytest.approx(3.18, rel=0.05)


def test_nccl_takes_trees_for_short_messages_on_many_nodes() -> None:
    """A short message does not pay 2 (p - 1) alpha; a long one is as fast as on a ring."""
    many, links = Topology(32, 1), by("nccl", REAL)
    short = nccl.ENGINE.all_reduce(1024, many, links)
    assert short < 15 * REAL.between.alpha_s < 62 * REAL.between.alpha_s
    long = nccl.ENGINE.all_reduce(1e9, many, links)
    assert long == pytest.approx(cost.all_reduce(1e9, 32, REAL.between), rel=0.05)


def test_nccl_by_hand() -> None:
    """2 nodes of 1, 1 KB, 20 us a hop: ring in LL 3.6 + 2 x 20 us; tree 4.4 + 2 x (20 + 2.3)."""
    two = Topology(2, 1)
    ring = 3.6e-6 + 2 * 2e-5 + 4 * 1024 * 8e-10
    assert nccl.ENGINE.all_reduce(1024, two, by("nccl", REAL)) == pytest.approx(ring)


def test_nccl_uses_ll128_on_nvlink_alone() -> None:
    node, size = Topology(1, 8), 300_000
    nvlink = nccl.ENGINE.all_reduce(size, node, by("nccl", REAL))
    pci = nccl.ENGINE.all_reduce(size, node, by("nccl", REAL, wiring="pcie_switch"))
    assert nvlink < pci


def test_the_hierarchical_option_sends_each_slots_part_between_nodes() -> None:
    """8 nodes of 4: a quarter of the vector a slot, and four slots share the port."""
    links, long = by("horovod_hierarchical", REAL), 1e9
    found = engines.of(links).all_reduce(long, Topology(8, 4), links)
    between = 2 * 7 / 8 * long * REAL.between.beta_s_per_byte
    inside = 2 * 3 / 4 * long * REAL.inside.beta_s_per_byte
    assert found == pytest.approx(between + inside, rel=0.01)


def test_wirings_share_what_they_share() -> None:
    wire = Link(1e-5, 1e-10, 1e-11)
    found = {name: wiring.ring_link(wire, 4, name).beta_s_per_byte for name in wiring.WIRINGS}
    assert found == pytest.approx(
        {
            "nvlink": 1e-10,
            "pcie_switch": 1e-10,
            "root_complex": 4e-10,
            "host_memory": 8e-10,
            "qpi": 1e-10,
        }
    )


def test_settings_are_checked_and_kept_with_the_links() -> None:
    with pytest.raises(ConfigurationError, match="nics"):
        EngineSettings(nics=0)
    with pytest.raises(ConfigurationError, match=r"\b256\b.*1000000"):
        EngineSettings(nics=1_000_000)
    with pytest.raises(ConfigurationError, match="cycle_s"):
        EngineSettings(cycle_s=-1.0)
    with pytest.raises(ConfigurationError, match=r"'ncll'.*'nccl'"):
        engines.get("ncll")
    with pytest.raises(ConfigurationError, match="'copper'"):
        wiring.get("copper")
    links = NOMINAL._replace(engine=EngineSettings("gloo", 2, "qpi", 1e-3, 2**20))
    assert Links.from_dict(links.to_dict()) == links
    old = {key: value for key, value in NOMINAL.to_dict().items() if key != "engine"}
    assert Links.from_dict(old) == NOMINAL
    assert dataclasses.asdict(links.engine)["nics"] == 2


def test_a_measured_curve_takes_the_place_of_the_price_of_short_allreduces() -> None:
    """Points at 1,000 and 3,000 bytes; then its last rate or the engine's counts."""
    curve = Calibration(4, ((1000, 50.0), (3000, 90.0)))
    measured = LINKS._replace(calibration=curve)
    engine, plain = engines.of(measured), engines.of(LINKS)
    found = [engine.all_reduce(size, FLAT, measured) for size in (10, 1000, 2000, 3000)]
    assert found == [50, 50, 70, 90]
    assert engine.all_reduce(5000, FLAT, measured) == pytest.approx(5000 * 90 / 3000)
    slow = LINKS._replace(calibration=Calibration(4, ((1000, 1e5), (3000, 2e5))))
    more = plain.all_reduce(5000, FLAT, LINKS) - plain.all_reduce(3000, FLAT, LINKS)
    assert engines.of(slow).all_reduce(5000, FLAT, slow) == 2e5 + more
    # Nothing was measured of other groups, and of other collectives
    assert engine.all_reduce(2000, PAIRS, measured) == 70
    assert engine.all_reduce(2000, Topology(2, 1), measured) == plain.all_reduce(
        2000, Topology(2, 1), LINKS
    )
    assert engine.all_gather(100, FLAT, measured) == plain.all_gather(100, FLAT, LINKS)
    assert engine.reduce_scatter(100, FLAT, measured) == plain.reduce_scatter(100, FLAT, LINKS)


@pytest.mark.parametrize("slots", [1, 2])
def test_gathers_between_nodes_take_the_time_of_measured_ones(slots: int) -> None:
    """Twice as long as the line at 3,000 bytes through a port, then longer by less."""
    peers, plain = Topology(4, 1), engines.of(LINKS)
    line = [plain.all_gather(sent / 3, peers, LINKS) for sent in (30, 3000)]
    gathers = ((30.0, line[0]), (3000.0, 2 * line[1]))
    measured = LINKS._replace(calibration=Calibration(nodes=4, gathers=gathers))
    engine = engines.of(measured)
    shared = engine.shared_port(measured, slots)
    for own, factor in ((10 / slots, 1), (1000 / slots, 2), (4000 / slots, 2)):
        price = plain.all_gather(own, peers, plain.shared_port(LINKS, slots))
        assert engine.all_gather(own, peers, shared) == pytest.approx(factor * price)
    between = engine.all_gather(500 / slots, peers, shared)
    assert 1.4 < between / plain.all_gather(500 / slots, peers, shared) < 1.6
    assert engine.all_to_all(1e6, peers, shared) == 2 * plain.all_to_all(1e6, peers, shared)
    # Inside a node, of another number of nodes, and of allreduces, nothing was measured
    for other in (Topology(1, 4), Topology(3, 1)):
        assert engine.all_gather(1000, other, shared) == plain.all_gather(1000, other, shared)
    assert engine.all_reduce(1000, peers, measured) == plain.all_reduce(1000, peers, LINKS)


def test_a_calibration_does_not_fall_and_is_kept_with_the_links() -> None:
    """A disturbed time of a short vector falls to a longer one's; negative times become 0."""
    curve = Calibration(4, not_falling([(64, -1e-6), (1024, 9e-4), (4096, 1e-4), (65536, 3e-4)]))
    assert curve.points == ((64, 0.0), (1024, 1e-4), (4096, 1e-4), (65536, 3e-4))
    curve = dataclasses.replace(curve, nodes=2, gathers=((3.0, 1e-4),))
    links = NOMINAL._replace(calibration=curve)
    assert Links.from_dict(json.loads(json.dumps(links.to_dict()))) == links
    with pytest.raises(ConfigurationError, match=r"\(4096, 0\.0001\)"):
        Calibration(4, ((1024, 2e-4), (4096, 1e-4)))
    with pytest.raises(ConfigurationError, match=r"\(1024, 0\.0003\)"):
        Calibration(4, ((4096, 2e-4), (1024, 3e-4)))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"ranks": 1, "points": [(64, 1e-4)]}, "ranks"),
        ({"points": [(64, 1e-4)]}, "ranks"),
        ({"nodes": 1, "gathers": [(64.0, 1e-4)]}, "nodes"),
        ({"gathers": [(64.0, 1e-4)]}, "nodes"),
        ({"nodes": 2, "gathers": [(0.0, 1e-4)]}, "sizes > 0"),
    ],
)
def test_a_file_with_times_of_no_group_is_refused_by_name(
    fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """Of one node, the engine's prices would divide by zero; of no ranks, nothing used them."""
    file = tmp_path / "links.json"
    file.write_text(json.dumps({"links": {**NOMINAL.to_dict(), "calibration": fields}}))
    with pytest.raises(DataError, match=rf"(?s){file}.*{named}"):
        Links.read(file)
