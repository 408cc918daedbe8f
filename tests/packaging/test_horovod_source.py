"""The changes of the set-up to Horovod's source."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from launching import ROOT

RING = """
    if (i == 0) {
      out->send(right, slot, 0, 4);
      out->recv(left, slot, 4, 4);
      continue;
    }
    out->waitSend(timeout);
    out->send(right, slot, 0,
        8);
    out->recv(left, slot, 8, 8);
"""
TO_ALL = """
  for (int i = 1; i < ranks; i++) {
    int sendRank = rank + i;
    int recvRank = rank - i;
    in->send(
        sendRank, slot);
    out->recv(recvRank, slot);
  }

  for (int i = 1; i < ranks; i++) {
    in->waitSend(timeout);
  }
"""


@pytest.fixture
def build_horovod(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "setup"))
    return importlib.import_module("build_horovod")


def test_gloo_receives_before_it_sends(build_horovod: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "allgatherv.cc").write_text(RING)
    (tmp_path / "alltoallv.cc").write_text(TO_ALL)
    build_horovod.receive_first(tmp_path)
    ring = (tmp_path / "allgatherv.cc").read_text()
    assert ring.index("recv(left, slot, 4") < ring.index("send(right, slot, 0, 4")
    assert ring.index("recv(left, slot, 8") < ring.index("send(right, slot, 0,\n")
    first, second, waits = (tmp_path / "alltoallv.cc").read_text().split("  for ")[1:]
    assert "out->recv(recvRank" in first and "send" not in first
    assert "in->send(\n        sendRank" in second and "recv" not in second
    assert "waitSend" in waits


def test_a_source_of_another_form_is_refused(build_horovod: ModuleType, tmp_path: Path) -> None:
    """It would be built, and be as slow as before."""
    (tmp_path / "allgatherv.cc").write_text(RING.replace("out->recv(left, slot, 8, 8);", ""))
    with pytest.raises(RuntimeError, match=r"\b2\b.*allgatherv\.cc.*Received 1\."):
        build_horovod.receive_first(tmp_path)
