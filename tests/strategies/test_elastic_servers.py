"""The centre has the same bits on one server, on one server per rank, and on an extra rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from elastic_servers import SERVERS, run_ranks
from test_elastic_averaging import ENTRIES, RATE, SHAPES, Rank, plan_for

from tfcommx.collectives import mpi
from tfcommx.collectives.comm import Comm
from tfcommx.collectives.point_to_point import TAGS, Channel
from tfcommx.collectives.threads import ThreadComm, _Meeting, _ThreadPointToPoint
from tfcommx.core import ConfigurationError, Topology
from tfcommx.launch.interpreter import ExitStatus
from tfcommx.runtime.executor import PlanExecutor
from tfcommx.strategies import ElasticAveraging
from tfcommx.strategies.easgd.process import END, CentreProcess
from tfcommx.strategies.easgd.server import DONE, START, Centre, CentreServer, cut, start_message
from tfcommx.strategies.easgd.worker import EasgdWorker
from tfcommx.watch import liveness, membership
from tfcommx.watch.membership import Membership

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parts_have_the_bits_of_the_whole_for_the_same_order_of_messages(
    servers: int, dtype: str
) -> None:
    """300 exchanges of 3 workers, with a centre in one piece beside it; also fewer entries."""
    for entries in (41, 3, 1):
        numbers = np.random.default_rng(entries)
        meeting = _Meeting(Topology(1, 1))
        ranks = range(servers + 3)
        post = {rank: _ThreadPointToPoint(rank, meeting) for rank in ranks}
        workers = ranks[servers:]
        holders = [CentreServer(post[rank], workers, Membership()) for rank in ranks[:servers]]
        stopped = threading.Event()
        threads = [threading.Thread(target=one.run, args=(stopped,)) for one in holders]
        for thread in threads:
            thread.start()
        parts = cut(entries, ranks[:servers])
        sides = [
            EasgdWorker(post[rank], rank, parts, np.dtype(dtype), Membership()) for rank in workers
        ]
        first = numbers.normal(size=entries).astype(dtype)
        sides[0].start(0.3, first)
        whole = Centre(first, 0.3)
        weights = numbers.normal(size=(3, entries)).astype(dtype)
        for _ in range(100):
            one = numbers.integers(3)
            force = sides[one].exchange(weights[one])
            assert force.tobytes() == whole.meet(weights[one]).tobytes()
            weights[one] -= force + numbers.normal(size=entries).astype(dtype)
        assert sides[1].read().tobytes() == whole.values.tobytes()
        ends = [threading.Thread(target=one.end, args=(np.zeros(0),)) for one in sides[1:]]
        for end in ends:
            end.start()
        centre, _ = sides[0].end(np.zeros(0))
        assert centre.tobytes() == whole.values.tobytes()
        stopped.set()
        for thread in [*threads, *ends]:
            thread.join(60)
            assert not thread.is_alive()


class Order:
    """Notes in which order each server has met the ranks; meetings take a random time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.met: dict[CentreServer, list[tuple[int, np.ndarray]]] = defaultdict(list)
        numbers, meet = np.random.default_rng(seed), CentreServer._meet

        def noted(server: CentreServer, source: int, message: np.ndarray) -> None:
            time.sleep(numbers.exponential(0.002))
            self.met[server].append((source, message.view("float32").copy()))
            meet(server, source, message)

        monkeypatch.setattr(CentreServer, "_meet", noted)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("seed", range(7))
def test_every_timing_of_messages_is_the_papers_algorithm_for_each_part(
    monkeypatch: pytest.MonkeyPatch, server: str, seed: int
) -> None:
    """In float64 from each server's own order; blocking, so that the steps between are known."""
    order, alpha, every = Order(monkeypatch, seed), 0.3, 2
    strategy = ElasticAveraging(every=every, alpha=alpha, blocking=True, server=server)
    rounds = np.random.default_rng([seed, 1]).integers(1, 7, size=3)

    def work(comm: Comm) -> tuple[list[float], np.ndarray]:
        own = np.random.default_rng([seed, comm.rank])
        rank = Rank(comm, strategy)
        for _ in range(every * rounds[comm.rank]):
            rank.step()
            time.sleep(own.exponential(0.001))
        average = rank.run.end(np.array([float(comm.rank), 1.0]))
        return average.tolist(), rank.flat()

    ended = run_ranks(server, Topology(3, 1), work)
    assert sum(map(len, order.met.values())) == sum(rounds) * (3 if server == "sharded" else 1)
    parts = cut(ENTRIES, range(3 if server == "sharded" else 1))
    exact = np.ones(ENTRIES)
    # Rank -> its snapshots, one after the other
    weights = {rank: [_stepped(np.ones(ENTRIES), rank, every)] for rank in range(3)}
    todo = [(holder, list(met)) for holder, met in order.met.items()]
    counts, done = defaultdict(int), defaultdict(int)
    forces = {rank: defaultdict(lambda: np.zeros(ENTRIES)) for rank in range(3)}
    while any(met for _, met in todo):
        before = sum(len(met) for _, met in todo)
        for holder, met in todo:
            part = parts[holder._messages.rank if server == "sharded" else 0]
            here = slice(part.start, part.stop)
            while met and counts[holder, met[0][0]] < len(weights[met[0][0]]):
                rank, message = met.pop(0)
                number = counts[holder, rank]
                seen = weights[rank][number]
                np.testing.assert_allclose(message, seen[here], rtol=0, atol=1e-5)
                pull = alpha * (seen[here] - exact[here])
                exact[here] += pull
                forces[rank][number][here] = pull
                counts[holder, rank] += 1
                done[rank, number] += 1
                if done[rank, number] == len(todo):
                    after = seen - forces[rank][number]
                    weights[rank].append(_stepped(after, rank, every))
        assert sum(len(met) for _, met in todo) < before, "a message before its cause"
    for average, last in ended:
        assert average == [1, 1]
        np.testing.assert_allclose(last, exact, rtol=0, atol=1e-5)
        assert last.tobytes() == ended[0][1].tobytes()


def _stepped(weights: np.ndarray, target: float, steps: int) -> np.ndarray:
    return target + (weights - target) * (1 - RATE) ** steps


@pytest.mark.parametrize("server", SERVERS)
def test_any_rank_reads_the_centre_while_the_others_train(server: str) -> None:
    """Nobody but the reader knows of it; before and after a training there is none to read."""
    read = threading.Barrier(3, timeout=60)

    def work(comm: Comm) -> None:
        rank = Rank(comm, ElasticAveraging(every=1, blocking=True, server=server))
        assert rank.run.centre() is None
        rank.step()
        read.wait()  # Nobody exchanges now
        seen = {path: one.copy() for path, one in rank.run.centre().items()}
        flat = np.concatenate([one.ravel() for one in seen.values()])
        everyone = comm.gather_objects(flat)
        assert all(one.tobytes() == flat.tobytes() for one in everyone)
        # All have moved it from 1, by steps of 0.1 from 1 to their targets 0, 1, 2
        assert (np.abs(flat - 1) < 0.1).all() and (flat != 1).all()
        assert {path: one.shape for path, one in seen.items()} == SHAPES
        if comm.rank == 2:
            for _ in range(5):
                rank.step()
            assert not np.allclose(rank.run.centre()["first/kernel"], seen["first/kernel"])
        rank.run.end()
        assert rank.run.centre() is None

    run_ranks(server, Topology(3, 1), work)


@pytest.mark.parametrize("server", SERVERS)
def test_another_training_begins_with_rank_0s_weights(server: str) -> None:
    """With an extra rank also of a second optimizer, whose centre is another one."""

    def work(comm: Comm) -> None:
        strategy = ElasticAveraging(every=1, server=server)
        # Messages of ThreadComm's ranks that are servers themselves are not kept apart
        ranks = {value: Rank(comm, strategy) for value in (5.0, 7.0)[: 1 + (server[0] == "e")]}
        for rank in ranks.values():
            rank.step()
        for value, rank in ranks.items():
            rank.run.end()
            for one in rank.weights.values():
                one.assign(tf.fill(one.shape, value))
        for rank in ranks.values():
            rank.run.begin()
        for value, rank in ranks.items():
            assert all((one == value).all() for one in rank.run.centre().values())
        comm.gather_objects("all have read it")
        for rank in ranks.values():
            rank.run.end()

    run_ranks(server, Topology(3, 1), work)


def test_bytes_of_a_sharded_centre_are_equal_on_all_ranks() -> None:
    def work(comm: Comm) -> float:
        rank = Rank(comm, ElasticAveraging(every=2, blocking=True, server="sharded"))
        before = comm.traffic().between
        rank.run._open(rank.weights)
        start = comm.traffic().between - before
        comm.gather_objects("all have counted")  # Before a server answers an exchange
        for _ in range(6):
            rank.step()
        rank.run.end()
        return comm.traffic().between - before - start

    # 3 exchanges to 3 servers, of which 1/4 is its own part: 20 of 80 entries each
    sent = 3 * 4.0 * 60 + (3 + 1) * 4.0 * 3 * 20
    assert ThreadComm.run(Topology(4, 1), work) == [sent] * 4


def test_an_extra_rank_without_its_launch_is_refused_with_the_line() -> None:
    def work(comm: Comm) -> None:
        with pytest.raises(
            ConfigurationError, match=r"--enable-recovery .*tfcommx centre -- python"
        ):
            ElasticAveraging(server="extra_rank").start(PlanExecutor(plan_for(comm.topology), comm))

    ThreadComm.run(Topology(2, 1), work)


class Told(Membership):
    """Records the messages to the watcher."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[bytes] = []
        self.report_to(self.said.append)


@pytest.fixture
def process() -> tuple[CentreProcess, Told, dict[int, _ThreadPointToPoint]]:
    meeting, told = _Meeting(Topology(1, 1)), Told()
    post = {rank: _ThreadPointToPoint(rank, meeting) for rank in range(4)}
    return CentreProcess(post[3], 3, told), told, post


def test_the_process_with_the_centre_misses_nobody_during_a_training_and_all_before(
    process: tuple,
) -> None:
    here, told, post = process
    assert not here.answer_next() and told.said == []
    Channel(post[0], 1).send(start_message(0.5, np.ones(4, "float32")), 3, START)
    assert here.answer_next() and told.said == [b"needs [3]\n"]
    assert [server.centre is None for server in here.servers] == [False, True]
    told.mark_gone(2, "its process has ended", False)  # It is not waited for
    for rank in (0, 1):
        Channel(post[rank], 1).send(np.zeros(1), 3, DONE)
    while here.answer_next():
        pass
    assert told.said == [b"needs [3]\n", b"needs all\n"]
    # It ends after the last messages of the remaining ranks
    for rank in (0, 1):
        post[rank].send(np.zeros(1, np.int32), 3, END)
    here.run()
    assert told.gone() == {0, 1, 2}


def test_a_process_that_no_training_has_used_says_so(
    process: tuple, caplog: pytest.LogCaptureFixture
) -> None:
    here, _, post = process
    for rank in range(3):
        post[rank].send(np.zeros(1, np.int32), 3, END)
    here.run()
    assert "No training has used the process that holds the centre" in caplog.text


def test_the_process_looks_for_ranks_whose_end_nobody_would_tell(
    process: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ranks that were killed at once it was told of one, and waited for the others."""
    here, told, _ = process
    monkeypatch.setattr(membership, "FIND_SECONDS", 0.02)
    there = {0, 1, 2}
    told.probe_with(lambda rank: rank in there, range(3), 0.1)

    def run() -> None:
        with pytest.raises(RuntimeError, match="centre"):
            here.run()

    running = threading.Thread(target=run, daemon=True)
    running.start()
    there.clear()
    time.sleep(0.3)
    assert told.gone() == set()  # It would be told of the first
    told.mark_gone(0, "its process has ended", False)
    running.join(60)
    assert not running.is_alive() and told.gone() == {0, 1, 2}


def test_a_forked_child_does_not_say_that_its_rank_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "MpiPointToPoint", lambda **options: pytest.fail("it sends"))
    mpi._say_end(os.getpid() + 1, ExitStatus())


@pytest.mark.parametrize("server", SERVERS)
def test_a_training_of_no_exchange_ends_too(server: str) -> None:
    """The centre is taken twice, after each epoch of a loop, say: the second had too few steps."""

    def work(comm: Comm) -> None:
        rank = Rank(comm, ElasticAveraging(every=4, server=server))
        for _ in range(5):
            rank.step()
        rank.run.end()
        centre = rank.flat()
        rank.step()
        assert (rank.flat() != centre).any()
        assert rank.run.end(np.array([float(comm.rank)])).tolist() == [1]
        np.testing.assert_array_equal(rank.flat(), centre)

    run_ranks(server, Topology(3, 1), work)


def test_statistics_of_a_rank_that_has_diverged_do_not_count_and_unequal_ones_are_named() -> None:
    def work(comm: Comm) -> None:
        rank = Rank(comm, ElasticAveraging(every=4))
        rank.step()
        value = [1.0, np.nan, 4.0][comm.rank]
        assert rank.run.end(np.array([value, 1.0])).tolist() == [2.5, 1]
        named = rf"[Rr]ank {comm.rank}\b.*\b{comm.rank + 1}\b"
        with pytest.raises(ConfigurationError, match=named):
            rank.run.end(np.ones(comm.rank + 1))
        comm.gather_objects("all have their answers")
        if rank.run._server is not None:
            rank.run._server._stop()

    ThreadComm.run(Topology(3, 1), work)


@pytest.mark.parametrize("fail", [{0, 1, 2}, {0, 1}, set()], ids=str)
def test_a_launch_fails_if_all_ranks_have(
    process: tuple, fail: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    """One dies, the others say how they end: those that fail are named."""
    here, told, post = process
    if 2 in fail:
        told.mark_gone(2, "its process has ended", False)
        told.mark_gone(1, "failed: ValueError", False)  # The watch was faster than its last message
    for rank in (0, 1) if 2 in fail else (0, 1, 2):
        post[rank].send(np.array([3 * (rank in fail)], np.int32), 3, END)
    if 2 in fail:
        with pytest.raises(RuntimeError, match="centre"):
            here.run()
    else:
        here.run()
    assert ("Rank 0 has failed: it ended with exit status 3" in caplog.text) == (0 in fail)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("raise ValueError", 1),
    ],
)
def test_a_rank_knows_at_its_end_what_it_ends_with(code: str, status: int) -> None:
    """`sys.exit(3)` counted as ended well."""
    script = (
        "import atexit, sys; from tfcommx.launch.interpreter import ExitStatus; "
        "status = ExitStatus(); status.watch(); atexit.register(lambda: print(status.get())); "
        f"exec({code!r})"
    )
    ended = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert (ended.stdout, ended.returncode) == (f"{status}\n", status), ended.stderr


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.2", "127.0.0.1"]])
def test_a_watcher_responds_as_long_as_it_listens(addresses: list[str]) -> None:
    with socket.create_server(("", 0)) as listening:
        row = {"addresses": addresses, "port": listening.getsockname()[1]}
        assert liveness.responds(row)
    assert not liveness.responds(row)
    # The loopback of this host says nothing of another host's watcher
    with socket.create_server(("127.0.0.1", 0)) as other:
        row = {"addresses": addresses, "port": other.getsockname()[1]}
        assert liveness.responds(row) == (len(addresses) == 1)


def test_channels_keep_their_messages_apart() -> None:
    meeting = _Meeting(Topology(1, 1))
    here, there = (_ThreadPointToPoint(rank, meeting) for rank in range(2))
    for number in (1, 2):
        Channel(here, number).send(np.array([number]), 1, TAGS - 1)
    assert there.take(TAGS - 1) is None and Channel(there, 3).take(TAGS - 1) is None
    source, message = Channel(there, 2).take(TAGS - 1)
    received = np.zeros(1, int)
    assert (source, message.view(int).tolist()) == (0, [2])
    one = Channel(there, 1)
    one.wait_any([one.receive(received, 0, TAGS - 1)])
    assert received.tolist() == [1]


def test_the_process_with_the_centre_loads_no_tensorflow() -> None:
    """As it is started, watch included, but for MPI, which only `main` loads."""
    code = """
import sys
from tfcommx.strategies.easgd import process

limits = process.liveness.Limits(20.0)
process.liveness.start(
    0, process.Membership(), process.report_once, [], limits, lambda row: [row], True
)
sys.exit(bool({"tensorflow", "keras", "horovod", "mpi4py"} & sys.modules.keys()))
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_failure_of_the_process_with_the_centre_is_its_exit_status() -> None:
    """It was killed in MPI's shutdown, as were the ranks; mpirun then returned 0.

    The hook at exit stands for that shutdown.
    """
    code = """
import atexit, types
from tfcommx.strategies.easgd import process

def fail():
    raise RuntimeError("all have failed")

atexit.register(print, "shutdown")
process.mpi = types.SimpleNamespace(
    start=lambda: None, MpiPointToPoint=lambda **options: None, gather_with_centre=None
)
process.liveness = types.SimpleNamespace(start=lambda *_, **options: None, Limits=lambda limit: 0)
process.CentreProcess = lambda *arguments: types.SimpleNamespace(run=fail)
process.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert (ended.returncode, ended.stdout) == (1, ""), ended.stderr
    assert "RuntimeError: all have failed" in ended.stderr
