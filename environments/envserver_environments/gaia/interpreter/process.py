"""A Python interpreter for the model's code in a separate process, as the agent uses it.

An error, an endless loop, a crash and a lack of memory are outcomes of a step, not exceptions. Time
is measured here: at its limit a step is interrupted, as by Ctrl-C, and killed if that does not
help; a new interpreter then starts without the old one's variables.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from envserver import take_companion

from . import frames
from .inside import Setup, live

INTERRUPT_SECONDS = 1.0
"""Seconds for interrupted code to end by itself."""
DYING_SECONDS = 0.5
"""A process that ends closes its socket a moment before it is dead: how long that moment may be."""
START_SECONDS = 60.0
"""Seconds until an interpreter has started; an overloaded machine is slow."""
FRAME_SECONDS = 2.0
"""Seconds for the rest of a frame to arrive."""

COMPANION = "envserver_environments.gaia.interpreter.companion:accompany"
"""Environments whose agents use `Interpreter` name it as their `companion`."""

Trouble = Literal["exception", "timeout", "died"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step."""

    printed: str = ""  # by the code and all that it started; a long output has no middle
    value: str | None = None  # the last expression's, unless it is None
    answer: str | None = None  # the argument of `final_answer`
    trouble: Trouble | None = None  # exception: raised; timeout: stopped; died: its process did
    error: str = ""  # as the model is shown it
    kind: str = ""  # the type of the exception, or the trouble itself


class Interpreter:
    """A lazily started interpreter. Belongs to one thread; `close` may be called from any.

    Args:
        tools: run here, with JSON arguments; their errors are raised in the code as a RuntimeError.
        step_seconds: limit of one step's code; time in tools is not counted.
        stop_at: `time.time()` at which everything must have ended.
        characters: maximum length of a step's output, and of its value and error each.
    """

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]] | None = None,
        *,
        imports: tuple[str, ...] = (),
        step_seconds: float = 60.0,
        stop_at: float = float("inf"),
        characters: int = 10_000,
    ) -> None:
        self.tools = dict(tools or {})
        self._imports = imports
        self.step_seconds = step_seconds
        self._stop_at = stop_at
        self._characters = characters
        self._step = 0
        self._process: _Process | None = None
        self._closed = False
        self._lock = threading.Lock()

    def run(self, code: str) -> Outcome:
        self._step += 1
        process = self._started()
        if process is None:
            return _failed("died", "The interpreter is closed.", "")
        watched = _Watched(process, self.tools, self._characters)
        seconds = min(self.step_seconds, self._stop_at - time.time())
        try:
            ended = watched.step({"code": code, "step": self._step}, max(seconds, 0.0))
        except _Stopped:
            self._end()
            error = f"The code was stopped after {seconds:.0f} seconds. {_LOST}"
            return _failed("timeout", error, watched.printed)
        except frames.BrokenFrame:
            how = self._end()
            return _failed("died", f"The Python process {how}. {_LOST}", watched.printed)
        return self._outcome(ended, watched, seconds)

    def close(self) -> None:
        """Kills it with all that it started; a step that runs ends as one that died."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def finish(self) -> None:
        """`close`, from the thread that runs the steps: nothing of it is left then."""
        self.close()
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.bury()

    def _started(self) -> _Process | None:
        with self._lock:
            if self._closed:
                return None
            if self._process is None:
                self._process = _Process(Setup(tuple(self.tools), self._imports, self._characters))
            return self._process

    def _end(self) -> str:
        with self._lock:
            process, self._process = self._process, None
        return process.end() if process is not None else "has ended"

    def _outcome(self, ended: dict[str, Any], watched: _Watched, seconds: float) -> Outcome:
        error = ended.get("error")
        answer = ended.get("answer")
        if watched.interrupted and answer is None:
            text = f"The code was stopped after {seconds:.0f} seconds. Variables are kept."
            return _failed("timeout", text, watched.printed)
        if isinstance(error, dict) and answer is None:
            text = shortened(str(error.get("text")), self._characters)
            return _failed("exception", text, watched.printed, str(error.get("kind")))
        value = ended.get("value")
        return Outcome(
            printed=watched.printed,
            value=None if value is None else str(value),
            answer=None if answer is None else str(answer),
        )


_LOST = "All variables and imports are lost; files are kept."


def shortened(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    half = characters // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[len(text) - half :]}"


def observation(outcome: Outcome, characters: int) -> str:
    parts = [outcome.printed.rstrip("\n")]
    if outcome.value is not None:
        parts.append(f"Value: {outcome.value}")
    if outcome.trouble is not None:
        parts.append(f"Error:\n{outcome.error}")
    text = "\n".join(part for part in parts if part)
    return shortened(text, characters) or "(nothing was printed)"


def _failed(trouble: Trouble, error: str, printed: str, kind: str = "") -> Outcome:
    return Outcome(printed=printed, trouble=trouble, error=error, kind=kind or trouble)


class _Stopped(Exception):
    """The code did not end in its time."""


class _Process:
    def __init__(self, setup: Setup) -> None:
        self.output, output = os.pipe()
        os.set_blocking(self.output, False)
        self._ended = False
        self._lock = threading.Lock()
        companion = take_companion(COMPANION)
        self._process = _Forked(output) if companion is None else companion
        self.channel = self._process.channel
        if companion is not None:
            with contextlib.suppress(BrokenPipeError):  # it has died; `_set_up` finds out
                socket.send_fds(self.channel, [b"\0"], [output])
        os.close(output)
        self.pid = self._set_up(setup)

    def _set_up(self, setup: Setup) -> int | None:
        """The process id; None if it has ended or must end, which the first step finds out."""
        self.channel.settimeout(START_SECONDS)
        try:
            frames.send(self.channel, asdict(setup))
            return int(frames.receive(self.channel)["pid"])
        except (OSError, frames.BrokenFrame):
            with contextlib.suppress(OSError):  # its own end is closed
                self.channel.shutdown(socket.SHUT_RDWR)  # an answer that is late is for no step
            return None

    def signal(self, number: int) -> None:
        with self._lock:
            if not self._ended and self.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def end(self) -> str:
        """Kills the process and its children; returns in words how it had ended."""
        give_up_at = time.monotonic() + DYING_SECONDS
        while not (had_ended := self._process.has_ended()) and time.monotonic() < give_up_at:
            time.sleep(0.01)
        self.kill()
        status = self.bury()
        if not had_ended:
            return "was killed"
        code = os.waitstatus_to_exitcode(status)
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def bury(self) -> int:
        with self._lock:
            status = self._process.wait()
            self._ended = True
        os.close(self.output)
        return status


class _Forked:
    def __init__(self, output: int) -> None:
        self.channel, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            live(theirs, output)
        theirs.close()

    def has_ended(self) -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._pid, flags) is not None

    def wait(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        self.channel.close()
        return status


class _Watched:
    """One step: answers the code's tool calls, collects its output, enforces its time limit."""

    def __init__(
        self, process: _Process, tools: Mapping[str, Callable[..., Any]], characters: int
    ) -> None:
        self._process = process
        self._tools = tools
        self._half = characters // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0
        self.interrupted = False

    @property
    def printed(self) -> str:
        head, tail = (bytes(part).decode(errors="replace") for part in (self._head, self._tail))
        if not self._left_out:
            return head + tail
        return f"{head}\n[... {self._left_out} bytes left out ...]\n{tail}"

    def step(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        channel = self._process.channel
        channel.settimeout(FRAME_SECONDS)
        try:
            frames.send(channel, request)
            while True:
                seconds = self._wait(seconds)
                frame = frames.receive(channel)
                if "call" not in frame:
                    return frame
                frames.send(channel, self._call(frame))
        except OSError as error:
            raise frames.BrokenFrame(str(error)) from error
        finally:
            self._drain()

    def _wait(self, seconds: float) -> float:
        poll = select.poll()
        channel, output = self._process.channel.fileno(), self._process.output
        poll.register(channel, select.POLLIN)
        poll.register(output, select.POLLIN)
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            if left <= 0:
                if self.interrupted:
                    self._process.kill()
                    raise _Stopped
                self.interrupted = True
                self._process.signal(signal.SIGINT)
                until = time.monotonic() + INTERRUPT_SECONDS
                continue
            ready = {fd for fd, _ in poll.poll(left * 1000)}
            if output in ready and not self._drain():
                poll.unregister(output)  # it closed its output; that is no end
            if channel in ready:
                return until - time.monotonic()

    def _drain(self) -> bool:
        for _ in range(64):  # and then looks at the clock again
            try:
                data = os.read(self._process.output, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._keep(data)
        return True

    def _keep(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room] if room > 0 else b""
        self._tail += data[max(room, 0) :]
        over = len(self._tail) - self._half
        if over > 0:
            self._left_out += over
            del self._tail[:over]

    def _call(self, frame: dict[str, Any]) -> dict[str, Any]:
        tool = self._tools.get(str(frame["call"]))
        if tool is None:
            return {"error": f"there is no tool {frame['call']!r}"}
        try:
            return {"value": tool(*frame.get("args", ()), **frame.get("named", {}))}
        except Exception as error:  # noqa: BLE001 - reported to the calling code
            return {"error": f"{type(error).__name__}: {error}"}
