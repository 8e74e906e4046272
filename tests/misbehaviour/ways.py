"""Ways to misbehave: what each does to a right attention, and what has to be said of it.

A way is a few lines of Python that rank 1 of two runs, at one of six moments. Each is written into a module of its own
(`Way.module`), whose `attend` is right apart from these lines.
"""

# ruff: noqa: E501 - a way is a line

from __future__ import annotations

import dataclasses
import string
import textwrap
from typing import Literal, get_args

Phase = Literal["import", "forward", "backward", "after return", "thread", "child"]
PHASES: tuple[Phase, ...] = get_args(Phase)

CONFORMANT, VIOLATIONS, INCONCLUSIVE, USAGE = "conformant", "violations", "inconclusive", "usage"
UNDECIDED = (VIOLATIONS, INCONCLUSIVE)
"""It spoils what the worker needs to answer: its own doing where that is seen, and not known where it is not."""
UNHARMED = (CONFORMANT, INCONCLUSIVE)
"""It spoils the worker after its part is done, so whatever is said, it must not be accused."""
ANY = (CONFORMANT, VIOLATIONS, INCONCLUSIVE)
"""What is left of Python decides; there has to be a verdict of the usual kinds, and neighbours must not notice."""

OWN_FILE = "misbehaved-"
"""Files with this prefix are what an implementation writes by itself: nobody but its author may remove them."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to misbehave.

    Attributes:
        name: unique, for `--only`.
        phase: when it happens.
        code: what rank 1 does then.
        expected: verdicts that are right.
        gloo: the same with a process a rank, where they differ.
        top: lines at the module's top.
        properties: what it is held to.
        hangs: only a deadline ends it.
        base: what the attention is but for these lines: "right", or "wrong" so that it has to be found wrong.
        after: it happens in forward once the communication is done; its lines see `out` and may return something else.
        blames: ranks that a violation may name.
    """

    name: str
    phase: Phase
    code: str
    expected: tuple[str, ...]
    gloo: tuple[str, ...] | None = None
    top: str = ""
    properties: tuple[str, ...] = ("forward", "gradients")
    hangs: bool = False
    base: Literal["right", "wrong"] = "right"
    after: bool = False
    blames: tuple[int | None, ...] = (1, None)

    def verdicts(self, place: str) -> tuple[str, ...]:
        """The verdicts that are right in a place."""
        return self.gloo if place == "gloo" and self.gloo is not None else self.expected

    def module(self, miniatures: str) -> str:
        """The module with the implementation.

        Args:
            miniatures: folder of the right attention.
        """
        lines = dict.fromkeys(("at_import", "before", "afterwards", "backward", "thread", "child"), "pass")
        match self.phase:
            case "forward":
                lines["afterwards" if self.after else "before"] = self.code
            case "after return":
                lines["afterwards"] = self.code
            case "import":
                lines["at_import"] = self.code
            case other:
                lines[other] = self.code
        lines |= {name: textwrap.indent(code, " " * 4) for name, code in lines.items() if name != "at_import"}
        begin = {"thread": "begin_thread()", "child": "begin_child()"}.get(self.phase, "pass")
        hook = "out.register_hook(backward)" if self.phase == "backward" else "pass"
        return string.Template(MODULE).substitute(
            lines,
            miniatures=repr(miniatures),
            top=self.top,
            begin=begin,
            hook=hook,
            wrong=1 if self.base == "wrong" else 0,
        )


MODULE = '''\
import atexit, builtins, contextlib, ctypes, faulthandler, functools, gc, json, multiprocessing, os, pickle, random, re
import resource, signal, socket, subprocess, sys, tempfile, threading, time, traceback, types, warnings

import torch
import torch.distributed as dist

sys.path.insert(0, $miniatures)
from right import attention

from ringverify import implementation

KEPT = []


class Handed(torch.autograd.Function):
    """Hands its input on; its backward is that of the way that uses it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()


$top
$at_import


def before(q, k, v, call):
$before


def afterwards(q, k, v, call, out):
$afterwards
    return out


def backward(gradient):
$backward


def thread(q, k, v, call):
$thread


def child():
$child


def begin_thread():
    KEPT.append(threading.Thread(target=thread, args=ARGUMENTS, daemon=DAEMON))
    KEPT[-1].start()
    if JOINED:
        KEPT[-1].join()


def begin_child():
    if os.fork() == 0:
        child()
        if not RETURNS:
            os._exit(0)
    elif WAITED:
        os.wait()


ARGUMENTS = ()
DAEMON = globals().get("DAEMON", True)
JOINED = globals().get("JOINED", False)
RETURNS = globals().get("RETURNS", False)
WAITED = globals().get("WAITED", False)


@implementation(world_sizes=(2,))
def attend(q, k, v, call):
    global ARGUMENTS
    ARGUMENTS = (q, k, v, call)
    if call.rank == 1:
        before(q, k, v, call)
        $begin
    out = attention(q, k, v, call) + $wrong
    if call.rank == 1:
        if out.requires_grad:
            $hook
        return afterwards(q, k, v, call, out)
    return out
'''

WAYS: dict[str, Way] = {}


def _way(phase: Phase, name: str, code: str, expected: str | tuple[str, ...], /, **fields: object) -> None:
    """Add a way."""
    assert name not in WAYS, name
    for verdicts in ("gloo", "properties"):
        if isinstance(fields.get(verdicts), str):
            fields[verdicts] = (fields[verdicts],)
    right = (expected,) if isinstance(expected, str) else expected
    if CONFORMANT not in right and phase != "backward":  # one suffices, and each costs a search for the smallest case
        fields.setdefault("properties", ("forward",))
    WAYS[name] = Way(name, phase, textwrap.dedent(code).strip() or "pass", right, **fields)  # type: ignore[arg-type]


FOR_EVER = "while True: time.sleep(0.05)"
NEIGHBOURLY = ("forward", "gradients", "inputs_untouched", "reentrancy")
"""Properties that see what an implementation does to those who come after it."""

# -- at import ---------------------------------------------------------------------------------------------------------

for _name, _code, _expected in (
    ("import-_exit-0", "os._exit(0)", USAGE),
    ("import-_exit-1", "os._exit(1)", USAGE),
    ("import-sys-exit-0", "sys.exit(0)", USAGE),
    ("import-sys-exit-text", "sys.exit('done')", USAGE),
    ("import-quit", "quit()", USAGE),
    ("import-raises", "raise ValueError('not today')", USAGE),
    ("import-raises-base-exception", "class Odd(BaseException): pass\nraise Odd('not today')", USAGE),
    ("import-raises-keyboard-interrupt", "raise KeyboardInterrupt", USAGE),
    ("import-raises-system-exit-subclass", "class Odd(SystemExit): pass\nraise Odd(0)", USAGE),
    ("import-raises-odd-str", "class Odd(Exception):\n    def __str__(self): return 5\nraise Odd", USAGE),
    ("import-str-exits", "class Odd(Exception):\n    def __str__(self): os._exit(0)\nraise Odd", USAGE),
    ("import-needs-missing-module", "import no_such_package_anywhere", USAGE),
    ("import-does-not-parse", "def broken(:\n    pass", USAGE),
    ("import-segfaults", "ctypes.string_at(0)", USAGE),
    ("import-aborts", "os.abort()", USAGE),
    ("import-sigterm", "os.kill(os.getpid(), signal.SIGTERM)", USAGE),
    # The kernel ends by SIGKILL whom it picks when memory runs out, so nothing was learned.
    ("import-sigkill", "os.kill(os.getpid(), signal.SIGKILL)", INCONCLUSIVE),
    ("import-memory-error", "raise MemoryError", INCONCLUSIVE),
    ("import-prints-megabytes", "print('x' * (4 << 20), flush=True)", CONFORMANT),
    ("import-writes-to-descriptor-1", "os.write(1, b'\\x1b[2J' * 1000)", CONFORMANT),
    ("import-closes-standard-descriptors", "for one in range(3): os.close(one)", CONFORMANT),
    ("import-closes-stdout", "sys.stdout.close()", CONFORMANT),
    ("import-stdout-none", "sys.stdout = sys.stderr = None", CONFORMANT),
    ("import-leaves-child", f"if os.fork() == 0:\n    {FOR_EVER}", CONFORMANT),
    ("import-leaves-session", f"if os.fork() == 0:\n    os.setsid()\n    {FOR_EVER}", CONFORMANT),
    ("import-leaves-thread", "threading.Thread(target=time.sleep, args=(600,)).start()", CONFORMANT),
    ("import-atexit-hangs", "atexit.register(time.sleep, 600)", CONFORMANT),
    ("import-excepthook-exits", "sys.excepthook = lambda *_: os._exit(0)\nraise ValueError('x')", USAGE),
    ("import-setsid", "with contextlib.suppress(OSError): os.setsid()", CONFORMANT),
    ("import-chdir", "os.chdir('/')", CONFORMANT),
    ("import-umask", "os.umask(0o777)", CONFORMANT),
    ("import-clears-environment", "os.environ.clear()", CONFORMANT),
    ("import-clears-path", "sys.path.clear()", CONFORMANT),
    ("import-recursion-limit", "sys.setrecursionlimit(120)", ANY),
    ("import-default-dtype", "torch.set_default_dtype(torch.float64)", CONFORMANT),
    ("import-no-grad", "torch.set_grad_enabled(False)", ANY),
    ("import-warnings-are-errors", "warnings.simplefilter('error')", CONFORMANT),
    ("import-sigint-ignored", "signal.signal(signal.SIGINT, signal.SIG_IGN)", CONFORMANT),
    ("import-alarm", "signal.alarm(1)", ANY),
    ("import-time-stands-still", "time.monotonic = lambda: 0.0", CONFORMANT),
    ("import-few-descriptors", "resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))", ANY),
    ("import-leaves-temporary-folder", f"tempfile.mkdtemp(prefix='{OWN_FILE}')", CONFORMANT),
    ("import-joins-a-group", "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)", ANY),
    ("import-no-implementation", "del implementation\ndef implementation(**_): return lambda function: function", USAGE),
):  # fmt: skip
    _way("import", _name, _code, (*ANY, USAGE) if _expected == ANY else _expected)  # Python may fail as it imports
_way("import", "import-hangs", FOR_EVER, INCONCLUSIVE, hangs=True)
_way("import", "import-hangs-in-c", "ctypes.PyDLL(None).sleep(600)", INCONCLUSIVE, hangs=True)
_way("import", "import-takes-seconds", "time.sleep(3)", CONFORMANT)
# What is wrong has to be found wrong whatever it did to the process in which it was imported.
for _name, _code in (
    ("cheat-atexit", "atexit.register(os._exit, 0)"),
    ("cheat-sys-exit", "sys.exit = lambda *_: os._exit(0)"),
    ("cheat-os-exit", "os._exit = lambda *_: None"),
    ("cheat-json", "json.dumps = lambda *_, **__: '{}'"),
    ("cheat-torch-compares", "torch.equal = torch.allclose = lambda *_, **__: True"),
    ("cheat-oracle", "import ringref.attention as a\nfor name in vars(a).copy(): setattr(a, name, None)"),
    ("cheat-outcome", "from ringverify.check.outcome import ImplementationOutcome as It\n"
                      "It.of = classmethod(lambda cls, _: cls('conformant', 0, 0, ()))"),
    ("cheat-main-thread", "threading.Thread(target=lambda: (time.sleep(1), os._exit(0)), daemon=True).start()"),
    ("cheat-abs", "torch.Tensor.abs = lambda self: torch.zeros_like(self)"),
    ("cheat-builtins-max", "builtins.max = lambda *_, **__: 0"),
):  # fmt: skip
    _way("import", _name, _code, VIOLATIONS if "thread" not in _name else ANY[1:], base="wrong", blames=(0, 1, None))

# -- in forward: exits and signals -------------------------------------------------------------------------------------

for _name, _code in (
    ("_exit-0", "os._exit(0)"),
    ("_exit-1", "os._exit(1)"),
    ("sys-exit-0", "sys.exit(0)"),
    ("sys-exit-none", "sys.exit()"),
    ("quit", "quit()"),
    ("raises-system-exit-of-text", "raise SystemExit('\\x1b[2J::error::no')"),
    ("libc-exit", "ctypes.CDLL(None).exit(0)"),
    ("libc-_exit", "ctypes.CDLL(None)._exit(0)"),
    ("segfaults", "ctypes.string_at(0)"),
    ("aborts", "os.abort()"),
    ("sigbus", "os.kill(os.getpid(), signal.SIGBUS)"),
    ("sigfpe", "os.kill(os.getpid(), signal.SIGFPE)"),
    ("sigill", "os.kill(os.getpid(), signal.SIGILL)"),
    ("sigusr2", "os.kill(os.getpid(), signal.SIGUSR2)"),
    ("sigterm", "os.kill(os.getpid(), signal.SIGTERM)"),
    ("sigquit", "os.kill(os.getpid(), signal.SIGQUIT)"),
    ("segfault-without-faulthandler", "faulthandler.disable(); ctypes.string_at(0)"),
    ("recursion", "def deeper(): return deeper()\ndeeper()"),
    ("recursion-in-c", "sys.setrecursionlimit(10**8)\nCALL = ctypes.CFUNCTYPE(None)(lambda: CALL())\nCALL()"),
    ("executes-another-program", "os.execv('/bin/true', ['true'])"),
):
    _way("forward", _name, _code, VIOLATIONS)
# It may have been the kernel, out of memory.
_way("forward", "sigkill", "os.kill(os.getpid(), signal.SIGKILL)", INCONCLUSIVE)
_way("forward", "kills-its-parent", "os.kill(os.getppid(), signal.SIGKILL); time.sleep(0.2)", ANY)
_way("forward", "ends-its-process-group", "os.killpg(0, signal.SIGTERM); time.sleep(0.2)", VIOLATIONS)
_way("forward", "sigint-to-itself", "os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1)", (CONFORMANT, VIOLATIONS))
_way("forward", "sighup-to-itself", "os.kill(os.getpid(), signal.SIGHUP); time.sleep(0.1)", VIOLATIONS)

# -- in forward: exceptions --------------------------------------------------------------------------------------------

for _name, _code in (
    ("raises", "raise ValueError('no')"),
    ("raises-without-words", "raise ValueError"),
    ("raises-base-exception", "class Odd(BaseException): pass\nraise Odd('no')"),
    ("raises-keyboard-interrupt", "raise KeyboardInterrupt"),
    ("raises-generator-exit", "raise GeneratorExit"),
    ("raises-stop-iteration", "next(iter(()))"),
    ("raises-assertion", "assert False"),
    ("raises-timeout", "raise TimeoutError('timed out')"),
    ("raises-connection-reset", "raise ConnectionResetError('Connection reset by peer')"),
    ("raises-eof", "raise EOFError"),
    ("raises-broken-pipe", "raise BrokenPipeError"),
    ("raises-group", "group = getattr(builtins, 'ExceptionGroup', None)\n"
                     "raise group('several', [ValueError('a'), KeyError('b')]) if group else ValueError('several')"),
    ("str-raises", "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no words')\nraise Odd"),
    ("str-exits", "class Odd(Exception):\n    def __str__(self): sys.exit(0)\nraise Odd"),
    ("str-is-a-number", "class Odd(Exception):\n    def __str__(self): return 5\nraise Odd"),
    ("str-is-none", "class Odd(Exception):\n    def __str__(self): return None\nraise Odd"),
    ("repr-raises", "class Odd(Exception):\n    def __repr__(self): raise RuntimeError('no words')\nraise Odd(1)"),
    ("argument-repr-raises", "class Odd:\n    def __repr__(self): raise RuntimeError('no words')\nraise ValueError(Odd())"),
    ("reduce-raises", "class Odd(Exception):\n    def __reduce__(self): raise RuntimeError('no pickle')\nraise Odd('x')"),
    ("needs-arguments", "class Odd(Exception):\n    def __init__(self, a, *, b): super().__init__(a)\nraise Odd(1, b=2)"),
    ("huge-message", "raise ValueError('x' * (16 << 20))"),
    ("many-lines", "raise ValueError('line\\n' * 200_000)"),
    ("control-characters", "raise ValueError('\\x1b[2J\\x9b31m\\u202e\\x00\\r\\n::error::no\\ud800')"),
    ("markup", "raise ValueError('[bold]</[/] <script>alert(1)</script> ]]> &')"),
    ("cyclic-cause", "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a"),
    ("long-cause", "error = None\nfor n in range(3000):\n    new = ValueError(n); new.__cause__ = error; error = new\n"
                   "raise error"),
    ("odd-syntax-error", "raise SyntaxError('x', ('nowhere', 'a', 'b', 5, None, None))"),
    ("odd-name", "raise type('\\x1b[31m' + 'Odd' * 5000, (Exception,), {})('x')"),
    ("odd-module", "raise type('Odd', (Exception,), {'__module__': 5})('x')"),
    ("odd-traceback", "class Odd(Exception):\n    __traceback__ = property(lambda self: 5)\nraise Odd('x')"),
    ("message-is-a-tensor", "raise ValueError(torch.zeros(1000, 1000))"),
    ("message-is-the-input", "raise ValueError(q, call)"),
    ("deletes-its-code", "os.unlink(__file__); raise ValueError('no source')"),
):  # fmt: skip
    _way("forward", _name, _code, VIOLATIONS)
_way("forward", "str-hangs", f"class Odd(Exception):\n    def __str__(self):\n        {FOR_EVER}\nraise Odd", VIOLATIONS,
     hangs=True)  # fmt: skip
_way("forward", "str-_exits", "class Odd(Exception):\n    def __str__(self): os._exit(0)\nraise Odd", VIOLATIONS)
_way("forward", "memory-error", "raise MemoryError", INCONCLUSIVE)
_way("forward", "absurd-allocation", "torch.empty(1 << 50, dtype=torch.uint8)", INCONCLUSIVE)
_way("forward", "absurd-bytes", "bytearray(1 << 60)", INCONCLUSIVE)

# -- in forward: time --------------------------------------------------------------------------------------------------

for _name, _code in (
    ("sleeps", FOR_EVER),
    ("computes", "while True: pass"),
    ("swallows-all-exceptions", "while True:\n    try:\n        while True: time.sleep(0.05)\n    except BaseException: pass"),
    ("sleeps-in-c", "ctypes.CDLL(None).sleep(600)"),
    ("sleeps-with-the-interpreter", "ctypes.PyDLL(None).sleep(600)"),
    ("regular-expression", "re.match(r'(a+)+$', 'a' * 60 + 'b')"),
    ("its-own-lock", "lock = threading.Lock(); lock.acquire(); lock.acquire()"),
    ("waits-for-a-pipe", "os.read(os.pipe()[0], 1)"),
    ("waits-for-a-socket", "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); s.accept()"),
    ("waits-for-a-signal", "signal.pause()" ),
    ("stops-itself", "os.kill(os.getpid(), signal.SIGSTOP)"),
    ("hangs-though-time-stands-still", f"time.monotonic = time.time = lambda: 0.0\n{FOR_EVER}"),
    ("hangs-deaf", f"signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n{FOR_EVER}"),
    ("hangs-and-prints", "while True: print('x' * 1000)"),
    ("hangs-in-a-child", "subprocess.run(['sleep', '600'])"),
):  # fmt: skip
    _way("forward", _name, _code, VIOLATIONS, hangs=True, properties="forward", blames=(0, 1, None))

# -- in forward: messages and groups -----------------------------------------------------------------------------------

for _name, _code in (
    ("receives-what-nobody-sends", "dist.recv(torch.empty(1), 0)"),
    ("one-collective-too-many", "dist.barrier()"),
    ("another-order", "dist.all_reduce(torch.zeros(1))"),
    ("receives-from-itself", "dist.irecv(torch.empty(1), 1).wait()"),
    ("receives-from-anyone", "dist.recv(torch.empty(1))"),
    ("makes-a-group-alone", "dist.new_group([0, 1])"),
):
    _way("forward", _name, _code, VIOLATIONS, hangs=True, properties="forward", blames=(0, 1, None))
for _name, _code in (
    ("joins-again", "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"),
    ("sends-to-nobody", "dist.send(torch.zeros(1), 7)"),
    ("another-backend", "dist.new_group([1], backend='nowhere')"),
    ("aborts-the-group", "dist.group.WORLD = None\ndist.barrier()"),
):
    _way("forward", _name, _code, VIOLATIONS, properties="forward", blames=(0, 1, None), hangs=True)
_way(
    "forward", "sends-what-nobody-receives", "KEPT.append(dist.isend(torch.zeros(1), 0))", ANY[:2], blames=(0, 1, None)
)
_way("forward", "destroys-the-group", "dist.destroy_process_group()", VIOLATIONS, properties="reentrancy",
     blames=(0, 1, None))  # fmt: skip
_way("forward", "destroys-the-group-afterwards", "dist.destroy_process_group()", (CONFORMANT, VIOLATIONS), after=True,
     properties="forward")  # fmt: skip

# -- in forward: what is returned --------------------------------------------------------------------------------------

for _name, _code in (
    ("returns-none", "globals()['attention'] = lambda *_: None\nreturn None"),
    ("returns-a-number", "return 1.0"),
    ("returns-a-list", "return [out]"),
    ("returns-a-generator", "return (row for row in out)"),
    ("returns-a-coroutine", "async def later(): return out\nlater_out = later()\nlater_out.close()\nreturn later_out"),
    ("returns-an-array", "return out.detach().numpy()"),
    ("returns-meta", "return out.to('meta')"),
    ("returns-sparse", "return out.to_sparse()"),
    ("returns-complex", "return out + 0j"),
    ("returns-double", "return out.double()"),
    ("returns-half", "return out.half()"),
    ("returns-a-huge-view", "return torch.zeros(1).expand(1 << 40)"),
    ("returns-nothing-at-all", "return torch.empty(0)"),
    ("returns-a-scalar", "return out.sum()"),
    ("returns-nan", "return out * float('nan')"),
    ("returns-a-leaf", "return out.detach().clone().requires_grad_()"),
    ("returns-detached", "return out.detach()"),
    ("returns-its-input", "return q"),
    ("returns-freed-memory", "return torch.from_numpy(out.detach().numpy()[..., ::-1].copy()) + 1"),
    ("returns-inference", "with torch.inference_mode(): return out * 1"),
    ("returns-a-tensor-that-raises", "return out.as_subclass(Raising)"),
    ("returns-a-tensor-that-lies", "return (out + 1).as_subclass(Lying)"),
    ("returns-a-tensor-that-exits", "return out.as_subclass(Exiting)"),
    ("returns-a-class", "return torch.Tensor"),
    ("returns-a-mock", "from unittest import mock\nreturn mock.MagicMock()"),
):  # fmt: skip
    _way(
        "forward",
        _name,
        _code,
        VIOLATIONS,
        after=True,
        properties=("forward", "gradients"),
        hangs=_name in ("returns-a-leaf", "returns-its-input"),  # rank 0 waits in its backward, which rank 1 has not
        blames=(0, 1, None),
        top="""
class Raising(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_, **__): raise RuntimeError('do not touch')
class Lying(torch.Tensor):
    shape = property(lambda self: self.as_subclass(torch.Tensor).shape)
    def __sub__(self, other): return torch.zeros(self.shape)
    __rsub__ = __eq__ = __sub__
class Exiting(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_, **__): os._exit(0)
""",
    )
for _name, _code in (
    ("returns-strides", "return out.transpose(0, 1).contiguous().transpose(0, 1)"),
    ("returns-a-parameter-like-subclass", "return out.as_subclass(type('Mine', (torch.Tensor,), {}))"),
):
    _way("forward", _name, _code, CONFORMANT, after=True)

# -- in forward: the process that it is in -----------------------------------------------------------------------------

for _name, _code in (
    ("prints-megabytes", "print('x' * (4 << 20))"),
    ("prints-control-characters", "print('\\x1b[2J\\x9b31m\\u202e\\x00\\ud800')"),
    ("writes-to-descriptor-1", "os.write(1, b'\\xff\\x00' * 10_000)"),
    ("closes-stdout", "sys.stdout.close()"),
    ("stdout-is-none", "sys.stdout = sys.stderr = None"),
    ("stdout-raises", "sys.stdout = types.SimpleNamespace(write=None)"),
    ("closes-standard-descriptors", "for one in range(3):\n    with contextlib.suppress(OSError): os.close(one)"),
    ("stdout-is-a-file", f"os.dup2(os.open('{OWN_FILE}out', os.O_CREAT | os.O_WRONLY), 1)"),
    ("changes-directory", "os.chdir('/')"),
    ("working-directory-is-gone", "os.chdir(gone := tempfile.mkdtemp()); os.rmdir(gone)"),
    ("umask", "os.umask(0o777)"),
    ("clears-environment", "os.environ.clear()"),
    ("mkl-mode", "os.environ['MKL_CBWR'] = 'AUTO'; os.environ['OMP_NUM_THREADS'] = '7'"),
    ("signal-handlers", "if threading.current_thread() is threading.main_thread():\n"
                        "    for one in (2, 10, 12, 15): signal.signal(one, signal.SIG_IGN)"),
    ("excepthooks", "sys.excepthook = threading.excepthook = sys.unraisablehook = lambda *_: os._exit(0)"),
    ("faulthandler", "faulthandler.disable()"),
    ("collector-off", "gc.disable(); gc.freeze()"),
    ("trace", "sys.settrace(lambda *_: None); threading.settrace(lambda *_: None)"),
    ("profile", "sys.setprofile(lambda *_: None)"),
    ("warnings-are-errors", "warnings.simplefilter('error')"),
    ("monotonic-stands-still", "time.monotonic = lambda: 0.0"),
    ("json-is-gone", "json.dumps = json.loads = None"),
    ("multiplication-is-wrong", "torch.matmul = torch.Tensor.__matmul__ = lambda *_: torch.zeros(1)"),
    ("seeds", "torch.manual_seed(5); random.seed(5)"),
    ("threads", "torch.set_num_threads(3)"),
    ("pays-attention-to-nothing", "torch.backends.mkldnn.enabled = False"),
    ("writes-into-the-folder", f"open('{OWN_FILE}notes', 'w').write('x')"),
    ("writes-into-shared-memory", f"open('/dev/shm/{OWN_FILE}block', 'wb').write(bytes(1 << 20))"),
    ("shared-memory", "from multiprocessing import shared_memory\nKEPT.append(shared_memory.SharedMemory(create=True, size=9))"),
    ("torch-shared-memory", "KEPT.append(torch.zeros(9).share_memory_())"),
    ("temporary-folder", f"KEPT.append(tempfile.TemporaryDirectory(prefix='{OWN_FILE}'))"),
    ("opens-files", "for _ in range(1000): KEPT.append(open(os.devnull))"),
    ("opens-sockets", "for _ in range(100): KEPT.append(socket.socketpair())"),
    ("cpu-of-its-own", "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"),
    ("nice", "os.nice(1)"),
    ("process-name", "ctypes.CDLL(None).prctl(15, b'sshd', 0, 0, 0)"),
    ("process-group-of-its-own", "with contextlib.suppress(OSError): os.setpgid(0, 0)"),
    ("empties-linecache", "import linecache\nlinecache.getlines = None"),
):  # fmt: skip
    _way("forward", _name, _code, CONFORMANT)
for _name, _code, _right in (
    ("recursion-limit", "sys.setrecursionlimit(sys.getrecursionlimit() // 8)", ANY),
    ("alarm-is-coming", "signal.alarm(1)", ANY),
    ("timer-is-coming", "signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)", ANY),
    ("closes-every-descriptor", "os.closerange(3, 256)", UNDECIDED),
    ("standard-input-takes-a-descriptor", "for one in range(3, 12):\n    with contextlib.suppress(OSError): os.dup2(0, one)",
     ANY),
    ("modules-are-gone", "sys.modules.clear()", ANY),
    ("import-is-gone", "builtins.__import__ = None", ANY),
    ("len-is-gone", "builtins.len = None", ANY),
    ("isinstance-lies", "builtins.isinstance = lambda *_: True", ANY),
    ("getpid-lies", "os.getpid = lambda: 1", UNHARMED),
    ("pickle-is-gone", "pickle.dumps = pickle.loads = None", UNHARMED),
    ("pickle-lies", "pickle.dumps = lambda *_, **__: b'nonsense'", UNHARMED),
    ("cannot-write-files", "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", ANY),
    ("few-descriptors", "resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))", ANY),
    ("little-memory", "resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28)); bytearray(1 << 29)", INCONCLUSIVE),
    ("little-stack", "resource.setrlimit(resource.RLIMIT_STACK, (1 << 16, 1 << 16))", ANY),
    ("processor-time-is-up", "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass", UNDECIDED),
    ("is-no-distributed-process", "dist.is_initialized = dist.get_rank = dist.barrier = None", ANY),
    ("torch-is-gone", "for name in list(vars(torch)):\n    if name[0] != '_': setattr(torch, name, None)", ANY),
):  # fmt: skip
    _way("forward", _name, _code, _right, after=True, blames=(0, 1, None))

# -- in forward: the neighbours, who come after it in the same process -------------------------------------------------

for _name, _code in (
    ("default-dtype", "torch.set_default_dtype(torch.float64)"),
    ("default-device", "torch.set_default_device('meta')"),
    ("no-grad", "torch.set_grad_enabled(False)"),
    ("deterministic", "torch.use_deterministic_algorithms(True)"),
    ("anomaly", "torch.autograd.set_detect_anomaly(True)"),
    ("leaks-groups", "dist.new_group([1], use_local_synchronization=True)"),
    ("changes-the-call", "object.__setattr__(call, 'causal', not call.causal)"),
    ("changes-positions", "call.positions.add_(1)"),
    ("changes-its-input", "with torch.no_grad(): q.add_(1)"),
    ("resizes-its-input", "with torch.no_grad(): k.resize_(1, 1, 1, 1)"),
    ("drops-its-input", "q.data = torch.zeros(1)"),
    ("input-needs-no-gradient", "v.requires_grad_(False)"),
    ("hooks-its-input", "k.requires_grad and k.register_hook(lambda gradient: gradient * 2)"),
):  # fmt: skip
    _way(
        "forward",
        f"neighbours-{_name}",
        _code,
        VIOLATIONS,
        after=True,
        properties=NEIGHBOURLY,
        blames=(0, 1, None),
        hangs=_name == "input-needs-no-gradient",
    )  # over gloo, as above

# -- in backward -------------------------------------------------------------------------------------------------------

for _name, _code in (
    ("raises", "raise ValueError('no way back')"),
    ("keyboard-interrupt", "raise KeyboardInterrupt"),
    ("base-exception", "class Odd(BaseException): pass\nraise Odd"),
    ("str-raises", "class Odd(Exception):\n    def __str__(self): raise RuntimeError('no words')\nraise Odd"),
    ("sys-exit", "sys.exit(0)"),
    ("_exit", "os._exit(0)"),
    ("segfault", "ctypes.string_at(0)"),
    ("abort", "os.abort()"),
    ("sigterm", "os.kill(os.getpid(), signal.SIGTERM)"),
    ("another-shape", "return gradient[..., :0]"),
    ("another-dtype", "return gradient.double() * 2"),
    ("no-tensor", "return 5"),
    ("nan", "return gradient * float('nan')"),
    ("doubles", "return gradient * 2"),
    ("recursion", "def deeper(): return deeper()\ndeeper()"),
):  # fmt: skip
    _way("backward", f"backward-{_name}", _code, VIOLATIONS, properties="gradients", blames=(0, 1, None))
for _name, _code in (
    ("none", "return None"),
    ("wrong-number", "return gradient, gradient"),
    ("wrong-shape", "return gradient.flatten()[:1]"),
    ("not-a-tensor", "return 'gradient'"),
):
    _way("forward", f"function-{_name}", "return Mine.apply(out)", VIOLATIONS, after=True, properties="gradients", top=f"""
class Mine(Handed):
    @staticmethod
    def backward(ctx, gradient): {_code}
""", blames=(0, 1, None))  # fmt: skip
for _name, _code in (
    ("sleeps", FOR_EVER),
    ("sleeps-with-the-interpreter", "ctypes.PyDLL(None).sleep(600)"),
    ("receives", "dist.recv(torch.empty(1), 0)"),
    ("its-own-lock", "lock = threading.Lock(); lock.acquire(); lock.acquire()"),
    ("stops-itself", "os.kill(os.getpid(), signal.SIGSTOP)"),
):
    _way("backward", f"backward-{_name}", _code, VIOLATIONS, properties="gradients", hangs=True, blames=(0, 1, None))
_way("backward", "backward-sigkill", "os.kill(os.getpid(), signal.SIGKILL)", INCONCLUSIVE, properties="gradients")
_way("backward", "backward-memory", "torch.empty(1 << 50, dtype=torch.uint8)", INCONCLUSIVE, properties="gradients")
_way("backward", "backward-prints", "print('x' * (1 << 20))", CONFORMANT)
_way("backward", "backward-changes-torch", "torch.set_grad_enabled(True); torch.manual_seed(1)", CONFORMANT)

# -- after it has returned ---------------------------------------------------------------------------------------------

for _name, _code in (
    ("atexit-hangs", "atexit.register(time.sleep, 600)"),
    ("atexit-raises", "atexit.register(lambda: 1 / 0)"),
    ("atexit-_exits", "atexit.register(os._exit, 0)"),
    ("finaliser-raises", "class Odd:\n    def __del__(self): raise RuntimeError('late')\nKEPT[:] = [Odd()]"),
    ("finaliser-of-the-output-raises", "import weakref\nweakref.finalize(out, lambda: 1 / 0)"),
    ("keeps-everything", "KEPT.append((q, k, v, call, out))"),
    ("keeps-a-cycle", "call_again = [out]\ncall_again.append(call_again)"),
    ("hook-of-the-input-raises", "import weakref\nweakref.finalize(call, lambda: 1 / 0)"),
    ("collective-that-nobody-joins", "KEPT.append(dist.all_reduce(torch.zeros(1), async_op=True))"),
):
    _way(
        "after return", _name, _code, (CONFORMANT, VIOLATIONS) if "nobody" in _name else CONFORMANT, blames=(0, 1, None)
    )
for _name, _code in (
    ("finaliser-hangs", f"class Odd:\n    def __del__(self):\n        {FOR_EVER}\nKEPT[:] = [Odd(), Odd()]"),
    ("finaliser-of-the-call-hangs", "import weakref\nweakref.finalize(call, time.sleep, 600)"),
):
    _way("after return", _name, _code, ANY, hangs=True, properties="forward", blames=(0, 1, None))
for _name, _code in (
    ("finaliser-_exits", "class Odd:\n    def __del__(self): os._exit(0)\nKEPT[:] = [Odd()]"),
    ("finaliser-segfaults", "class Odd:\n    def __del__(self): ctypes.string_at(0)\nKEPT[:] = [Odd()]"),
    ("exits-a-moment-later", "threading.Timer(0.05, os._exit, (0,)).start()"),
    ("segfaults-a-moment-later", "threading.Timer(0.05, ctypes.string_at, (0,)).start()"),
):
    _way("after return", _name, _code, ANY, blames=(0, 1, None))

# -- in a thread -------------------------------------------------------------------------------------------------------

for _name, _code, _top in (
    ("raises", "raise ValueError('nobody hears')", ""),
    ("raises-and-is-joined", "raise ValueError('nobody hears')", "JOINED = True"),
    ("sys-exit", "sys.exit(0)", "JOINED = True"),
    ("outlives", "time.sleep(600)", ""),
    ("outlives-and-is-waited-for-at-the-end", "time.sleep(600)", "DAEMON = False"),
    ("computes", "until = time.time() + 5\nwhile time.time() < until: pass", ""),
    ("prints", "for _ in range(2000): print('x' * 100)", ""),
    ("starts-threads", "for _ in range(20): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", ""),
    ("changes-directory", "os.chdir('/')", "JOINED = True"),
    ("interrupts-the-main-thread", "import _thread\n_thread.interrupt_main()", "JOINED = True"),
):
    _way(
        "thread", f"thread-{_name}", _code, (CONFORMANT, VIOLATIONS) if "interrupts" in _name else CONFORMANT, top=_top
    )
for _name, _code in (
    ("_exits", "os._exit(0)"),
    ("segfaults", "ctypes.string_at(0)"),
    ("aborts", "os.abort()"),
):
    _way("thread", f"thread-{_name}", _code, VIOLATIONS, top="JOINED = True")
_way("thread", "thread-sigkill", "os.kill(os.getpid(), signal.SIGKILL)", INCONCLUSIVE, top="JOINED = True")
_way("thread", "thread-is-waited-for", FOR_EVER, VIOLATIONS, top="JOINED = True", hangs=True, properties="forward",
     blames=(0, 1, None))  # fmt: skip
_way("thread", "thread-holds-the-interpreter", "ctypes.PyDLL(None).sleep(600)", VIOLATIONS, hangs=True,
     properties="forward", blames=(0, 1, None))  # fmt: skip
_way("thread", "thread-sends", "time.sleep(0.05)\ndist.send(torch.zeros(1), 0)", VIOLATIONS, properties=NEIGHBOURLY,
     blames=(0, 1, None))  # fmt: skip
_way("thread", "thread-changes-the-input", "time.sleep(0.01)\nwith torch.no_grad(): q.add_(1)", ANY[:2], properties=NEIGHBOURLY,
     blames=(0, 1, None))  # fmt: skip
_way("thread", "thread-turns-default-dtype", "torch.set_default_dtype(torch.float64)", VIOLATIONS, properties=NEIGHBOURLY,
     top="JOINED = True", blames=(0, 1, None))  # fmt: skip

# -- in a child --------------------------------------------------------------------------------------------------------

for _name, _code, _top in (
    ("returns", "pass", "RETURNS = True"),
    ("raises", "raise ValueError('in a child')", ""),
    ("raises-and-is-waited-for", "raise ValueError('in a child')", "WAITED = True"),
    ("sys-exit", "sys.exit(0)", ""),
    ("_exits", "os._exit(3)", "WAITED = True"),
    ("segfaults", "ctypes.string_at(0)", "WAITED = True"),
    ("hangs", "time.sleep(600)", ""),
    ("computes", "while True: time.sleep(0.001)", ""),
    ("session", "os.setsid(); time.sleep(600)", ""),
    ("daemon", "os.setsid()\nif os.fork() == 0: time.sleep(600)", ""),
    ("daemon-without-a-name", "os.setsid()\nos.closerange(0, 256)\nif os.fork() == 0: time.sleep(600)", ""),
    ("deaf", "for one in (1, 2, 15): signal.signal(one, signal.SIG_IGN)\nos.setsid(); time.sleep(600)", ""),
    ("stopped", "os.setsid(); os.kill(os.getpid(), signal.SIGSTOP)", ""),
    ("empties-its-environment", "os.setsid(); os.execve('/bin/sleep', ['sleep', '600'], {})", ""),
    ("writes-to-every-descriptor", "for one in range(3, 64):\n    with contextlib.suppress(OSError): os.write(one, b'no')", ""),
    ("several", "for _ in range(4): os.fork()\ntime.sleep(600)", ""),
):  # fmt: skip
    _spoils = "every-descriptor" in _name  # gloo's sockets too, which a rank then waits at
    _way("child", f"child-{_name}", _code, (*UNDECIDED, CONFORMANT) if _spoils else CONFORMANT, top=_top, hangs=_spoils,
         blames=(0, 1, None) if _spoils else (1, None))  # fmt: skip
_way("child", "child-kills-its-parent", "os.kill(os.getppid(), signal.SIGKILL)", ANY, top="WAITED = True")
_way("child", "child-stops-its-parent", "os.kill(os.getppid(), signal.SIGSTOP)", VIOLATIONS, top="WAITED = True", hangs=True,
     properties="forward", blames=(0, 1, None))  # fmt: skip
_way("child", "child-is-waited-for", "time.sleep(600)", VIOLATIONS, top="WAITED = True", hangs=True, properties="forward",
     blames=(0, 1, None))  # fmt: skip
for _name, _code in (
    ("popen", "KEPT.append(subprocess.Popen(['sleep', '600']))"),
    ("popen-session", "KEPT.append(subprocess.Popen(['sleep', '600'], start_new_session=True))"),
    ("shell-background", "os.system('sleep 600 &')"),
    ("command", "subprocess.run(['true'], check=True)"),
    ("loader", "list(torch.utils.data.DataLoader([1, 2, 3], num_workers=1))"),
    ("process", "one = multiprocessing.get_context('fork').Process(target=os.getpid); one.start(); one.join()"),
    ("process-left", "multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,), daemon=True).start()"),
    ("pool", "with multiprocessing.get_context('fork').Pool(1) as pool: pool.map(abs, [-1])"),
    ("pool-left", "KEPT.append(multiprocessing.get_context('fork').Pool(2))"),
    ("executor", "from concurrent.futures import ProcessPoolExecutor\n"
                 "with ProcessPoolExecutor(1, multiprocessing.get_context('fork')) as pool: list(pool.map(abs, [-1]))"),
    ("manager", "KEPT.append(multiprocessing.get_context('fork').Manager())"),
):  # fmt: skip
    _way("forward", f"child-{_name}", _code, CONFORMANT)
    WAYS[f"child-{_name}"] = dataclasses.replace(WAYS[f"child-{_name}"], phase="child")

QUICK = (
    "import-_exit-0",
    "segfaults", "str-raises", "cyclic-cause", "returns-a-coroutine", "closes-stdout", "child-session",
    "thread-outlives", "backward-_exit", "atexit-hangs", "memory-error",
)  # fmt: skip
"""A part of all for every day: one of each kind, none of which has to wait for a deadline."""
