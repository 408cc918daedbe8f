"""Prices against cases worked out by hand, with links of round numbers.

docs/explanation/routes.md derives the formulas.
"""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from launching import ROOT

from tfcommx import routes
from tfcommx.core import (
    NOMINAL,
    Bucket,
    ConfigurationError,
    Link,
    Links,
    Scheme,
    Topology,
    Traffic,
    cost,
)
from tfcommx.planner.plan import Gradient, make_plan
from tfcommx.routes.hitopk import HitopkOptions
from tfcommx.routes.messages import WINDOW, MessageOptions, Transfer
from tfcommx.routes.torus import TorusOptions

LINK = Link(alpha_s=10, beta_s_per_byte=2, gamma_s_per_byte=1)
LINKS = Links(inside=Link(1, 0.5, 0.25), between=LINK)
FOUR = Topology(4, 1)
HITOPK = routes.get("hitopk")


def bucket(
    route: str,
    entries: int = 250,
    peer_route: str = "allreduce",
    block: int = 49152,
    **more: object,
) -> Bucket:
    scheme = Scheme(peer_route=peer_route, block_bytes=block)
    options = routes.get(route).options(scheme, NOMINAL)
    return Bucket("b", ("w",), (entries,), "float32", route, options=options, **more)


@pytest.mark.parametrize(
    ("price", "broadcast", "reduce", "allreduce"),
    [
        # Table 1, p = 4, n = 1000 B; the pipeline's 3 + 10 blocks of 100 B: latency 130, 1300 B
        (
            lambda *a: cost.linear_pipeline(*a, block_bytes=100),
            130 + 1300 * 2,
            130 + 1300 * 3,
            2 * 130 + 1300 * 5,
        ),
        (cost.spanning_tree, 2 * (10 + 2000), 2 * (10 + 2000 + 1000), 2 * (20 + 4000 + 1000)),
        (
            cost.bidirectional_exchange,
            (2 + 3) * 10 + 2 * 750 * 2,
            2 * 2 * 10 + 3000 + 750,
            2 * 2 * 10 + 3000 + 750,
        ),
    ],
)
def test_table_1(price: object, broadcast: float, reduce: float, allreduce: float) -> None:
    found = [price(operation, 1000, 4, LINK) for operation in ("broadcast", "reduce", "allreduce")]
    assert found == pytest.approx([broadcast, reduce, allreduce])


def test_five_ranks_need_three_rounds() -> None:
    """The ceiling of log2 p, which the paper omits "for simplicity"."""
    assert cost.spanning_tree("broadcast", 1000, 5, LINK) == 3 * (10 + 2000)
    share = 800 * (2 * 2 + 1)
    assert cost.bidirectional_exchange("reduce", 1000, 5, LINK) == 2 * 3 * 10 + share


@pytest.mark.parametrize(("ranks", "share", "steps"), [(3, 1 / 2, 4), (5, 3 / 4, 6), (6, 3 / 4, 6)])
def test_an_exchange_of_other_than_a_power_of_two_pays_for_two_whole_messages(
    ranks: int, share: float, steps: int
) -> None:
    """Of 5 positions one adds its vector to another's; 4 swap; it receives the result."""
    one, topology = bucket("bidirectional"), Topology(ranks, 1)
    seconds = routes.of(one).seconds(one, topology, LINKS)
    assert seconds == pytest.approx(steps * 10 + (1 + share) * 1000 * (2 * 2 + 1))


def test_in_an_exchange_between_nodes_all_slots_share_the_port() -> None:
    """1000 B on 4 nodes of 2: a half and a quarter of two slots pass a port, an eighth stays."""
    one, topology = bucket("bidirectional"), Topology(4, 2)
    seconds = routes.of(one).seconds(one, topology, LINKS)
    port_s = routes.of(one).port_bytes(one, topology) * LINK.beta_s_per_byte
    assert port_s == pytest.approx(2 * (500 + 250) * 2 * 2, rel=0.01)
    inside = 2 * 1 + 125 * (2 * 0.5 + 0.25)
    assert seconds == pytest.approx(4 * 10 + 2 * (500 + 250) * 2 * 2 + 750 * 1 + inside)


@pytest.mark.parametrize(
    ("topology", "between", "inside"),
    [
        (Topology(4, 2), 2, 1),
        (Topology(2, 4), 1, 2),
        # Ranks 2 and 3 are a pair of the round of distance 1
        (Topology(2, 3), 3, 0),
        (Topology(2, 3, (("red", 3), ("blue", 1))), 2, 0),
        (Topology(1, 5), 0, 3),
    ],
)
def test_rounds_of_a_tree_inside_a_node_take_the_link_inside(
    topology: Topology, between: int, inside: int
) -> None:
    """1000 B are added on the way to the root, and the sum is returned."""
    seconds = routes.get("tree").seconds(bucket("tree"), topology, LINKS)
    assert seconds == between * (20 + 4000 + 1000) + inside * (2 + 1000 + 250)


@pytest.mark.parametrize(
    ("route", "seconds"),
    [
        ("allreduce", 2 * 3 * 10 + 2 * 750 * 2 + 750 * 1),
        # 2.5 groups of 4 blocks of 100 B; the first one hops alone
        ("pipeline", 3 * (2.5 * (2 * 200 + 100) + 2 * (10 + 200))),
        ("tree", 2 * (20 + 4000 + 1000)),
        ("bidirectional", 40 + 3000 + 750),
        ("asa", 30 + 750 * 2 + 750 * 1 + (2 * 10 + 750 * 2)),
    ],
)
def test_dense_routes_on_four_nodes(route: str, seconds: float) -> None:
    assert routes.get(route).seconds(bucket(route, block=100), FOUR, LINKS) == pytest.approx(
        seconds
    )


@pytest.mark.parametrize(
    ("route", "topology", "megabytes", "more"),
    [
        # A ring over 8 ranks, 2 * 7/8 of the vector on each line
        ("allreduce", Topology(4, 2), 1.75, {}),
        ("torus", Topology(4, 2), 1.5, {}),
        ("torus", Topology(4, 2), 1.5, {"peer_route": "pipeline"}),
        ("torus", Topology(4, 2), 2, {"peer_route": "tree"}),
        ("pipeline", Topology(2, 1), 1, {}),
        ("pipeline", Topology(4, 1), 1.5, {}),
        ("pipeline", Topology(8, 1), 1.75, {}),
        ("tree", Topology(4, 1), 2, {}),  # the root sends the vector twice
        ("tree", Topology(8, 1), 3, {}),
        ("bidirectional", Topology(8, 1), 1.75, {}),
        # The ring's line from node to node carries 7 of 8 buffers
        ("allgather", Topology(4, 2), 7 * 0.08, {"k": 10_000, "wire": "pair32"}),
        ("hitopk", Topology(4, 2), 3 * 2 * 0.04, {"k": 5_000, "wire": "pair32"}),
    ],
)
def test_what_the_busiest_port_carries(
    route: str, topology: Topology, megabytes: float, more: dict
) -> None:
    """1 MB of float32 in 16 blocks."""
    one = bucket(route, 250_000, block=62_500, **more)
    assert routes.get(route).port_bytes(one, topology) == pytest.approx(megabytes * 1e6)


@pytest.mark.parametrize("route", routes.ROUTES)
@pytest.mark.parametrize("topology", [(3, 1), (6, 1), (2, 2), (3, 2), (2, 5), (4, 8)])
def test_no_price_is_below_the_time_of_the_busiest_port(
    route: str, topology: tuple[int, int]
) -> None:
    """Without latencies and additions, and with links inside a node that are much faster."""
    of, cluster = routes.get(route), Topology(*topology)
    links = Links(Link(0, 1e-12), Link(0, 1e-9))
    sparse = {"k": 1000, "wire": "pair32"} if route in routes.SPARSE else {}
    one = bucket(route, 96_000, **sparse)
    assert of.seconds(one, cluster, links) >= 0.99 * 1e-9 * of.port_bytes(one, cluster)


def test_the_busiest_port_is_that_of_the_root() -> None:
    """Of 4 nodes: in a tree 2 send it 1000 B each; in a star it sends 1000 B to 3."""
    options = MessageOptions(block_bytes=100, collective="reduce")
    reduce = dataclasses.replace(bucket("tree"), options=options)
    assert routes.get("tree").port_bytes(reduce, FOUR) == 2000

    def star(*_: object) -> list[Transfer]:
        return [Transfer(0, 0, target, 0, 250, False) for target in (1, 2, 3)]

    route = dataclasses.replace(routes.get("tree"), schedule=star)
    assert route.port_bytes(bucket("tree"), FOUR) == 3000


def test_a_route_of_one_level_uses_the_links_between_nodes_if_there_are_several() -> None:
    for topology, port in ((Topology(1, 4), "inside"), (Topology(2, 2), "between")):
        (stage,) = routes.get("allreduce").stages(bucket("allreduce"), topology, LINKS)
        assert stage == (
            port,
            routes.get("allreduce").seconds(bucket("allreduce"), topology, LINKS),
        )


@pytest.mark.parametrize(
    ("options", "bad"),
    [
        (HitopkOptions, {"last_step": "sparse"}),
        (TorusOptions, {"peer_route": "asa"}),
        (MessageOptions, {"block_bytes": 8, "collective": "broadcast"}),
        (MessageOptions, {"block_bytes": 7}),
    ],
)
def test_options_of_routes_are_checked_when_they_are_made(options: type, bad: dict) -> None:
    with pytest.raises(ConfigurationError, match=str([*bad.values()][-1])):
        options(**bad)


def test_a_compression_takes_its_passes_and_those_of_error_feedback() -> None:
    """4 and 9 over 1000 B; then two sums of 10 + 25 entries by rank 1 run one after the other."""
    one = bucket("allreduce", compression="powersgd/1", shapes=((10, 25),))
    computes, *sums = routes.of(one).stages(one, FOUR, LINKS)
    assert computes == ("select", 13 * 1000 * 0.25)
    expected = [
        routes.get("allreduce").seconds(bucket("allreduce", n), FOUR, LINKS) for n in (10, 25)
    ]
    assert [stage.seconds for stage in sums] == expected
    assert routes.of(one).seconds(one, FOUR, LINKS) == sum(expected)


def test_asa_in_sixteen_bits_halves_what_travels_and_not_what_is_added() -> None:
    assert routes.get("asa").seconds(bucket("asa", wire="float16"), FOUR, LINKS) == pytest.approx(
        30 + 750 + 750 + 20 + 750
    )
    assert routes.get("asa").wire_bytes(bucket("asa", wire="float16"), FOUR) == Traffic(0, 750)
    assert routes.get("asa").wire_bytes(bucket("asa"), FOUR) == Traffic(0, 1500)


def test_allreduce_in_sixteen_bits_halves_what_travels_and_not_what_is_added() -> None:
    half = bucket("allreduce", wire="float16")
    route = routes.get("allreduce")
    assert route.seconds(half, FOUR, LINKS) == pytest.approx(60 + 2 * 375 * 2 + 750)
    assert route.wire_bytes(half, FOUR) == Traffic(0, 750)
    both = [route.wire_bytes(one, Topology(4, 2)) for one in (half, bucket("allreduce"))]
    assert both[0] == Traffic(*(amount / 2 for amount in both[1]))


def test_torus_in_sixteen_bits_halves_what_leaves_the_node() -> None:
    """1000 B on 4 nodes of 2: 500 B of float32 are scattered inside, 250 B of 16 bits gathered.

    Each slot's 250 B of 16 bits go to 4 peers and come back: 3/4 each way, and through the port 2
    slots' at once.
    """
    half, route = bucket("torus", wire="bfloat16"), routes.get("torus")
    assert route.wire_bytes(half, Topology(4, 2)) == Traffic(500 + 250, 375)
    assert route.wire_bytes(bucket("torus"), Topology(4, 2)) == Traffic(1000, 750)
    assert route.port_bytes(half, Topology(4, 2)) == 750
    scatter, peers, gather = route.stages(half, Topology(4, 2), LINKS)
    assert scatter.seconds == pytest.approx(1 + 500 * (0.5 + 0.25))
    slot = 30 + 2 * 187.5 * 2 + 375 * 1 + 2 * 10 + 2 * 187.5 * 2
    by_the_engine = route.stages(bucket("torus", wire="float16"), Topology(4, 2), LINKS)[1]
    assert by_the_engine.seconds == pytest.approx(2 * 3 * 10 + 2 * 2 * 187.5 * 2 + 375 * 1)
    assert peers.seconds == pytest.approx(slot)
    assert gather.seconds == pytest.approx(1 + 250 * 0.5)


def test_asa_in_one_bit_sends_whole_blocks_and_their_steps() -> None:
    """1000 entries on 4 ranks: a shard of 250 has a block, one word of its step and 16 of codes.

    Additions are in float32, 3000 B of 4000; codes take 1.5 passes to write and 1 to read.
    """
    few, route = bucket("asa", 1000, wire="int1"), routes.get("asa")
    assert route.wire_bytes(few, FOUR) == Traffic(0, 2 * 3 * 68)
    assert route.seconds(few, FOUR, LINKS) == pytest.approx(30 + 2 * 204 * 2 + 20 + 3000 + 10000)


def test_torus_in_four_bits_gathers_codes_in_the_node() -> None:
    """1000 entries on 4 nodes of 2: 8 shards of 125, each half a word of steps and 16 of codes.

    Half of the entries are other slots', whose codes are read besides.
    """
    few, route = bucket("torus", 1000, wire="int4"), routes.get("torus")
    shard = 4 * (1 + 16)
    assert route.wire_bytes(few, Topology(4, 2)) == Traffic(2000 + 4 * shard, 2 * 3 * shard)
    scatter, _, gather = route.stages(few, Topology(4, 2), LINKS)
    assert scatter.seconds == pytest.approx(1 + 2000 * (0.5 + 0.25))
    assert gather.seconds == pytest.approx(1 + 4 * shard * 0.5 + 2000 * 0.25)


@pytest.mark.parametrize(("nodes", "slots"), [(2, 2), (4, 1), (8, 1), (16, 8), (64, 8)])
def test_codes_are_as_few_bytes_on_any_number_of_nodes(nodes: int, slots: int) -> None:
    """As a share of plain Horovod's bytes between nodes, for 25 million entries."""
    topology = Topology(nodes, slots)

    def between(scheme: Scheme) -> float:
        plan = make_plan([Gradient("w", (25 * 10**6,), "float32")], {"*": scheme}, topology)
        return sum(routes.of(one).wire_bytes(one, topology).between for one in plan.buckets)

    for wire, most in (("int8", 0.255), ("int4", 0.13), ("int2", 0.067), ("int1", 0.036)):
        assert between(Scheme("torus", wire=wire)) <= most * between(Scheme())


GUIDE = (ROOT / "docs" / "how-to" / "choose-a-scheme.md").read_text()


@pytest.mark.parametrize("row", re.findall(r"^\| (\d+) x (\d+) \| (.*) \|$", GUIDE, re.MULTILINE))
def test_the_guide_has_the_bytes_by_number_of_nodes(row: tuple[str, str, str]) -> None:
    """Of a matrix of 25 million entries: vectors would stay dense."""
    nodes, slots, told = row
    topology = Topology(int(nodes), int(slots))

    def between(scheme: Scheme) -> float:
        plan = make_plan([Gradient("w", (5000, 5000), "float32")], {"*": scheme}, topology)
        return sum(routes.of(one).wire_bytes(one, topology).between for one in plan.buckets)

    schemes = [
        *(Scheme("torus", wire=wire) for wire in ("float16", "int8", "int4")),
        Scheme("hitopk", "mstopk", 0.1, wire="elias/int4"),
        Scheme("hitopk", "mstopk", 0.01, wire="elias/int8"),
    ]
    shares = [100 * between(scheme) / between(Scheme()) for scheme in schemes]
    assert told == " | ".join(f"{share:.1f}" for share in shares)


def test_asa_between_nodes_of_two() -> None:
    """4 ranks on 2 nodes: of a rank's 3 shards of 250 B one stays in the node.

    All its gathered ones stay, except those of one port.
    """
    assert routes.get("asa").wire_bytes(bucket("asa"), Topology(2, 2)) == Traffic(
        250 + 375, 500 + 375
    )


def test_alltoall_on_unequal_nodes_is_a_mean() -> None:
    """Hosts of 2 and 1 ranks, each sends half to each other: 1/2, 1/2 and 0 stay."""
    mean = cost.alltoall_traffic(600, "world", Topology(2, 2, (("red", 2), ("blue", 1))))
    assert mean == pytest.approx(Traffic(200, 400))


@pytest.mark.parametrize(
    ("route", "wire", "zeros"),
    [
        ("allreduce", "float16", 0),
        ("hitopk", "pair32", 1),
        ("torus", "plain", 1),
        ("torus", "int4", 7),
        ("asa", "plain", 7),
    ],
)
def test_a_vector_is_padded_to_equal_shards_and_no_further(
    route: str, wire: str, zeros: int
) -> None:
    """9 entries; peers also cut the shard of a slot in fewer bits: 8 shards."""
    assert routes.get(route).padding(9, wire, Topology(4, 2)) == zeros


@pytest.mark.parametrize("route", routes.ROUTES)
def test_one_rank_alone_pays_for_no_message(route: str) -> None:
    one = bucket(route, k=5 if route in routes.SPARSE else None, wire=routes.get(route).wires[0])
    alone = routes.get(route).seconds(one, Topology(1, 1), Links(Link(1e9, 1e9), Link(1e9, 1e9)))
    assert alone == 0 and routes.get(route).wire_bytes(one, Topology(1, 1)) == Traffic(0, 0)


def test_equation_3() -> None:
    """alpha log P + 4 (P - 1) beta k, once for values and once for indices.

    P = 4, k = 20, one collective for both.
    """
    assert (
        routes.get("allgather").seconds(bucket("allgather", k=20, wire="pair32"), FOUR, LINKS)
        == 2 * 10 + 8 * 3 * 2 * 20
    )


def test_equations_7_to_10() -> None:
    """m = 2, n = 2, d = 200, k = rho d / n = 10 pairs of 8 B.

    With gamma for the additions, which the paper does not count.
    """
    b = bucket("hitopk", 200, k=10, wire="pair32")
    t1 = (2 - 1) * 1 + 400 * (0.5 + 0.25)
    t2 = 400 * 0.25
    t3 = 10 * 1 + (2 - 1) * 2 * 80 * 2  # both slots of a node go through its port
    dense, pairs = 1 * 1 + 400 * 0.5 + 160 * 0.25, 1 * 1 + 160 * 0.5 + 2 * 160 * 0.25
    assert HITOPK.seconds(b, Topology(2, 2), LINKS) == pytest.approx(t1 + t2 + t3 + dense)
    cheapest = HITOPK.cheapest(b, Topology(2, 2), LINKS)
    assert cheapest.options.last_step == "pairs"
    assert HITOPK.seconds(cheapest, Topology(2, 2), LINKS) == pytest.approx(t1 + t2 + t3 + pairs)


@pytest.mark.parametrize(
    ("density", "nodes", "last_step"),
    [
        (0.01, 4, "pairs"),
        (0.1, 4, "pairs"),
        (0.2, 4, "dense"),
        (0.01, 64, "dense"),
    ],
)
def test_the_last_step_is_planned_by_price(density: float, nodes: int, last_step: str) -> None:
    """8 m k bytes of pairs against 4 d / n of the shard: with more nodes come more pairs."""
    plan = make_plan(
        [Gradient("w", (1000, 1000), "float32")],
        {"*": Scheme("hitopk", "mstopk", density)},
        Topology(nodes, 8),
    )
    assert [b.options.last_step for b in plan.buckets] == [last_step]


def test_the_last_step_follows_the_links_given() -> None:
    # Merging n shards costs more than sending one here
    slow_sums = Links(Link(1e-6, 1e-10, 1e-8), NOMINAL.between)
    gradients = [Gradient("w", (1000, 1000), "float32")]
    plan = make_plan(
        gradients, {"*": Scheme("hitopk", "mstopk", 0.01)}, Topology(4, 8), links=slow_sums
    )
    assert plan.buckets[0].options.last_step == "dense"


def test_the_proposition() -> None:
    """Proposition 1: without latency the pipeline is the fastest for a long message, for all p.

    It is log2 p times faster than the tree, and up to 2 times faster than bidirectional exchange.
    """
    fast = Link(0, 1e-9)
    for ranks in (4, 8, 16):
        pipeline, tree, both = (
            price("broadcast", 1e9, ranks, fast)
            for price in (cost.linear_pipeline, cost.spanning_tree, cost.bidirectional_exchange)
        )
        assert tree / pipeline == pytest.approx(ranks.bit_length() - 1, rel=0.01)
        assert both / pipeline == pytest.approx(2 * (ranks - 1) / ranks, rel=0.01)


def test_in_table_1_an_allreduce_is_as_long_on_any_number_of_ranks_but_not_the_fastest() -> None:
    """2 n beta by the pipeline, whose one chain sends each block up and down; ours sends less."""
    fast = Link(0, 1e-9)
    for ranks in (2, 3, 8, 20):
        pipeline, both = (
            price("allreduce", 1e9, ranks, fast)
            for price in (cost.linear_pipeline, cost.bidirectional_exchange)
        )
        assert pipeline == pytest.approx(2, rel=0.002)
        assert both / pipeline == pytest.approx((ranks - 1) / ranks, rel=0.002)
    links = Links(fast, fast)
    on_2, on_4, on_8 = (
        routes.get("pipeline").seconds(bucket("pipeline", 250 * 10**6), Topology(nodes, 1), links)
        for nodes in (2, 4, 8)
    )
    assert on_2 == pytest.approx(1, rel=0.002)
    assert (on_8 / on_2, on_8 / on_4) == pytest.approx((1.75, 1.75 / 1.5), rel=0.002)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_blocks_of_the_pipeline_are_shortest_where_the_page_says(ranks: int) -> None:
    """Of table 1's broadcast sqrt(n alpha / ((p - 1) beta)), of our allreduce alpha / (w beta)."""
    link, total = NOMINAL.between, 100 * 10**6
    links = Links(link, dataclasses.replace(link, gamma_s_per_byte=0.0))

    def table(block: float) -> float:
        return cost.linear_pipeline("broadcast", total, ranks, link, block)

    def ours(block: float) -> float:
        one = bucket("pipeline", total // 4, block=round(block))
        return routes.get("pipeline").seconds(one, Topology(ranks, 1), links)

    best = math.sqrt(total * link.alpha_s / ((ranks - 1) * link.beta_s_per_byte))
    assert ranks != 4 or best == pytest.approx(1.44e6, rel=0.01)
    hidden = math.ceil(link.alpha_s / (WINDOW * link.beta_s_per_byte))
    for seconds, block in ((table, best), (ours, hidden)):
        assert all(seconds(block) < seconds(block * factor) for factor in (0.8, 0.98, 1.02, 1.25))


@pytest.mark.parametrize(
    ("route", "more"), [("pipeline", 1), ("tree", 1), ("bidirectional", 4 / 3)]
)
def test_bytes_of_a_reduce_and_a_broadcast_over_those_of_an_allreduce(
    route: str, more: float
) -> None:
    """Strategy "root" on 4 nodes. Halving and a gather send n/2 log2 p more than n (p - 1)."""
    one, chosen = bucket(route, 1024, block=256), routes.get(route)
    reduces = dataclasses.replace(
        one, options=dataclasses.replace(one.options, collective="reduce")
    )
    sent = chosen.wire_bytes(reduces, FOUR).between
    sent += chosen._traffic("broadcast", reduces, FOUR).between
    assert sent == pytest.approx(more * chosen.wire_bytes(one, FOUR).between)


@pytest.mark.parametrize(
    ("route", "price"),
    [
        # 41 blocks of 100 B pass twice, after 3 hops each way
        ("pipeline", 41 * (2 * 200 + 100) + 2 * 3 * (10 + 200)),
        ("tree", 2 * (20 + 2 * 4100 * 2 + 4100)),
        # Halving, gather, scatter and doubling: 3/4 of the vector each, and 2 messages
        ("bidirectional", 80 + 4 * 3075 * 2 + 3075),
    ],
)
def test_a_reduce_is_priced_with_the_broadcast_after_it(route: str, price: float) -> None:
    one, chosen = bucket(route, 1025, block=100), routes.get(route)
    options = dataclasses.replace(one.options, collective="reduce")
    reduces = dataclasses.replace(one, options=options)
    assert chosen.seconds(reduces, FOUR, LINKS) == pytest.approx(price)
