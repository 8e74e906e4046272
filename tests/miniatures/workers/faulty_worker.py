"""A worker of numpy that misbehaves in the way that its argument names, from its third case on where it says so.

It answers without safetensors, whose format it writes itself: what it writes need not be right.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "ringverify" / "cli" / "workers"))

import numpy as np
import numpy_worker as right
from safetensors.numpy import load_file, save_file

WAY = sys.argv[1]
NOTE = sys.argv[2] if len(sys.argv) > 2 else None
TIMES = itertools.count(1)
"""How many cases it has been asked for."""
SAY = os.fdopen(os.dup(1), "wb", buffering=0)
HELLO = {
    "kind": "hello",
    "protocol": 1,
    "name": WAY,
    "capabilities": right.CAPABILITIES,
    "reports_changes": True,
}


def say(**message):
    """Write a message."""
    SAY.write(json.dumps(message).encode() + b"\n")


def before_hello():
    """Ways to begin."""
    match WAY:
        case "garbage_before_hello":
            print("Loading weights: 100%", flush=True)
        case "another_version":
            HELLO["protocol"] = 2
        case "exits_at_once":
            sys.exit("no module named 'jax'")
        case "exits_well_at_once":
            sys.exit()
        case "killed_at_once":
            os.kill(os.getpid(), signal.SIGKILL)
        case "never_says_hello":
            time.sleep(3600)
        case "unknown_keyword":
            HELLO["capabilities"] = {"shardign": "zigzag"}
        case "impossible_value":
            HELLO["capabilities"] = {"sharding": "diagonal"}
        case "unseen_claim":
            HELLO["capabilities"] = {"memory": "streaming"}
        case "contradicts_itself":
            HELLO["capabilities"] = {"lse_gradient": True}
        case "needs_huge_heads":
            HELLO["capabilities"] = {"heads_multiple": 10**8}
        case "needs_huge_dimensions":
            HELLO["capabilities"] = {"head_dims": [64, 10**9]}
        case "needs_huge_lengths":
            HELLO["capabilities"] = {"length_multiple": 10**9}
        case "hello_with_an_empty_name":
            HELLO["name"] = " "
        case "hello_without_a_name":
            del HELLO["name"]
        case "hello_of_another_type":
            HELLO["protocol"] = "1"
        case "begins_with_a_result":
            say(kind="result", case=1)
            time.sleep(3600)
        case "flood_before_hello":
            SAY.write(b"x" * (1 << 22))
        case "says_no_changes":
            HELLO["reports_changes"] = False


def answer(case):
    """Ways to answer a case."""
    number, path = case["case"], case["outputs"]
    inputs = load_file(case["inputs"])
    results = {name: np.ascontiguousarray(array) for name, array in right.results_of(case, inputs).items()}
    told = {"kind": "result", "case": number}
    match WAY:
        case "hangs":
            time.sleep(3600)
        case "exits_well":
            sys.exit()
        case "exits":
            sys.exit(3)
        case "exits_once" if not os.path.exists(NOTE):
            Path(NOTE).touch()
            sys.exit(3)
        case "exits_when_asked_twice" if next(TIMES) == 2:
            sys.exit(3)
        case "aborts":
            os.abort()
        case "is_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kills_its_parent":
            os.kill(os.getppid(), signal.SIGKILL)
        case "raises":
            told = {"kind": "error", "case": number, "exception": "ValueError", "text": "no\nmore"}
            told["traceback"] = "Traceback (most recent call last): …"
        case "raises_surrogates":
            told = {"kind": "error", "case": number, "exception": "OSError", "text": "no \ud800", "traceback": "\ud800"}
        case "raises_memory_error":
            told = {"kind": "error", "case": number, "exception": "MemoryError"}
        case "refuses_all":
            told = {"kind": "unsupported", "case": number, "reason": "no such length"}
        case "refuses_some" if next(TIMES) % 2:
            told = {"kind": "unsupported", "case": number, "reason": "no such length"}
        case "another_shape":
            results["out"] = results["out"][:, :, :, :0]
        case "swapped_layout":
            results["out"] = np.zeros((*results["out"].swapaxes(1, 2).shape[:3], 77), results["out"].dtype)
        case "another_dtype":
            results["out"] = results["out"].astype(np.float16)
        case "wrong_numbers":
            results["out"] = results["out"] * 2
        case "wrong_on_the_last_rank":
            results["out"][:, case["positions"][-1]] += 1
        case "without_lse":
            del results["lse"]
        case "another_case":
            told["case"] = number + 1
        case "no_message_at_all":
            told = {"kind": "resulted"}
        case "case_of_another_type":
            told["case"] = str(number)
        case "pads_to_the_longest_line":
            told["more"] = "x" * ((1 << 20) - len(json.dumps(told | {"more": ""})))
        case "pads_by_one_too_many":
            told["more"] = "x" * ((1 << 20) + 1 - len(json.dumps(told | {"more": ""})))
        case "floods_the_protocol":
            for _ in range(1 << 10):
                SAY.write(b"x" * (1 << 16))
        case "floods_the_log":
            for _ in range(200):
                os.write(2, b"x" * (1 << 14) + b"\n")
        case "prints_into_the_protocol":
            print("step 1 of 3", flush=True)
        case "closes_its_output":
            os.close(1)
            SAY.close()
            time.sleep(3600)
        case "ignores_its_input":
            pass
        case "changes_its_inputs":
            told["changed"] = ["k"]
        case "changes_what_is_no_input":
            told["changed"] = ["k", "dout"]
        case "took_less_than_no_time":
            told["seconds"] = -5
        case "took_forever":
            told["seconds"] = 10**400
        case "leaves_children":
            sleep = "import time; time.sleep(3600)"
            children = [subprocess.Popen([sys.executable, "-c", sleep], start_new_session=new) for new in (False, True)]
            with open(NOTE, "a", encoding="utf-8") as note:
                print(*(child.pid for child in children), file=note)
        case "leaves_files":
            with open(path + ".more", "wb") as file:
                file.write(b"x" * 1000)
    match WAY:
        case "no_file":
            pass
        case "empty_file":
            open(path, "wb").close()
        case "garbage_file":
            with open(path, "wb") as file:
                file.write(b"\xff" * 100)
        case "nested_header":
            with open(path, "wb") as file:
                file.write((1500).to_bytes(8, "little") + b"[" * 1500)
        case "cut_file":
            save_file(results, path)
            os.truncate(path, os.path.getsize(path) - 1)
        case "longer_file":
            save_file(results, path)
            os.truncate(path, os.path.getsize(path) + 1)
        case "huge_file":
            save_file(results, path)
            os.truncate(path, 1 << 40)
        case "a_pipe":
            os.mkfifo(path)
        case "a_link":
            os.symlink("/dev/zero", path)
        case "a_folder":
            os.mkdir(path)
        case _:
            save_file(results, path)
    if WAY == "answers_twice":
        SAY.write(2 * (json.dumps(told).encode() + b"\n"))
    else:
        say(**told)
    if WAY == "answers_twice_later":
        time.sleep(0.2)
        say(**told)
    match WAY:
        case "exits_afterwards":
            sys.exit()
        case "exits_badly_afterwards":
            sys.exit("3 tensors were never freed")
        case "exits_badly_a_while_afterwards":
            time.sleep(0.3)
            sys.exit(3)
        case "aborts_afterwards":
            os.abort()


def after_hello():
    """Ways to go on without being asked, a number of seconds later."""
    if WAY in ("says_hello_twice", "answers_before_it_is_asked", "prints_before_it_is_asked"):
        time.sleep(float(NOTE))
    match WAY:
        case "says_hello_twice":
            say(**HELLO)
        case "answers_before_it_is_asked":
            say(kind="result", case=1)
        case "prints_before_it_is_asked":
            print("step 1 of 3", flush=True)


before_hello()
say(**HELLO)
after_hello()
if WAY == "ignores_bye":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for line in sys.stdin:
    message = json.loads(line)
    if message["kind"] == "case":
        answer(message)
    elif WAY == "ignores_bye":
        time.sleep(3600)
    elif message["kind"] == "bye":
        break
