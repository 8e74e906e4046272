"""A TCP port at which the processes of one run meet: whoever connects has to prove that it holds the run's key.

Each connection is authenticated on a thread of its own. One that sends nothing or something else, as a port scan does,
is closed without delaying the others. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

GREETING_SECONDS = 60.0
"""How long each read or write of a connection's authentication may take before the connection is closed."""


class Meeting:
    """A port at which the other processes of this run connect.

    Args:
        address: how others know this machine; `None` if all of them are on it.
        secret: the key of the run.
        most: how many connections may be authenticated at once; further ones are closed.

    Attributes:
        address: the address at which others connect.
        port: the port at which they do.
    """

    def __init__(self, address: str | None, secret: bytes, most: int) -> None:
        self._listener = socket.create_server((listening_address(address), 0), backlog=most)
        self.address = address or "127.0.0.1"
        self.port: int = self._listener.getsockname()[1]
        self._secret = secret
        self._free = threading.Semaphore(most)
        self._arrived: queue.SimpleQueue[tuple[Connection, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="ringverify-meeting", daemon=True).start()

    def arrival(self, until: float) -> tuple[Connection, Any] | None:
        """Return an authenticated connection and its first message, or `None` at `until` (`time.monotonic()`)."""
        try:
            return self._arrived.get(timeout=max(0.01, until - time.monotonic()))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop accepting connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                wire, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.05)  # the connection is gone again, or no file descriptor is free at the moment
                continue
            if not self._free.acquire(blocking=False):
                wire.close()
                continue
            threading.Thread(target=self._greet, args=(wire,), name="ringverify-greeting", daemon=True).start()

    def _greet(self, wire: socket.socket) -> None:
        wire.setblocking(True)
        connection = Connection(wire.detach())
        try:
            _give_up_after(connection, GREETING_SECONDS)
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            said = connection.recv()
            _give_up_after(connection, 0.0)
            self._arrived.put((without_delay(connection), said))
        except (AuthenticationError, EOFError, OSError):
            connection.close()  # not from a process of this run
        finally:
            self._free.release()


def meet(address: str, port: int, secret: bytes) -> Connection:
    """Connect to a meeting.

    Raises:
        OSError: nobody listens there.
        EOFError: whoever listens there holds another key.
        AuthenticationError: whoever listens there holds another key.
    """
    return without_delay(Client((address, port), authkey=secret))


def listening_address(address: str | None) -> str:
    """Return the address to listen on so that others can connect to `address`: one interface if that is certain.

    A name may stand for several addresses, for this machine's own loopback interface, or for a router before it: then
    it is "", which is all interfaces.
    """
    if address is None:
        return "127.0.0.1"
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(address, None, socket.AF_INET)}
        if len(found) == 1 and not ipaddress.ip_address(only := found.pop()).is_loopback:
            with socket.create_server((only, 0)):
                return only
    except OSError:
        pass
    return ""


def without_delay(connection: Connection) -> Connection:
    """Set TCP_NODELAY, so that a message sent in two parts is not delayed; return the connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _give_up_after(connection: Connection, seconds: float) -> None:
    """Set the timeout of each read and write of a connection; 0 is none."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
