"""Where processes of one run meet over TCP: whoever connects has to show the run's key, and nobody waits for that.

A connection that says nothing, or something else, as a port scan's does, is given up by itself, beside all others.
Importing this module does not import torch.
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
"""How long a connection may take for each part of its greeting, before it is given up."""


class Meeting:
    """A port at which others of this run arrive.

    Args:
        address: how others know this machine; `None` if all of them are on it.
        secret: the key of the run.
        most: how many connections may be greeted at once; further ones are closed.

    Attributes:
        address: where others find it.
        port: and at which port.
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
        """Somebody who has shown the key, with what they said first; `None` if it is `until` by the monotonic clock."""
        try:
            return self._arrived.get(timeout=max(0.01, until - time.monotonic()))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Nobody arrives any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for a connection
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                wire, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.05)  # a connection that was gone again, or no file descriptor for it at the moment
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
            connection.close()  # somebody else's
        finally:
            self._free.release()


def meet(address: str, port: int, secret: bytes) -> Connection:
    """Connect to a meeting.

    Raises:
        OSError: nobody is there.
        EOFError: nobody with that key is.
        AuthenticationError: the same.
    """
    return without_delay(Client((address, port), authkey=secret))


def listening_address(address: str | None) -> str:
    """Where to listen so that others who know this machine by `address` can connect: one interface, if it is certain.

    A name may stand for several addresses, for this machine's own loopback interface, or for a router before it: then
    it is all interfaces.
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
    """Have what is sent in two parts arrive as soon as what is sent in one."""
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _give_up_after(connection: Connection, seconds: float) -> None:
    """Have reading and writing fail that takes longer; 0 is never."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
