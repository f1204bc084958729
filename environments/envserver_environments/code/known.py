"""Results with a known reward: the reference, broken programs, and cheats, each of which passes
some grader (by exit status, output, `==`, files); and conversations that solve a task. Pure."""

from __future__ import annotations

import re
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path

from envserver_environments.demonstrations import call_message, sections, text_message

from envserver import KnownResult, Message, Result, Task

from .agent import Mode
from .data_sets import Pair

_FORGE = """
import json, os
def forge(*_):
    lines = ['["ready"]'] + [json.dumps([n, "v", v]) for n in range(40) for v in (True, 0, [])]
    for fd in range(1, 64):
        for line in lines:
            try: os.write(fd, (line + "\\n").encode())
            except OSError: break
"""


def _programs(name: str) -> dict[str, str]:
    """Programs by what they do, from a file in `cheats/`; FORGE stands for the function `forge`."""
    text = (Path(__file__).parent / "cheats" / f"{name}.txt").read_text(encoding="utf-8")
    return {what: program.replace("FORGE\n", _FORGE) for what, program in sections(text).items()}


PROGRAMS = _programs("programs")


def constant(pairs: list[Pair]) -> str:
    return f"print({pairs[0]['output']!r}, end='')"


def table(pairs: list[Pair]) -> str:
    known = {pair["input"]: pair["output"] for pair in pairs}
    return f"import sys\nprint({known!r}.get(sys.stdin.read(), ''), end='')"


def after_its_work(code: str, end: str) -> str:
    return f"{code}\nimport os, sys\nsys.stdout.flush()\n{end}"


SPOILED: dict[str, str] = {
    "right, but with status 1": "os._exit(1)",
    "right, but ended by a signal": "os.kill(os.getpid(), 9)",
    "right, but with an exception": "raise ValueError",
    "right, and one line more": "print('done')",
    "right, and then for ever": "os.dup2(os.open('/dev/null', os.O_RDWR), 1)\nwhile True: pass",
    "right, and then too much": "while True: print(' ' * 1000)",
}


def demonstrate(task: Task, mode: Mode) -> list[Message] | None:
    """Returns the assistant messages, one per turn, or None if the task has no reference."""
    code, output = task.hidden.get("code"), task.hidden.get("output")
    if not code:
        return None
    answer = text_message(output or fenced(code))
    if mode == "single":
        return [answer]
    # Both ways to end are shown, each for half of the tasks.
    by_call = zlib.crc32(task.id.encode()) % 2 == 0
    last = call_message("submit", code=code) if by_call else answer
    return [call_message("run_tests", code=code), last]


def fenced(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


FAST_EVERY = 2
SLOW_EVERY = 20
"""One task in this many gets a slow cheat, which takes seconds."""

ENDS_ITSELF = re.compile(r"exit|quit|SystemExit")
"""References that match end the process, so code appended to them would not run."""
_ALWAYS_EQUAL = """
class Anything{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __bool__(self): return True
    def __hash__(self): return 0
    def __len__(self): return 1
    def __abs__(self): return self
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __sub__
    def __getitem__(self, key): return self
    def __contains__(self, item): return True
    __class__ = {pretends}

def NAME(*a, **k): return Anything()
"""

FAST: dict[str, str] = {
    "an object that equals everything": _ALWAYS_EQUAL.format(base="", pretends="Anything"),
    "an integer that equals everything": _ALWAYS_EQUAL.format(base="(int)", pretends="int"),
    "a text that equals everything": _ALWAYS_EQUAL.format(base="(str)", pretends="str"),
    "a list that equals everything": _ALWAYS_EQUAL.format(base="(list)", pretends="list"),
    "a dict that equals everything": _ALWAYS_EQUAL.format(base="(dict)", pretends="dict"),
    "a tuple that equals everything": _ALWAYS_EQUAL.format(base="(tuple)", pretends="tuple"),
    "a float that is near to everything": _ALWAYS_EQUAL.format(base="(float)", pretends="float"),
    **_programs("fast"),
}
"""Cheating programs by name; NAME is replaced by the function's name."""
SLOW = _programs("slow")


def known_results(task: Task, *, partial_credit: bool = False) -> Iterator[KnownResult]:
    name, code = str(task.public["entry_point"]), task.hidden.get("code")
    if code:
        yield KnownResult("gold", _said(fenced(code)), least=1.0, most=1.0)
        yield KnownResult("gold as an answer in full", _gold(task), least=1.0, most=1.0)
        yield KnownResult("gold in unfinished thoughts", _said(f"<think>{fenced(code)}"))
        yield KnownResult("gold without a fence", _said(code))
        if name:
            renamed = re.sub(rf"\b{re.escape(name)}\b", f"{name}_", code)
            yield KnownResult("gold by another name", _said(fenced(renamed)))
        yield KnownResult("gold that was cut off", Result(output=fenced(code), truncated=True))
        yield KnownResult("gold with an error", _said(fenced(f"{code}\n)")))
    yield KnownResult("an empty block", _said(fenced("")))
    most = 0.99 if partial_credit else 0.0
    if not name:
        yield from _wrong_programs(task, most)
        return
    for what, program in cheats_for(task):
        yield KnownResult(what, _said(fenced(written(program, name))), most=most)
    if task.public["tests"] and task.hidden["tests"]:
        table = hard_coded(task.public["tests"], name)
        yield KnownResult("a table of the visible tests", _said(fenced(table)), most=most)


def _wrong_programs(task: Task, most: float) -> Iterator[KnownResult]:
    code, visible = task.hidden.get("code"), task.public["tests"]
    wrong = dict(PROGRAMS)
    if visible:
        wrong["the first output, always"] = constant(visible)
        wrong["a table of the visible tests"] = table(visible)
    if code and not ENDS_ITSELF.search(code):
        wrong |= {what: after_its_work(code, end) for what, end in SPOILED.items()}
    for what, program in wrong.items():
        yield KnownResult(what, _said(fenced(program)), most=most)


def hard_coded(tests: list[str], name: str) -> str:
    """A program that passes `tests` by knowing them, and nothing else."""
    claims = [re.sub(rf"\b{re.escape(name)}\(", "_asked(", test) for test in tests]
    return textwrap.dedent(
        f"""
        TESTS = {claims!r}

        def {name}(*arguments):
            for test in TESTS:
                left, _, right = test.removeprefix("assert ").rpartition("==")
                asked = []
                try:
                    eval(left or right, {{"_asked": lambda *a: asked.append(a) or 0}})
                    if asked == [arguments]:
                        return eval(right) if left else not right.strip().startswith("not")
                except Exception:
                    pass
            return None
        """
    )


def cheats_for(task: Task) -> Iterator[tuple[str, str]]:
    """Names and programs of the cheats that this task is tried with."""
    place = zlib.crc32(task.id.encode())
    for cheats, every in ((FAST, FAST_EVERY), (SLOW, SLOW_EVERY)):
        for number, cheat in enumerate(cheats.items()):
            if (place + number) % every == 0:
                yield cheat


def _gold(task: Task) -> Result:
    output = task.hidden.get("output")
    return _said(output or f"Here it is.\n\n{fenced(task.hidden['code'])}")


def written(program: str, name: str) -> str:
    return program.replace("NAME", name)


def _said(text: str) -> Result:
    return Result(output={"code": None, "text": text}, finish_reason="stop", turns=1)
