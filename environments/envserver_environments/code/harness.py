"""Runs in the sandbox: a program, and calls of its function. Sent there as text, not imported here.

In: JSON on stdin. Out: lines on the original stdout: `ready` once the program is loaded (or the
error), then per call `[number, "v", value]` (see `values`) or `[number, "e", error]`.

The program shares this process and can forge any line. It gains nothing: the expected values never
come here. The sandbox protects the host, this module does not.
"""

import builtins
import collections
import json
import os
import signal
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # Type checkers take it for true: nothing is imported in the sandbox.
    from typing import Any

ERROR_CHARACTERS = 600


SLOW_CALLS = 2


class TimeIsUp(BaseException):
    """The call took too long."""


class Unwritable(Exception):
    """The value is of no exact built-in type, or too large."""


def time_is_up(number: int, frame: object) -> None:
    raise TimeIsUp


class Writer:
    def __init__(self, depth: int, nodes: int, text: int) -> None:
        self.depth = depth
        self.left = nodes
        self.text = text

    def write(self, value: "Any", level: int = 0) -> "Any":
        self.left -= 1
        if self.left < 0:
            raise Unwritable("the value is too large")
        if level > self.depth:
            raise Unwritable("the value is nested too deeply")
        kind = type(value)
        if any((base.__module__, base.__name__) == ("numpy", "generic") for base in type.mro(kind)):
            # A number of numpy is the number; whatever a class of that name gives is data, too.
            return self.write(value.item(), level + 1)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self.text_shape(self.fitting(value))
        if kind is int:
            return value if -(10**18) < value < 10**18 else ["i", self.digits(value)]
        if kind is float:
            return ["f", float.hex(value)]
        if kind is complex:
            return ["c", float.hex(value.real), float.hex(value.imag)]
        if kind is bytes:
            return ["b", bytes.hex(self.fitting(value))]
        if kind in TAGS and len(value) <= self.left:
            # A copy, so that nothing changes it meanwhile.
            return [TAGS[kind], [self.write(item, level + 1) for item in list(value)]]
        if dict in type.mro(kind) and dict.__len__(value) <= self.left:
            pairs = [part for pair in dict.items(value) for part in pair]
            return ["d", [self.write(part, level + 1) for part in pairs]]
        if kind in TAGS or dict in type.mro(kind):
            raise Unwritable("the value is too large")
        raise Unwritable(f"a value of type {kind.__name__} cannot be compared")

    def text_shape(self, value: str) -> "Any":
        try:
            value.encode()
        except UnicodeEncodeError:
            # JSON would make one character of two halves.
            return ["u", value.encode("utf-8", "surrogatepass").hex()]
        return value

    def fitting(self, value: "Any") -> "Any":
        self.text -= len(value)
        if self.text < 0:
            raise Unwritable("the value is too large")
        return value

    def digits(self, value: int) -> str:
        if value.bit_length() > 64_000:
            raise Unwritable("the value is too large")
        return format(value, "x")


TAGS: "dict[Any, str]" = {list: "l", tuple: "t", set: "s", frozenset: "z", collections.deque: "q"}


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    lines = os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    write, dumps, setitimer, leave = os.write, json.dumps, signal.setitimer, os._exit
    signal.signal(signal.SIGALRM, time_is_up)
    signal.signal(signal.SIGPROF, time_is_up)

    def say(line: str) -> None:
        data = (line + "\n").encode()
        while data:
            data = data[write(lines, data) :]

    def alarm(cpu_seconds: float, wall_seconds: float) -> None:
        setitimer(signal.ITIMER_PROF, cpu_seconds)
        setitimer(signal.ITIMER_REAL, wall_seconds)

    seconds = request["cpu_seconds"], request["wall_seconds"]
    try:
        alarm(*seconds)
        function = loaded(request)
        alarm(0, 0)
    except BaseException as error:  # noqa: BLE001 - a program may raise anything
        alarm(0, 0)
        say(dumps(["load", described(error)]))
        leave(0)
    names: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    exec(request["prelude"], names)
    names[request["entry_point"]] = function
    say('["ready"]')
    left, slow = request["total"], 0
    for number, call in request["calls"]:
        if slow == SLOW_CALLS:
            say(dumps([number, "e", "other calls took too long"]))
            continue
        line = dumps([number, "e", "the results are too large"])
        try:
            alarm(*seconds)
            value = eval(call, names)
            shape = Writer(request["depth"], request["nodes"], request["text"]).write(value)
            text = dumps(shape)
            alarm(0, 0)
            if len(text) <= min(left, request["text"]):
                left -= len(text)
                line = f'[{number}, "v", {text}]'
        except BaseException as error:  # noqa: BLE001 - a program may raise anything
            alarm(0, 0)
            slow += type(error) is TimeIsUp
            line = dumps([number, "e", described(error)])
        say(line)
    # os._exit: exit handlers and threads of the program must not run.
    leave(0)


def loaded(request: "dict[str, Any]") -> "Any":
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    sys.argv = ["solution.py"]
    for name in ("preamble", "code"):
        exec(compile(request[name], "solution.py", "exec"), module.__dict__)
    names, wanted = module.__dict__, request["entry_point"]
    if wanted not in names and isinstance(names.get("Solution"), type):
        # Some data sets test a method of a class; each call gets a new object.
        return lambda *a, **k: getattr(names["Solution"](), wanted)(*a, **k)
    return names[wanted]


def described(error: BaseException) -> str:
    try:
        if type(error) is TimeIsUp:
            return "it took too long"
        if type(error) is Unwritable:
            return str(error)[:ERROR_CHARACTERS]
        line = ""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "solution.py":
                line = f" (line {trace.tb_lineno})"
            trace = trace.tb_next
        return f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS] + line
    except BaseException:  # noqa: BLE001 - its methods are the program's
        return "an exception that cannot be shown"


main()
