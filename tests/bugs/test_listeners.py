"""Where the processes of a real launch on one host listen: on the loopback alone.

The watchers listened at all addresses, though all ranks were on one host. Nor does a launch that
names no interface, as those of mpirun, or one that others reach, as those of srun, make them
listen there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import horovodrun

SCRIPT = """\
import os
import psutil
os.environ.pop("OMPI_MCA_btl_tcp_if_include", None)  # horovodrun's; mpirun alone sets none
import tfcommx as cx

cx.init()
for child in psutil.Process().children():
    for one in child.net_connections("tcp"):
        if one.status == "LISTEN":
            print(f"the watcher of rank {cx.rank()} listens at {one.laddr.ip};", flush=True)
"""


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_watchers_of_one_host_listen_on_the_loopback(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = horovodrun(2, [str(script)], launcher, seconds=100)
    places = re.findall(r"the watcher of rank (\d) listens at ([\d.]+);", ended.output)
    assert sorted(places) == [("0", "127.0.0.1"), ("1", "127.0.0.1")], ended.output[-3000:]
