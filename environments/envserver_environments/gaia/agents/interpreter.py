"""A Python interpreter for the model's code, in a process of its own, seen from the agent.

`Interpreter.run` executes one step and says what became of it, whatever that is: an error, a loop
without an end, a crash and a lack of memory are outcomes, not exceptions. Time is kept here,
outside of the interpreter: at a step's limit it is interrupted, as Ctrl-C would do, and killed if
that does not help. A new one then begins without the old one's variables.
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
from dataclasses import dataclass
from typing import Any, Literal

from . import frames
from .inside import Setup, live

INTERRUPT_SECONDS = 1.0
"""For code that was interrupted to end by itself."""
DYING_SECONDS = 0.5
"""A process that ends closes its socket a moment before it is dead: how long that moment may be."""
FRAME_SECONDS = 2.0
"""For a frame that has begun to arrive whole."""

Trouble = Literal["exception", "timeout", "died"]


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Args:
        printed: by the code and all that it started; the middle is left out where it is long.
        value: of a last expression that is not None, as text.
        answer: what the code gave `final_answer`.
        trouble: exception: it raised; timeout: it was stopped; died: its process ended.
        error: what the model is told of that.
        kind: the type of the exception, or the trouble itself.
    """

    printed: str = ""
    value: str | None = None
    answer: str | None = None
    trouble: Trouble | None = None
    error: str = ""
    kind: str = ""


class Interpreter:
    """Starts at the first step. Belongs to one thread; `close` may come from any.

    Args:
        tools: functions that the code may call; they run here, with what JSON can carry, and what
            they raise is raised in the code as a RuntimeError.
        imports: modules that are there from the start.
        step_seconds: for the code of one step; time in tools is not counted.
        stop_at: `time.time()` at which everything is to be over.
        characters: that are kept of what a step prints, and of its value and error each.
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
        """Executes `code` behind what was executed before."""
        self._step += 1
        process = self._started()
        if process is None:
            return _died("The interpreter is closed.", "")
        watched = _Watched(process, self.tools, self._characters)
        seconds = min(self.step_seconds, self._stop_at - time.time())
        try:
            ended = watched.step({"code": code, "step": self._step}, max(seconds, 0.0))
        except _Stopped:
            self._end()
            return Outcome(
                printed=watched.printed,
                trouble="timeout",
                kind="timeout",
                error=f"The code was stopped after {seconds:.0f} seconds. {_LOST}",
            )
        except frames.BrokenFrame:
            how = self._end()
            return _died(f"The Python process {how}. {_LOST}", watched.printed)
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
            return Outcome(
                printed=watched.printed,
                trouble="timeout",
                kind="timeout",
                error=f"The code was stopped after {seconds:.0f} seconds. Variables are kept.",
            )
        if isinstance(error, dict) and answer is None:
            return Outcome(
                printed=watched.printed,
                trouble="exception",
                kind=str(error.get("kind")),
                error=shortened(str(error.get("text")), self._characters),
            )
        value = ended.get("value")
        return Outcome(
            printed=watched.printed,
            value=None if value is None else str(value),
            answer=None if answer is None else str(answer),
        )


_LOST = "All variables and imports are lost; files are kept."


def shortened(text: str, characters: int) -> str:
    """`text` without its middle where it is longer than `characters`."""
    if len(text) <= characters:
        return text
    half = characters // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[len(text) - half :]}"


def observation(outcome: Outcome, characters: int) -> str:
    """What the model sees of a step."""
    parts = [outcome.printed.rstrip("\n")]
    if outcome.value is not None:
        parts.append(f"Value: {outcome.value}")
    if outcome.trouble is not None:
        parts.append(f"Error:\n{outcome.error}")
    text = "\n".join(part for part in parts if part)
    return shortened(text, characters) or "(nothing was printed)"


def _died(error: str, printed: str) -> Outcome:
    return Outcome(printed=printed, trouble="died", kind="died", error=error)


class _Stopped(Exception):
    """The code did not end in its time."""


class _Process:
    """The interpreter's process, its socket and the pipe of its output."""

    def __init__(self, setup: Setup) -> None:
        self.channel, theirs = socket.socketpair()
        self.output, output = os.pipe()
        self._ended = False
        self._lock = threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            live(theirs, output, setup)
        theirs.close()
        os.close(output)
        os.set_blocking(self.output, False)
        with contextlib.suppress(OSError):  # it has done so itself, or is gone already
            os.setpgid(self.pid, self.pid)

    def signal(self, number: int) -> None:
        """Sends a signal to it and to what it started."""
        with self._lock:
            if not self._ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def end(self) -> str:
        """Kills what is left of it; how it had ended, in words."""
        give_up_at = time.monotonic() + DYING_SECONDS
        while not (had_ended := _has_ended(self.pid)) and time.monotonic() < give_up_at:
            time.sleep(0.01)
        self.kill()
        status = self.bury()
        if not had_ended:
            return "was killed"
        code = os.waitstatus_to_exitcode(status)
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def bury(self) -> int:
        """Waits for its end, which must be near; its status."""
        with self._lock:
            _, status = os.waitpid(self.pid, 0)
            self._ended = True
        self.channel.close()
        os.close(self.output)
        return status


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _Watched:
    """One step: answers the code's calls of tools, collects what it prints, keeps its time."""

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
        """All of it, or its begin and end."""
        head, tail = (bytes(part).decode(errors="replace") for part in (self._head, self._tail))
        if not self._left_out:
            return head + tail
        return f"{head}\n[... {self._left_out} bytes left out ...]\n{tail}"

    def step(self, asked: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Raises _Stopped when it does not end in time, BrokenFrame when its process is gone."""
        channel = self._process.channel
        channel.settimeout(FRAME_SECONDS)
        try:
            frames.send(channel, asked)
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
        """Until a frame comes; the seconds that are left then."""
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
        """Takes in what was printed; whether more may come."""
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
        except Exception as error:  # noqa: BLE001 - the code that called it is told
            return {"error": f"{type(error).__name__}: {error}"}
