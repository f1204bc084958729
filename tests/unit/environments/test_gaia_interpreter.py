"""The interpreter of the agents of `gaia`: plain Python, whatever the code does."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from envserver_environments.gaia.interpreter import process as interpreters
from envserver_environments.gaia.interpreter.inside import answer_text
from envserver_environments.gaia.interpreter.process import Interpreter, Outcome, observation


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreter]:
    monkeypatch.chdir(tmp_path)
    interpreter = Interpreter({"double": lambda value: value * 2})
    yield interpreter
    interpreter.finish()


def test_state_values_and_real_python(python: Interpreter) -> None:
    python.run("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\np = P(3)")
    assert python.run("print('seen'); p") == Outcome(printed="seen\n", value="P(x=3)")
    assert python.run("p.x += 1") == Outcome()
    assert python.run("import pickle; pickle.loads(pickle.dumps(p)) == p").value == "True"
    assert python.run("def f(n):\n    yield from range(n)\nsum(f(p.x))").value == "6"
    pool = (
        "import multiprocessing as m\nwith m.Pool(2) as pool:\n    a = pool.map(abs, [-1, -2])\na"
    )
    assert python.run(pool).value == "[1, 2]"
    assert python.run("import asyncio\nasync def g(): return 5\nasyncio.run(g())").value == "5"


def test_all_that_is_printed_is_seen_by_whomever(python: Interpreter) -> None:
    code = "import os, subprocess\nprint('a')\nsubprocess.run(['echo', 'b'])\nos.write(1, b'c\\n')"
    assert python.run(code).printed == "a\nb\nc\n"
    long = python.run("for n in range(10**4): print(n)").printed
    assert len(long) < 11_000
    assert long.startswith("0\n1\n")
    assert "left out" in long
    assert long.endswith("9999\n")


ERRORS = {
    "1/0": "ZeroDivisionError",
    "raise SystemExit(3)": "SystemExit",
    "raise BaseException('x')": "BaseException",
    "def f(): f()\nf()": "RecursionError",
    "x =": "SyntaxError",
    "input()": "EOFError",
    "class E(Exception):\n    def __str__(self): raise ValueError\nraise E": "E",
    "class V:\n    def __str__(self): raise ValueError('v')\nV()": "ValueError",
    "'\\ud800' + 1": "TypeError",
}


def test_errors_are_outcomes_without_our_frames(python: Interpreter) -> None:
    python.run("kept = 1")
    for code, kind in ERRORS.items():
        outcome = python.run(code)
        assert (outcome.trouble, outcome.kind) == ("exception", kind), code
        assert "inside.py" not in outcome.error
        assert python.run("kept").value == "1"


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ("while True: pass", True),
        ("import time; print('before'); time.sleep(60)", True),
        ("import subprocess; subprocess.run(['sleep', '60'])", True),
        ("import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass", False),
        ("import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass", False),
        ("sum(range(10**12))", False),
        ("while True: print('x' * 1000)", True),
    ],
)
def test_time_is_kept_from_outside(
    python: Interpreter, code: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters, "INTERRUPT_SECONDS", 60.0 if kept else 0.3)
    python.run("kept = 1")
    python.step_seconds = 0.3
    outcome = python.run(code)
    python.step_seconds = 60.0
    assert (outcome.trouble, outcome.kind) == ("timeout", "timeout")
    assert ("Variables are kept" in outcome.error) == kept
    assert (python.run("kept").value == "1") == kept


def test_a_crash_is_an_outcome_and_the_next_step_goes_on(python: Interpreter) -> None:
    for code, how in (
        ("import os; print('last words'); os._exit(3)", "exited with 3"),
        ("import ctypes; print('last words', flush=True); ctypes.string_at(0)", "SIGSEGV"),
        ("import os; print('last words'); os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; print('last words'); os.closerange(3, 1 << 20)", "Python process"),
    ):
        outcome = python.run(code)
        assert outcome.trouble == "died"
        assert how in outcome.error
        assert "last words" in outcome.printed
        assert python.run("1 + 1").value == "2"


def test_forks_do_not_speak_for_it_and_tools_run_outside(python: Interpreter) -> None:
    assert python.run("import os\nos.fork() and 'parent'").value == "parent"
    assert python.run("2").value == "2"
    assert python.run("double(21)").value == "42"
    assert python.run("double([1])").value == "[1, 1]"
    failed = python.run("double(None)")
    assert "RuntimeError: TypeError" in failed.error
    python.run("from threading import Thread\nr = []\ndef f(): r.append(double(2))")
    python.run("t = [Thread(target=f) for _ in range(8)]\n[x.start() for x in t]")
    assert python.run("[x.join() for x in t]; r").value == str([4] * 8)
    # The answer ends a step.
    code = "try:\n    final_answer([1.0, 'b'])\nexcept Exception:\n    pass\nprint('never')"
    assert python.run(code) == Outcome(answer="1, b")


def test_answers_are_written_as_they_are_compared_and_observations_hold_what_was_seen() -> None:
    values = (" a ", 3.0, 2.5, None, (1, [2, "x"]), True)
    assert [answer_text(value) for value in values] == ["a", "3", "2.5", "", "1, 2, x", "True"]
    assert observation(Outcome(), 100) == "(nothing was printed)"
    assert observation(Outcome(printed="a\n", value="b"), 100) == "a\nValue: b"
    assert len(observation(Outcome(printed="a" * 500), 100)) < 160


def test_it_can_be_closed_from_another_thread_and_leaves_nothing(python: Interpreter) -> None:
    pid = int(python.run("import os; os.getpid()").value or 0)
    threading.Timer(0.3, python.close).start()
    assert python.run("import time; time.sleep(60)").trouble == "died"
    assert python.run("1").trouble == "died"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_that_starts_too_late_is_no_outcome_and_is_replaced(
    python: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = interpreters.live

    def live_late(channel: socket.socket, output: int) -> NoReturn:
        """Starts when nobody waits for it any more."""
        given_up = select.poll()
        given_up.register(channel, select.POLLRDHUP)
        given_up.poll()
        live(channel, output)

    with monkeypatch.context() as patched:
        patched.setattr(interpreters, "START_SECONDS", 0.01)
        patched.setattr(interpreters, "live", live_late)
        assert python.run("6 * 7").trouble == "died"
    assert python.run("6 * 7").value == "42"
