"""One worker: a program in a process of its own, its messages, what it prints, and the private folder for tensors."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ringverify import environments
from ringverify.words import PRINTED
from ringverify.worlds.external.messages import PROTOCOL, Answer, Breach, Bye, CaseMessage, Hello, line_of, read
from ringverify.worlds.patience import Patience
from ringverify.worlds.processes.wire import how_it_ended

PROGRAM = "program:"
"""Prefix of a target that is a command."""

LONGEST_LINE = 1 << 20
"""Most bytes of one message of a worker, without its line feed."""

BYE_SECONDS = 2.0
"""How long a worker may take to end after `bye`."""

AT_ONCE = 1 << 16
"""Most bytes that are read at once."""

FURTHEST = 1 << 16
"""Most by which the number of a case exceeds that of the one before. How much depends on the inputs, so that no answer
that was written before its case was read has the right number, whenever it arrives."""

_KEEPER = "import sys; sys.path.insert(0, sys.argv.pop(1)); from ringverify.worlds.external.keeper import keep; "
_KEEPER += "keep(int(sys.argv[1]), *sys.argv[2:])"
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class Ended(Exception):
    """The program ended without an answer.

    Attributes:
        exit_code: negative for a signal.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(how_it_ended(exit_code))
        self.exit_code = exit_code


class TooLong(Exception):
    """The program had not answered when its deadline passed."""


def command_of(target: str) -> list[str]:
    """Return the words of the command that a target names.

    Raises:
        ValueError: there is no command, its quotes do not match, or there is no such program; the message says which.
        Inconclusive: it is a package in an environment of its own, which is not there.
    """
    if target in environments.ELSEWHERE:
        return environments.command(target)
    text = target.removeprefix(PROGRAM).strip()
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no command: {str(error).lower()}") from None
    if not words:
        raise ValueError("no command follows: write 'program: python my_worker.py'")
    if shutil.which(words[0]) is None:
        if Path(words[0]).is_file():
            raise ValueError(f"{words[0]!r} is not executable: name its interpreter first, or chmod +x it")
        raise ValueError(f"{words[0]!r} is no program here: give its path, or install it")
    return words


class ProgramProcess:
    """A running worker. Whatever it does, `end` leaves nothing of it behind.

    Attributes:
        has_answered: whether it has answered a case.

    Args:
        command: the program and its arguments.
        heard: called with each piece of what it prints.

    Raises:
        OSError: no process can be started, or no folder made.
    """

    def __init__(self, command: list[str], heard: Callable[[bytes], None] | None = None) -> None:
        self.has_answered = False
        self._heard = heard
        self._kept = b""
        self._lines = b""
        self._case = 0
        self._folder = Path(tempfile.mkdtemp(prefix="ringverify-worker-"))
        ours, theirs = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
        root = str(Path(__file__).resolve().parents[3])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _KEEPER, root, str(ours), str(self._folder), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[ours],
                env=environment,
                bufsize=0,
            )
        except BaseException:
            os.close(theirs)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(ours)
        self._lifeline = theirs
        self._in, self._out, self._log = map(_open, (self._process.stdin, self._process.stdout, self._process.stderr))
        for stream in (self._in, self._out, self._log):
            os.set_blocking(stream.fileno(), False)

    @property
    def printed(self) -> str:
        """The end of what it has printed."""
        return self._kept.decode(errors="replace")

    def forget_printed(self) -> None:
        """Forget what it has printed so far."""
        self._kept = b""

    def hello(self, seconds: float) -> Hello:
        """Wait for its first message.

        Raises:
            Breach: it is another one, or of another version of the protocol.
            Ended: the program ended.
            TooLong: it does not come in time.
        """
        said = read(self._exchange(b"", seconds))
        if not isinstance(said, Hello):
            raise Breach(f"began with {said.kind} instead of hello")
        if said.protocol != PROTOCOL:
            raise Breach(
                f"speaks version {said.protocol} of the worker protocol, and this ringverify version {PROTOCOL}: "
                "write the worker for that one, or install another ringverify"
            )
        return said

    def ask(self, case: Callable[[int, str, str], CaseMessage], inputs: bytes, seconds: float) -> tuple[Answer, Path]:
        """Ask for the results of a case.

        Args:
            case: makes the message, given the case's number and the paths of its two files.
            inputs: content of the file of inputs.
            seconds: the deadline.

        Returns:
            the answer, and the path of the file of results, which may not exist.

        Raises:
            Breach: the answer is none, or one to another case.
            Ended: the program ended.
            TooLong: no answer comes in time.
            OSError: the file of inputs cannot be written.
        """
        last = self._case
        self._case += 1 + zlib.crc32(inputs) % FURTHEST
        before, after = (self._folder / f"{self._case}.{name}.safetensors" for name in ("inputs", "outputs"))
        before.write_bytes(inputs)
        try:
            said = read(self._exchange(line_of(case(self._case, str(before), str(after))), seconds))
        finally:
            with contextlib.suppress(OSError):
                before.unlink()
        if isinstance(said, Hello):
            raise Breach("said hello twice")
        if said.case != self._case:
            asked = "twice" if said.case == last > 0 else f"when asked for case {self._case}"
            raise Breach(f"answered case {said.case} {asked}")
        self.has_answered = True
        return said, after

    def ended_within(self, seconds: float) -> Ended | None:
        """Wait for the program to end unasked; return how it ended, or `None` if it goes on."""
        try:
            self._exchange(b"", seconds, until_end=True)
        except Ended as ended:
            return ended
        except TooLong:
            return None
        raise AssertionError("only an end or the deadline ends this exchange")

    def end(self, *, kindly: bool) -> None:
        """End the program and all processes that it has started, and remove its folder; `kindly`, after a `bye`."""
        if kindly:
            with contextlib.suppress(Breach, Ended, TooLong):
                self._exchange(line_of(Bye(kind="bye")), BYE_SECONDS, until_end=True)
        os.close(self._lifeline)
        self._process.wait()
        for stream in (self._in, self._out, self._log):
            stream.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _exchange(self, outgoing: bytes, seconds: float, *, until_end: bool = False) -> bytes:
        """Send bytes, and return the next line; with `until_end`, wait for the end and raise `Ended`."""
        patience = Patience(seconds, self._processes())
        while until_end or b"\n" not in self._lines[: LONGEST_LINE + 1]:
            if len(self._lines) > LONGEST_LINE:
                raise Breach(f"wrote more than {LONGEST_LINE >> 20} MiB without the end of a line")
            if not (longest := patience.slice()):
                raise TooLong
            outgoing = self._pump(outgoing, longest)
            self._lines = b"" if until_end else self._lines
        line, _, self._lines = self._lines.partition(b"\n")
        return line

    def _pump(self, outgoing: bytes, longest: float) -> bytes:
        """Wait at most `longest` seconds, send and read what can be; return what is still to be sent.

        Raises:
            Ended: the program has ended, and all that it wrote is read.
        """
        poll = select.poll()
        for stream, events in ((self._out, select.POLLIN), (self._log, select.POLLIN), (self._in, select.POLLOUT)):
            if stream is not self._in or outgoing:
                poll.register(stream, events)
        ready = {number for number, _ in poll.poll(1000 * longest)}
        if self._in.fileno() in ready:
            try:
                outgoing = outgoing[os.write(self._in.fileno(), outgoing[:AT_ONCE]) :]
            except BrokenPipeError:  # its output ends too
                outgoing = b""
        if self._log.fileno() in ready:
            self._read_log()
        if self._out.fileno() in ready:
            if not (data := os.read(self._out.fileno(), AT_ONCE)):
                while self._read_log():
                    pass
                raise Ended(self._process.wait())
            self._lines += data
        return outgoing

    def _read_log(self) -> bool:
        """Read a piece of what it prints; return whether there was one."""
        with contextlib.suppress(BlockingIOError):
            if data := os.read(self._log.fileno(), AT_ONCE):
                self._kept = (self._kept + data)[-PRINTED:]
                if self._heard is not None:
                    self._heard(data)
                return True
        return False

    def _processes(self) -> list[int]:
        """Return the ids of the keeper and of the program, as far as the system lists them."""
        keeper = self._process.pid
        with contextlib.suppress(OSError, ValueError):
            return [keeper, *map(int, Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())]
        return [keeper]


def _open(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
