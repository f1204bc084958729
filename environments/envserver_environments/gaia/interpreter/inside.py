"""The process that executes the model's code, step by step: plain Python with one lasting
`__main__`, tracebacks without this file. Nothing that the code raises ends it. The output of the
code and its children leaves by a pipe; tool calls go over the socket."""

from __future__ import annotations

import ast
import faulthandler
import linecache
import os
import resource
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from . import frames

ANSWER = "final_answer"
MAX_ANSWER_CHARACTERS = 20_000
MEMORY_SHARE = 0.6
"""Share of the worker's memory per process; the rest stays free when the code uses up its own."""


class _Answered(BaseException):
    """Ends a step that has given its answer."""


@dataclass(frozen=True)
class Setup:
    """Settings of an interpreter."""

    tools: Sequence[str]  # names of functions that are called over the socket
    imports: Sequence[str]  # modules to import
    value_characters: int  # maximum length of a value that is sent


def live(channel: socket.socket, output: int) -> NoReturn:
    """Turns this process into an interpreter, which first gets its `Setup`; ends with it."""
    try:
        _settle_in(channel, output)
        setup = Setup(**frames.receive(channel))
        frames.send(channel, {"pid": os.getpid()})
        _Interpreter(channel, setup).serve()
    except BaseException:  # noqa: BLE001 - the last frame: whatever it is, say it and end
        traceback.print_exc()
    finally:
        os._exit(1)


def _settle_in(channel: socket.socket, output: int) -> None:
    """Own process group and output, nothing else that is open, less memory."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    kept = channel.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 1 << 30)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, errors="backslashreplace")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        most = int(most * MEMORY_SHARE)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


class _Interpreter:
    def __init__(self, channel: socket.socket, setup: Setup) -> None:
        self._channel = channel
        self._setup = setup
        self._pid = os.getpid()
        self._asking = threading.Lock()
        self._running = False
        self._answer: str | None = None
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        self._names = main.__dict__
        self._names[ANSWER] = self._give_answer
        for name in setup.tools:
            self._names[name] = self._asker(name)
        sys.argv = [""]
        sys.path.insert(0, "")
        signal.signal(signal.SIGINT, self._interrupt)

    def serve(self) -> None:
        for name in self._setup.imports:
            self._names[name.partition(".")[0]] = __import__(name)
        self._asking.acquire()  # between steps a thread of the code waits with its call
        while True:
            frame = frames.receive(self._channel)
            self._asking.release()
            ended = self._step(str(frame["code"]), int(frame["step"]))
            if os.getpid() != self._pid:  # the code has forked, and this is not the process we are
                os._exit(0)
            self._asking.acquire()  # a call on its way ends first: its answer is not our next frame
            frames.send(self._channel, ended)

    def _step(self, code: str, step: int) -> dict[str, Any]:
        """Runs `code`; what became of it: {"value", "answer", "error"}."""
        self._answer = None
        name = f"<step {step}>"
        value = error = None
        self._running = True
        try:
            try:
                value = self._execute(code, name)
                value = None if value is None else str(value)[: self._setup.value_characters]
            finally:
                self._running = False
                sys.stdout.flush()
                sys.stderr.flush()
        except _Answered:
            value = None
        except BaseException as caught:  # noqa: BLE001 - SystemExit and all else is the model's
            self._running = False
            value, error = None, _error_of(caught, name)
        return {"value": value, "answer": self._answer, "error": error}

    def _execute(self, code: str, name: str) -> Any:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if not isinstance(last, ast.Expr):
            exec(compile(tree, name, "exec"), self._names)
            return None
        tree.body.pop()
        exec(compile(tree, name, "exec"), self._names)
        return eval(compile(ast.Expression(last.value), name, "eval"), self._names)

    def _give_answer(self, answer: Any) -> NoReturn:
        self._answer = answer_text(answer)[:MAX_ANSWER_CHARACTERS]
        raise _Answered

    def _asker(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any, **named: Any) -> Any:
            with self._asking:
                frames.send(self._channel, {"call": name, "args": args, "named": named})
                answer = frames.receive(self._channel)
            if "error" in answer:
                raise RuntimeError(str(answer["error"]))
            return answer["value"]

        ask.__name__ = ask.__qualname__ = name
        return ask

    def _interrupt(self, number: int, frame: object) -> None:
        if self._running:
            raise KeyboardInterrupt


def answer_text(value: Any) -> str:
    """Formats an answer as GAIA does: list items separated by commas, whole numbers without .0."""
    if isinstance(value, list | tuple):
        return ", ".join(answer_text(item) for item in value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return "" if value is None else str(value).strip()


def _error_of(error: BaseException, name: str) -> dict[str, str]:
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename != name:
        entry = entry.tb_next
    try:
        text = "".join(_without_us(traceback.TracebackException(type(error), error, entry)))
        text = text.strip()
    except Exception:  # noqa: BLE001 - an exception of the model's whose words cannot be had
        text = type(error).__name__
    return {"kind": type(error).__name__, "text": text}


def _without_us(error: traceback.TracebackException) -> Iterator[str]:
    """Without this file's frames, which mean nothing to the model and differ between machines."""
    part: traceback.TracebackException | None = error
    for _ in range(10):
        if part is None:
            break
        mine = [frame for frame in part.stack if frame.filename != __file__]
        part.stack = traceback.StackSummary.from_list(mine)
        part = part.__cause__ or part.__context__
    return error.format()
