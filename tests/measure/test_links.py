"""The fit finds the links that made the times, and all ranks agree on it."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from launching import horovodrun

import tfcommx
from tfcommx.cli import probe
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.threads import ThreadComm
from tfcommx.core import (
    NOMINAL,
    Calibration,
    ConfigurationError,
    DataError,
    Link,
    Links,
    PlanError,
    Scheme,
    Topology,
)
from tfcommx.core.links import fit
from tfcommx.measure import engine, links
from tfcommx.measure.engine import (
    WAITING,
    EngineCost,
    calibrate,
    engine_fuses,
    latency_terms,
    measure_contention,
    measure_engine,
    sends_messages,
)
from tfcommx.planner.plan import Gradient, make_plan

# Of the engine for each collective
ENGINE_S = 3e-4


def times_of(link: Link, ranks: int = 4, noise: float = 0.0) -> list[tuple[float, float, float]]:
    numbers = np.random.default_rng(1)
    return [
        (
            ranks - 1.0,
            (ranks - 1.0) * size,
            (ranks - 1)
            * (link.alpha_s + size * link.beta_s_per_byte)
            * (1 + noise * numbers.random()),
        )
        for size in links.SIZES
    ]


@pytest.mark.parametrize("link", [NOMINAL.inside, NOMINAL.between, Link(1e-3, 4e-8)])
def test_the_fit_finds_the_link(link: Link) -> None:
    alpha, beta = fit(times_of(link))
    assert (alpha, beta) == pytest.approx((link.alpha_s, link.beta_s_per_byte), rel=1e-6)


def test_noise_of_a_tenth_moves_the_fit_by_about_a_tenth() -> None:
    """Also of alpha, a ten-thousandth of the largest message's time."""
    link = Link(5e-5, 8e-9)
    alpha, beta = fit(times_of(link, noise=0.1))
    assert alpha == pytest.approx(link.alpha_s, rel=0.15) and beta == pytest.approx(
        link.beta_s_per_byte, rel=0.15
    )


def test_a_link_is_never_free_nor_ahead_of_time() -> None:
    # A line through these starts before 0
    assert fit([(1, 1000, 1e-3), (1, 2000, 3e-3)])[0] == 0
    assert fit([(1, 1000, 1e-3), (1, 2000, 0.5e-3)])[1] > 0


@pytest.mark.parametrize("points", [[], [(1, 1000, 1.0)], [(1, 1000, 0.0), (1, 2000, 1.0)]])
def test_what_cannot_be_fitted_is_refused(points: list) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(str(points))):
        fit(points)


@pytest.mark.parametrize(
    ("topology", "measured"),
    [
        (Topology(2, 2), {"inside", "between"}),
        (Topology(3, 1), {"between"}),
        (Topology(1, 2), {"inside"}),
        (Topology(1, 1), set()),
    ],
)
@pytest.mark.parametrize("messages", [True, False])
def test_all_ranks_agree_and_links_that_are_not_there_stay_nominal(
    topology: Topology, measured: set[str], messages: bool
) -> None:
    def work(comm: Comm) -> links.ProbeResult:
        if not messages:
            comm.messages._make = None
        return links.probe(comm, sizes=(1024, 65536), repeats=2, blocks=(1024, 4096))

    results = ThreadComm.run(topology, work)
    assert all(result == results[0] for result in results)
    assert {kind for kind, points in results[0].points.items() if points} == measured
    assert {
        kind
        for kind in ("inside", "between")
        if getattr(results[0].links, kind) != getattr(NOMINAL, kind)
    } == measured
    assert Links.from_dict(json.loads(results[0].to_json())["links"]) == results[0].links
    assert [block for block, _ in results[0].blocks] == (
        [1024, 4096] if messages and topology.size > 1 else []
    )
    fastest = (
        min(results[0].blocks, key=lambda row: row[1])[0]
        if results[0].blocks
        else NOMINAL.block_bytes
    )
    assert results[0].links.block_bytes == fastest


@pytest.mark.parametrize("messages", [True, False])
def test_what_measures_is_no_traffic_of_the_training(messages: bool) -> None:
    def work(comm: Comm) -> tuple[float, float]:
        if not messages:
            comm.messages._make = None
        links.probe(comm, sizes=(1024, 65536), repeats=2, blocks=())
        return comm.traffic()

    assert ThreadComm.run(Topology(2, 2), work) == [(0, 0)] * 4


def test_the_slots_of_a_node_share_its_port() -> None:
    """The clock counts bytes through the port, latency terms, and the engine's own time.

    So the fit finds the beta of the port, and not a slot's share of it, and separates the rest.
    One repeat of three is twice as fast, and does not count.
    """
    clocks: dict[int, float] = {}
    fast = range(engine.MOST, 2 * engine.MOST)  # The first one opens connections

    def work(comm: Comm) -> links.ProbeResult:
        comm.messages._make = None
        gather, allreduce, calls = comm.all_gather, comm.allreduce, Counter()
        clocks[comm.rank] = 0.0

        def timed(tensor: object, group: str, name: str, **more: object) -> object:
            bytes_in = (len(comm.members(group)) - 1) * 4 * len(tensor)
            seconds = (
                ENGINE_S
                + 1e-4
                + (bytes_in * comm.topology.slots * 8e-9 if group == "peers" else bytes_in * 1e-10)
            )
            is_fast = name == "tfcommx/probe/peers/65536" and calls[name] in fast
            calls[name] += 1
            clocks[comm.rank] += seconds / 2 if is_fast else seconds
            return gather(tensor, group, name, **more)

        def timed_sum(tensor: object, group: str, name: str, **more: Any) -> object:
            clocks[comm.rank] += ENGINE_S + 2 * 1e-4
            return allreduce(tensor, group, name, **more)

        comm.all_gather, comm.allreduce = timed, timed_sum
        return links.probe(comm, sizes=(1024, 65536), repeats=3, clock=lambda: clocks[comm.rank])

    found = ThreadComm.run(Topology(2, 2), work)[0].links
    assert found.between.beta_s_per_byte == pytest.approx(
        8e-9
    ) and found.inside.beta_s_per_byte == pytest.approx(1e-10)
    assert found.between.alpha_s == pytest.approx(1e-4, rel=0.01)
    assert found.engine_s == pytest.approx(ENGINE_S, rel=0.01)


@pytest.mark.parametrize("messages", [True, False])
def test_the_probe_measures_what_the_engine_at_work_takes_for_short_allreduces(
    messages: bool,
) -> None:
    """The clock counts 1 ms for each allreduce of all ranks, and 2 ms of 64 KiB."""
    clocks: dict[int, float] = {}

    def work(comm: Comm) -> links.ProbeResult:
        if not messages:
            comm.messages._make = None
        allreduce, clocks[comm.rank] = comm.allreduce, 0.0

        def timed(tensor: object, group: str, name: str, **more: object) -> object:
            if group == "world":
                clocks[comm.rank] += 2e-3 if len(tensor) == 16384 else 1e-3
            return allreduce(tensor, group, name, **more)

        def clock() -> float:
            clocks[comm.rank] += 1e-6  # Nothing takes no time
            return clocks[comm.rank]

        comm.allreduce = timed
        return links.probe(comm, sizes=(1024, 65536), repeats=1, clock=clock)

    found = ThreadComm.run(Topology(2, 2), work)[0].links
    assert found.engine.name == ("open_mpi" if messages else "gloo")
    sizes, seconds = zip(*found.calibration.points, strict=True)
    assert (found.calibration.ranks, sizes) == (4, (1024, 16384, 65536))
    assert seconds == pytest.approx((1e-3, 1e-3, 2e-3), rel=0.01)
    # With messages, they stand for all-gathers
    gathered = () if messages else sizes
    assert tuple(size for size, _ in found.calibration.gathers) == gathered


@pytest.mark.extended
def test_links_of_nccl_are_measured_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages between hosts stood for NCCL's links if the launch had MPI.

    The clock counts the time of gathers and sums; messages, which are possible, may not be sent.
    Each result is waited for, because a collective of a GPU may return when it is only queued.
    """
    clocks: dict[int, float] = {}
    waited: list[Any] = []
    carried: list[str] = []
    monkeypatch.setattr(engine, "where_carried", lambda comm: carried.append("") or "/cpu:0")
    monkeypatch.setattr(links, "where_carried", lambda comm: carried.append("") or "/cpu:0")
    monkeypatch.setattr(links, "finish", waited.append)

    def work(comm: Comm) -> links.ProbeResult:
        comm.by_nccl, clocks[comm.rank] = True, 0.0
        comm.messages.open_own = lambda **_: pytest.fail("a message")
        gather, allreduce = comm.all_gather, comm.allreduce

        def timed(tensor: tf.Tensor, group: str, name: str, **more: Any) -> tf.Tensor:
            ranks = len(comm.members(group))
            beta = comm.topology.slots * 8e-9 if group == "peers" else 1e-10
            clocks[comm.rank] += ENGINE_S + (ranks - 1) * (1e-4 + 4 * len(tensor) * beta)
            return gather(tensor, group, name, **more)

        def timed_sum(tensor: tf.Tensor, group: str, name: str, **more: Any) -> tf.Tensor:
            terms = latency_terms("nccl", len(comm.members(group)), group)
            clocks[comm.rank] += ENGINE_S + terms * 1e-4
            return allreduce(tensor, group, name, **more)

        comm.all_gather, comm.allreduce = timed, timed_sum
        return links.probe(
            comm, sizes=(1024, 65536), repeats=2, blocks=(), clock=lambda: clocks[comm.rank]
        )

    result = ThreadComm.run(Topology(4, 2), work)[0]
    found = result.links
    assert result.by_engine and found.engine.name == "nccl"
    assert found.between.beta_s_per_byte == pytest.approx(8e-9)
    assert found.inside.beta_s_per_byte == pytest.approx(1e-10)
    assert found.between.alpha_s == pytest.approx(1e-4, rel=0.02)
    assert found.engine_s == pytest.approx(ENGINE_S, rel=0.03)
    assert carried and waited and all(isinstance(one, tf.Tensor) for one in waited)


def test_trees_of_as_many_terms_as_an_all_gather_do_not_tell_latency() -> None:
    """NCCL's tree of three nodes has two terms, as its ring of an all-gather: no difference."""

    def work(comm: ThreadComm) -> EngineCost:
        comm.by_nccl = True
        comm.all_gather = comm.allreduce = lambda *given, **more: None
        return measure_engine(comm, "peers", 1e-4, lambda work: [work(), 2e-2][1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "where_carried", lambda comm: "/cpu:0")
        found = ThreadComm.run(Topology(3, 1), work)[0]
    assert (found.alpha_s, found.seconds) == (0.0, [2e-3])


@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("messages", [True, False])
def test_the_engine_is_nccl_only_if_it_carries_the_collectives(nccl: bool, messages: bool) -> None:
    """A Horovod without NCCL was taken for one with it on any machine with a GPU."""

    def work(comm: ThreadComm) -> tuple[str, bool, str]:
        comm.by_nccl = nccl
        if not messages:
            comm.messages._make = None
        return engine.engine_at_work(comm), sends_messages(comm), engine.where_carried(comm)

    found = ThreadComm.run(Topology(2, 1), work)[0]
    on_host = ("open_mpi" if messages else "gloo", messages, "/cpu:0")
    assert found == (("nccl", False, "/gpu:0") if nccl else on_host)


def test_results_that_are_not_in_the_hosts_memory_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[Any] = []
    reshape = tf.reshape
    monkeypatch.setattr(tf, "reshape", lambda part, to: read.append(part) or reshape(part, to))
    result = [tf.ones([3]), (tf.zeros([2, 2]), None, 7)]
    engine.finish(result)
    assert not read
    monkeypatch.setattr(engine, "_in_host_memory", lambda part: False)
    engine.finish(result)
    assert [part.shape for part in read] == [[3], [2, 2]]


def test_single_all_gathers_among_peers_are_measured() -> None:
    """Each byte through a port takes 1 us in an allreduce, and 2 us in an all-gather of 32 bytes.

    4 bytes from each of 2 slots go to 3 other nodes, so that nothing is smaller than 24 bytes.
    """
    sent: list[int] = []

    def work(comm: ThreadComm) -> Calibration:
        clock = [0.0]

        def allreduce(vector: tf.Tensor, *given: object, **more: object) -> None:
            clock[0] += 1e-3 + 4 * len(vector) * 2 * 7 / 8 * 1e-6

        def all_gather(vector: tf.Tensor, group: str, *given: object, **more: object) -> None:
            assert group == "peers"
            sent.append(through := 4 * len(vector) * 2 * 3)
            clock[0] += 1e-3 + through * (2e-6 if through == 48 else 1e-7)

        def timer(work: Callable[[], object]) -> list[float]:
            clock[0] = 0.0
            work()
            return clock

        comm.allreduce, comm.all_gather = allreduce, all_gather
        return calibrate(comm, [16, 48, 480], 1e-3, 1, timer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "sends_messages", lambda comm: False)
        found = ThreadComm.run(Topology(4, 2), work)[0]
    assert set(sent) == {48, 480} and found.nodes == 4
    # The longest was faster than any allreduce of its bytes: a burst
    assert dict(found.gathers) == pytest.approx({48: 96e-6, 480: 480e-6})


def test_no_allreduce_counts_as_shorter_than_its_bytes_take() -> None:
    """An idle port that is shaped passes 256 KiB as a burst, and the rest at 1 s a MB.

    The longest allreduce is repeated until 16 bursts have passed.
    """
    burst, engine_s = 2**18, 1e-3

    def work(comm: ThreadComm) -> Calibration:
        clock = [0.0, burst]

        def allreduce(vector: tf.Tensor, *given: object, **more: object) -> None:
            size = 4 * len(vector)
            waits, clock[1] = max(0.0, size - clock[1]), max(0.0, clock[1] - size)
            clock[0] += engine_s + waits * 1e-6

        def timer(work: Callable[[], object]) -> list[float]:
            clock[:] = [0.0, burst]
            work()
            return [9 * clock[0], clock[0], clock[0]]

        comm.allreduce = allreduce
        return calibrate(comm, [65536, 2**18], engine_s, 16 * burst, timer)

    found = ThreadComm.run(Topology(4, 1), work)[0]
    # Each sends 1.5 times its bytes, so 10 of 256 KiB are 16 bursts
    seconds_per_byte = 9 / 10 * 1e-6
    assert dict(found.points) == pytest.approx({n: n * seconds_per_byte for n in (65536, 2**18)})


def test_the_engines_time_is_not_when_ranks_start() -> None:
    """A row of collectives waits once for the rank that starts last, whatever its length."""

    def work(comm: ThreadComm) -> list[float]:
        begun: list[str] = []
        comm.messages._make = None
        comm.all_gather = lambda *given, **more: begun.append("gather")
        comm.allreduce = lambda *given, **more: begun.append("reduce")

        def timer(work: Callable[[], object]) -> list[float]:
            begun.clear()
            work()
            return [8e-3 + len(begun) * 1e-3]

        return measure_engine(comm, "peers", 0.0, timer).seconds

    assert ThreadComm.run(Topology(4, 1), work)[0] == pytest.approx([1.8e-3])


def test_contention_is_what_a_message_takes_longer_while_the_ranks_compute() -> None:
    computing = threading.Event()

    def turns(work: Callable[[], object]) -> list[float]:
        work()
        return [3.0, 4.0, 5.0] if computing.is_set() else [2.0, 2.0]

    def message() -> None:
        if messages.append(None) or len(messages) > 1:
            assert computing.wait(timeout=60)

    messages: list[None] = []
    assert measure_contention(message, computing.set, turns) == [0.5, 1.0, 1.5]


def test_unequal_nodes_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match="red:2, blue:1"):
        ThreadComm.run(Topology(2, 2, (("red", 2), ("blue", 1))), links.probe)


def test_messages_of_a_node_share_its_port_too() -> None:
    """A clock that counts the bytes of both slots finds the beta of both together."""
    clocks: dict[int, float] = {}

    def work(comm: Comm) -> links.ProbeResult:
        post = comm.messages.open_own()
        comm.messages.open_own = lambda counted: post
        send = post.send
        clocks[comm.rank] = 0.0

        def timed(array: object, target: int, tag: int) -> object:
            out = comm.topology.node_of(target) != comm.topology.node_of(comm.rank)
            clocks[comm.rank] += 1e-4 + array.nbytes * (2 * 8e-9 if out else 1e-10)
            return send(array, target, tag)

        post.send = timed
        return links.probe(comm, sizes=(1024, 65536), repeats=2, clock=lambda: clocks[comm.rank])

    found = ThreadComm.run(Topology(2, 2), work)[0].links
    assert found.between.beta_s_per_byte == pytest.approx(
        8e-9
    ) and found.inside.beta_s_per_byte == pytest.approx(1e-10)
    assert found.between.alpha_s == pytest.approx(1e-4) and found.inside.alpha_s == pytest.approx(
        1e-4
    )


def test_a_burst_that_a_link_lets_pass_hardly_counts() -> None:
    """A shaped link sends the first 200 kB of a turn at once.

    A single message of 64 kB would seem to take no time.
    """
    clocks, bucket = {}, {}

    def work(comm: Comm) -> links.ProbeResult:
        post = comm.messages.open_own()
        comm.messages.open_own = lambda counted: post
        send, gather = post.send, comm.gather_objects
        clocks[comm.rank] = bucket[comm.rank] = 0.0

        def refilled(found: object) -> list:
            bucket[comm.rank] = 200e3
            return gather(found)

        def timed(array: object, target: int, tag: int) -> object:
            bucket[comm.rank] -= array.nbytes
            clocks[comm.rank] += 1e-4 + 8e-9 * max(0, min(array.nbytes, -bucket[comm.rank]))
            return send(array, target, tag)

        post.send, comm.gather_objects = timed, refilled
        return links.probe(
            comm, sizes=(1024, 2**16, 2**20), repeats=2, clock=lambda: clocks[comm.rank]
        )

    between = ThreadComm.run(Topology(2, 1), work)[0].links.between
    assert between.alpha_s == pytest.approx(
        1e-4, rel=0.15
    ) and between.beta_s_per_byte == pytest.approx(8e-9, rel=0.15)


@pytest.mark.extended
@pytest.mark.parametrize("launcher", [pytest.param("gloo", marks=pytest.mark.exhaustive), "mpi"])
def test_the_command_writes_links_that_plans_are_made_with(tmp_path: Path, launcher: str) -> None:
    file = tmp_path / "links.json"
    words = [
        "-m",
        "tfcommx.cli.main",
        "probe",
        "--output",
        str(file),
        "--largest",
        "65536",
        "--repeats",
        "1",
    ]
    ended = horovodrun(2, words, launcher)
    assert ended.status == 0, ended.output[-4000:]
    links = Links.read(file)
    assert links.inside != NOMINAL.inside and links.between == NOMINAL.between
    # On crowded cores a single repeat may find no time of the engine's own, and no fusion
    assert links.engine_s >= 0 and links.contention >= 0
    spread = json.loads(file.read_text())["spread"]
    assert set(spread) == {"inside.alpha_s", "inside.beta_s_per_byte", "engine_s", "contention"}
    assert file.with_suffix(".png").stat().st_size > 10_000
    plan = make_plan(
        [Gradient("w", (100, 100), "float32")],
        {"*": Scheme("pipeline")},
        Topology(2, 1),
        links=links,
    )
    assert plan.buckets[0].options.block_bytes == links.block_bytes


@pytest.mark.parametrize(("name", "obstacle"), [("file/links.json", "file"), ("", "")])
def test_the_command_refuses_a_file_that_it_could_not_write(
    name: str, obstacle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder was refused after the measurement."""
    (tmp_path / "file").touch()
    file = tmp_path / name
    monkeypatch.setattr(tfcommx, "init", lambda: 1 / 0)
    with pytest.raises(ConfigurationError, match=rf"'{file}': {tmp_path / obstacle} "):
        probe.probe(file)


@pytest.mark.parametrize("text", [None, "no JSON", "{}", '{"links": {"inside": {"alpha_s": -1}}}'])
def test_a_file_without_links_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "links.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=rf"{file}\b.*tfcommx probe"):
        Links.read(file)


def test_links_of_another_cluster_are_refused(tmp_path: Path) -> None:
    """A file that was probed on one node says nothing of the links between nodes."""
    file = tmp_path / "links.json"
    points = {"inside": [(1.0, 1024.0, 1e-3)], "between": []}
    file.write_text(links.ProbeResult(NOMINAL, points, []).to_json())
    assert Links.read(file, Topology(1, 4)) == NOMINAL
    with pytest.raises(ConfigurationError, match=r"Topology\(nodes=2, slots=4.*links\.json"):
        Links.read(file, Topology(2, 4))


def test_no_constants_are_exchanged_to_see_whether_the_engine_fuses() -> None:
    """TensorFlow would exchange them once, while it traces, and never again."""
    seen: list[bool] = []

    class Traced:
        by_nccl = False

        def allreduce(self, tensor: tf.Tensor, *_: Any, counted: bool) -> tf.Tensor:
            seen.append(tf.is_symbolic_tensor(tensor) and not counted)
            return tensor

    def turns(work: Callable[[], object]) -> list[float]:
        before = len(seen)
        work()
        return [float(len(seen) - before)]

    assert not engine_fuses(Traced(), turns)
    assert len(seen) == WAITING + 1 and all(seen)
