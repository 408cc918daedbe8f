"""Every launch line that we print starts ranks, as it stands, without any option added.

Hosts become names of this machine, numbers of ranks become small, and the program becomes one that
says its rank, or (exhaustive) one that trains three steps; nothing else changes. Lines that are the
same then run once. Programs are checked for themselves: options of `tfcommx`, keys of recipes,
files.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from drawing import case, extended
from launch_lines import NOT_RUN, Split, launch_lines, sources, split
from launching import QUICK, ROOT

from tfcommx.cli.main import app
from tfcommx.recipes.recipe import read

FOUND = [found for path in sources(ROOT) for found in launch_lines(path, ROOT)]
# Names of this machine that Horovod takes for two hosts
HOSTS = ("localhost", "127.0.0.1")
# Without any option: as many ranks as an allocation has slots
ALLOCATION = ("tfcommx", "run", "--")
SAY = """\
from tfcommx.launch.launcher import launcher
here = launcher()
print(f"started {here.rank} of {here.size} by {here.kind}", flush=True)
"""
TRAIN = """\
import keras, numpy as np, tfcommx as cx
cx.init()
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(cx.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False)
x = np.ones((12, 4), "float32")
model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[cx.callbacks.BroadcastState()])
assert int(model.optimizer.iterations) == 3
print(f"started {cx.rank()} of {cx.size()} by training", flush=True)
"""
# In documents
CONFIG, FOLDER = "configs/fashion_mnist.yaml", "/tmp"
PLACEHOLDERS = {"CONFIG": CONFIG, "SOURCE": FOLDER, "SHARDS": FOLDER, "X": FOLDER}


def on_this_machine(text: str, limit: int) -> tuple[str, int]:
    """Return a value of -H for this machine, and its number of slots.

    >>> on_this_machine("node1:8,...,node16:8", 4)
    ('localhost:2,127.0.0.1:2', 4)
    """
    slots = [int(word.partition(":")[2] or 1) for word in text.split(",") if word != "..."] or [2]
    names = HOSTS[: min(len(slots), 2)]
    each = [min(count, limit // len(names)) for count in slots[: len(names)]]
    pairs = zip(names, each, strict=True)
    return ",".join(f"{name}:{count}" for name, count in pairs), sum(each)


def adapted(launcher: tuple[str, ...], limit: int) -> tuple[tuple[str, ...], int]:
    """Return a launcher's words for this machine, and how many ranks it will start.

    >>> adapted(("horovodrun", "-np", "32", "-H", "...", "--gloo"), 2)
    (('horovodrun', '-np', '2', '-H', 'localhost:2', '--gloo'), 2)
    """
    words, ranks = list(launcher), 0
    for number, word in enumerate(launcher[:-1], 1):
        if word in ("-H", "--hosts"):
            words[number], ranks = on_this_machine(launcher[number], limit)
    for number, word in enumerate(launcher[:-1], 1):
        if word in ("-np", "--num-proc", "--processes"):
            ranks = min(int(launcher[number]), ranks or limit)
            words[number] = str(ranks)
    words = [re.sub(r"\beth0\b", "lo", word) for word in words]
    if "..." in words:  # It stands for options; without any number of ranks for -np
        place = words.index("...")
        words[place : place + 1] = [] if ranks else ["-np", "2"]
    # A hostfile or an allocation has two slots
    return tuple(words), ranks or 2


def distinct(limit: int) -> dict[tuple[str, ...], Split]:
    """Return one line for each way to start ranks on this machine."""
    lines = [split(found.words) for found in FOUND]
    ranks = [line for line in lines if line.launcher[:2] != ("tfcommx", "train")]
    return {adapted(line.launcher, limit)[0]: line for line in ranks}


def start(command: str, folder: Path, python_path: str = QUICK) -> str:
    """Run a command as a user types it, in a shell in the environment; return its output."""
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": python_path,
    }
    if not re.search(r" (-np|-H|--hostfile|--num-proc|--hosts) ", command):  # For an allocation
        env["PBS_NODEFILE"] = str(folder / "hosts.txt")
    if os.geteuid() == 0:  # Open MPI's mpirun requires them of root
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, f"{command}\n{output[-4000:]}"
    return output


def check_start(line: Split, limit: int, program: str, folder: Path) -> None:
    """Start a line, and check that each rank has started in one job."""
    launcher, ranks = adapted(line.launcher, limit)
    (folder / "train.py").write_text(program)
    (folder / "hosts.txt").write_text("localhost slots=2\n")
    output = start(shlex.join([*line.environment, *launcher, "python", "train.py"]), folder)
    numbers = re.findall(rf"started (\d+) of {ranks} by (\w+)", output)
    assert sorted(int(rank) for rank, _ in numbers) == list(range(ranks)), output[-4000:]
    kind = "mpi" if "--mpi" in launcher else "gloo"
    if {"--mpi", "--gloo"} & set(launcher) and program == SAY:
        assert {kind for _, kind in numbers} == {kind}


def test_lines_were_found() -> None:
    """In the README, documents, recipes, examples, docstrings and messages."""
    for part in ("README.md", "docs/", "configs/", "scripts/examples/", "tfcommx/cli/"):
        assert any(found.where.startswith(part) for found in FOUND), part


def has_more(launcher: tuple[str, ...]) -> bool:
    """Return True if the words of another line are these and more."""
    return any(set(launcher) < set(other) for other in distinct(2))


@pytest.mark.long_wait
@pytest.mark.parametrize(
    "launcher",
    [
        launcher
        if launcher == ALLOCATION
        else (case(launcher, kept=False) if has_more(launcher) else extended(launcher))
        for launcher in distinct(2)
    ],
    ids=shlex.join,
)
def test_a_line_starts_its_ranks(launcher: tuple[str, ...], tmp_path: Path) -> None:
    check_start(distinct(2)[launcher], 2, SAY, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", distinct(4), ids=shlex.join)
def test_a_line_trains_on_up_to_four_ranks(launcher: tuple[str, ...], tmp_path: Path) -> None:
    check_start(distinct(4)[launcher], 4, TRAIN, tmp_path)


@pytest.mark.long_wait
@pytest.mark.parametrize(
    ("command", "program"),
    [
        case("horovodrun -np 2 python train.py", TRAIN, kept=False),
        ("horovodrun -np 2 -H localhost:2 python train.py", SAY),
    ],
    ids=["trains", "starts"],
)
def test_plain_horovodrun(command: str, program: str, tmp_path: Path) -> None:
    """The unchanged command, which the README says works after the set-up."""
    (tmp_path / "train.py").write_text(program)
    output = start(command, tmp_path, str(ROOT))
    assert all(f"started {rank} of 2 by" in output for rank in range(2)), output


def filled(words: tuple[str, ...]) -> list[str]:
    """Put this machine's files in the place of placeholders."""
    return [PLACEHOLDERS.get(word, word.replace("=SHARDS", f"={FOLDER}")) for word in words]


def check_program(words: list[str]) -> None:
    """Check the options of a `tfcommx` command, the recipe's keys, and that scripts exist."""
    if words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None, words[2]
        return
    if words[0] == "python":
        script = next(word for word in words if word.endswith(".py"))
        assert "/" not in script or (ROOT / script).is_file(), script
        return
    assert words[0] == "tfcommx", words
    command, name, rest, parsed = typer.main.get_command(app), "tfcommx", list(words[1:]), None
    while True:
        parsed = command.make_context(name, list(rest), parent=parsed)
        if not hasattr(command, "get_command"):
            break
        # A group: `tfcommx`, and `cache` below it
        name, rest = rest[0], rest[1:]
        command = command.get_command(parsed, name)
        assert command is not None, name
    if name == "train":
        config = Path(str(parsed.params["config"]))
        # The examples' own recipes stand beside them
        (path,) = (
            [config] if config.is_file() else (ROOT / "scripts" / "examples").rglob(str(config))
        )
        read(path, parsed.params["settings"] or [])
    if name in ("run", "centre"):
        check_program(list(parsed.params["command"]))


@pytest.mark.parametrize("where", [found.where for found in FOUND])
def test_the_program_of_a_line_takes_its_options(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    # Examples are started in their folder; the line of a benchmark's recipe sets PYTHONPATH=scripts
    for folder in (ROOT / "scripts" / "examples", ROOT / "scripts"):
        monkeypatch.syspath_prepend(folder)
    line = split(next(found.words for found in FOUND if found.where == where))
    if line.launcher[:2] in (("tfcommx", "run"), ("tfcommx", "train")):
        check_program(filled((*line.launcher, *line.program)))
    if line.program:
        check_program(filled(line.program))


def test_an_excuse_gives_a_reason() -> None:
    """`not run: REASON`, and the reason is more than a word."""
    for path in sources(ROOT):
        for reason in re.findall(rf"{NOT_RUN}(.*)", path.read_text()):
            assert len(reason.split()) >= 2, (path, reason)
