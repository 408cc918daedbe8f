"""Two processes prove that they know a secret, which does not travel."""

from __future__ import annotations

import signal
import socket
import threading
import time
from typing import Any

import pytest

from tfcommx.launch import handshake
from tfcommx.launch.handshake import NO_PARTNER, Handshake

OURS = Handshake("our secret", "test 1", ("launch", 2))


def meet(caller: Handshake, callee: Handshake, then: bytes = b"") -> tuple[Any, Any, bytes]:
    """Return the message that each side received, or its error, and the rest the caller reads."""
    here, there = socket.socketpair()
    heard: list[Any] = []

    def serve() -> None:
        try:
            one = callee.hear(there, time.monotonic() + 60)
            heard.append(one.said)
            one.answer("welcome")
            there.sendall(then)
        except NO_PARTNER as error:
            heard.append(error)
        there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        answer: Any = caller.call(here, [1, "name"], time.monotonic() + 60)
        rest = here.recv(100)
    except NO_PARTNER as error:
        answer, rest = error, b""
    here.close()  # First: one that was refused waits for more
    thread.join(60)
    return answer, heard[0], rest


def test_both_hear_each_other_and_nothing_that_follows_is_lost() -> None:
    assert meet(OURS, OURS, b".\nbye\n") == ("welcome", [1, "name"], b".\nbye\n")


@pytest.mark.parametrize(
    "other",
    [OURS._replace(secret="another"), OURS._replace(context=("launch", 3))],
    ids=["secret", "context"],
)
def test_a_stranger_is_refused_and_gets_no_answer(other: Handshake) -> None:
    answer, heard, _ = meet(other, OURS)
    assert isinstance(heard, ValueError) and isinstance(answer, NO_PARTNER)


def test_another_program_is_named() -> None:
    answer, _, _ = meet(OURS, OURS._replace(protocol="test 2"))
    assert "another program, or version, listens there: 'test 2'" in str(answer)


def test_one_that_has_gone_does_not_end_this_process() -> None:
    """Libraries may have set SIGPIPE to its default, which did."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        here, there = socket.socketpair()
        there.close()
        with pytest.raises(BrokenPipeError):
            OURS.hear(here, time.monotonic() + 60)
        here.close()
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_the_secret_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, write = [], handshake._write

    def noted(connection: socket.socket, text: dict[str, Any]) -> None:
        sent.append(str(text))
        write(connection, text)

    monkeypatch.setattr(handshake, "_write", noted)
    meet(OURS, OURS)
    assert len(sent) == 3 and "our secret" not in "".join(sent)


def test_a_text_that_is_too_long_arrives_shortened() -> None:
    """A refusal of more than 8 kB was sent, and never read: the other side waited and retried."""
    for text in ("x" * 20_000, "\N{GRINNING FACE}" * 5000, "\x00" * 5000):
        short = handshake.shortened(text)
        assert short.endswith("...") and text.startswith(short[:-3])
        ours, theirs = socket.socketpair()
        handshake.Caller(OURS, ours, None, "c" * 32).answer({"problem": short})
        assert handshake._read(theirs, time.monotonic() + 60)["said"] == {"problem": short}
        with pytest.raises(ValueError, match=r"\b8192\b"):
            handshake.Caller(OURS, ours, None, "c" * 32).answer({"problem": text})
        ours.close()
        theirs.close()
