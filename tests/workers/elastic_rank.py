"""A rank of a supervised run, without TensorFlow: it counts steps, and rank 0 saves the number.

    elastic_rank.py FOLDER STEPS [fault ...]

A step takes .05 s, and all ranks take it together. Each fault is `GENERATION:RANK:STEP:HOW`: in
that generation (`*`: in each) that rank meets its end when it has taken that step; HOW is a
signal's name, `exit3`, `hang`, or `leaving HOST`. Rank 0 speaks to the supervisor as tfcommx does
in a rank; `nolink` among the faults keeps it from that.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

from tfcommx.launch.handshake import NO_PARTNER, Handshake

STEP_SECONDS = 0.05
PAUSED = 75


def number(name: str) -> int:
    """Return a number from the environment of horovodrun or mpirun."""
    return int(os.environ.get(f"HOROVOD_{name}") or os.environ[f"OMPI_COMM_WORLD_{name}"])


def connect() -> socket.socket:
    """Connect to the supervisor, as rank 0."""
    places, _, port = os.environ["TFCOMMX_SUPERVISOR"].rpartition(":")
    context = os.environ["TFCOMMX_RUN"], os.environ["TFCOMMX_GENERATION"]
    handshake = Handshake(os.environ["TFCOMMX_SUPERVISOR_SECRET"], "tfcommx supervisor 1", context)
    for place in places.split(","):
        with contextlib.suppress(*NO_PARTNER):
            link = socket.create_connection((place, int(port)), timeout=60)
            assert handshake.call(link, {"rank": 0, "size": 1}, time.monotonic() + 60)["ok"]
            link.settimeout(None)
            return link
    raise SystemExit(f"no supervisor at {places}, port {port}")


def wait_for_all(place: Path, rank: int, step: int) -> None:
    """Return when all ranks have taken the step."""
    Path(f"{place}.{rank}").write_text(f"{step} ")
    others = [Path(f"{place}.{other}") for other in range(number("SIZE"))]
    while any(not one.exists() or int(one.read_text() or 0) < step for one in others):
        time.sleep(0.005)


def meet(how: str) -> None:
    print(f"meets {how}", flush=True)
    if how.startswith("exit"):
        os._exit(int(how[4:]))
    if how == "hang":
        time.sleep(600)
    os.kill(os.getpid(), signal.Signals[how])
    time.sleep(600)


def main() -> None:
    folder, steps, faults = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    rank, generation = number("RANK"), os.environ.get("TFCOMMX_GENERATION", "-")
    saved, paused = folder / "step", folder / f"paused{generation}"
    step = int(saved.read_text()) if saved.exists() else 0
    link = None
    if rank == 0 and "nolink" not in faults:
        link = connect()
        events = selectors.DefaultSelector()
        events.register(link, selectors.EVENT_READ)

    def tell(message: dict[str, object]) -> None:
        if link:
            link.sendall(json.dumps(message).encode() + b"\n")

    with (folder / "pids").open("a") as file:
        print(os.getpid(), file=file)
    source = "file" if step else "start"
    tell({"resumed": {"from": source, "epoch": 0, "step": step, "total": step, "seconds": 0.1}})
    while step < steps:
        time.sleep(STEP_SECONDS)
        step += 1
        wait_for_all(folder / f"generation{generation}", rank, step)
        tell({"steps": step})
        for fault in set(faults) - {"nolink"}:
            when, who, at, how = fault.split(":")
            if when in ("*", generation) and (int(who), int(at)) == (rank, step):
                if how.startswith("leaving "):
                    tell({"leaving": how.split()[1]})
                    saved.write_text(str(step))
                    paused.touch()
                else:
                    meet(how)
        if rank == 0 and step % 10 == 0:
            saved.write_text(str(step))
            tell({"epoch_ended": step // 10})
        if link and events.select(0):
            assert json.loads(link.recv(4096))["pause"]
            saved.write_text(str(step))
            paused.touch()
        if paused.exists():
            time.sleep(2 * STEP_SECONDS)  # All ranks see it
            sys.exit(PAUSED)
    print(f"rank {rank} has taken {step} steps", flush=True)


if __name__ == "__main__":
    main()
