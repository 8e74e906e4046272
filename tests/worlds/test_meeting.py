"""The meeting of torchrun's processes: who has the key arrives at once, whatever else connects."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError

import pytest

from ringverify.worlds.processes import meeting as module
from ringverify.worlds.processes.meeting import Meeting, listening_address, meet

pytestmark = pytest.mark.timeout(60)

SECRET = b"the key of this run"
SAYINGS = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 64,
    b"\x00\x00\x00\x04",
    b"\x7f\xff\xff\xff",
    b"\x00\x00\x01\x00short",
]


@pytest.fixture
def place(monkeypatch) -> Iterator[Meeting]:
    """On this machine alone."""
    opened = Meeting(None, SECRET, 40)
    yield opened
    opened.close()


def test_a_port_scan_stops_nobody_from_arriving(place):
    """Connections that say nothing, leave, or say something else; then one of the run's, which is there at once."""
    scan = []
    for saying in SAYINGS * 5:
        scan.append(socket.create_connection((place.address, place.port)))
        scan[-1].sendall(saying)
    scan.pop().close()
    with meet(place.address, place.port, SECRET) as connection:
        connection.send("here I am")
        arrived = place.arrival(time.monotonic() + 30)
        assert arrived is not None
        there, said = arrived
        assert said == "here I am"
        there.send("welcome")
        assert connection.recv() == "welcome"
        there.close()
    assert place.arrival(0.0) is None
    for one in scan:
        one.close()


def test_a_silent_connection_is_given_up_after_its_time(monkeypatch):
    """It is closed, and its place is free for others."""
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.1)
    place = Meeting(None, SECRET, 1)
    with socket.create_connection((place.address, place.port)) as silent:
        silent.settimeout(30)
        while silent.recv(1 << 10):
            pass  # the challenge, which nobody answers
    until, arrived = time.monotonic() + 30, None
    while arrived is None and time.monotonic() < until:
        with contextlib.suppress(OSError, EOFError):  # its place is not free yet
            meet(place.address, place.port, SECRET).send("here I am")
            arrived = place.arrival(time.monotonic() + 5)
    assert arrived is not None
    place.close()


def test_another_key_arrives_nowhere(place):
    """And is told so."""
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        meet(place.address, place.port, b"another key")
    assert place.arrival(0.0) is None


def test_it_listens_where_it_has_to():
    """On loopback for one machine; on one interface for a plain address of this machine; else on all."""
    assert listening_address(None) == "127.0.0.1"
    assert listening_address("127.0.0.1") == ""  # no other machine could come
    assert listening_address("192.0.2.1") == ""  # of documentation, RFC 5737: not this machine's
    assert listening_address("no-such-host.invalid") == ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        try:
            wire.connect(("192.0.2.1", 9))  # nothing is sent; the system says from where it would be
        except OSError:
            return  # a machine without a network
        mine = wire.getsockname()[0]
    assert listening_address(mine) == mine


def test_a_closed_meeting_lets_nobody_in(place):
    """And its thread ends."""
    place.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((place.address, place.port), timeout=5)
