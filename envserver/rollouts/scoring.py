"""Scores rollouts in separate processes, which may hang or die without harm.

A scorer that exceeds its environment's `score_cpu_seconds` or, behind that, `score_timeout_seconds`
by the clock, or whose caller is cancelled, is killed; a dead one is replaced before the next score.
Loading the environment does not count. While a scorer waits for the judge, its clock stands still.
"""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, popen_forkserver, resource_tracker, util
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import msgspec
from envserver_records.costs import JudgeUsage
from envserver_records.errors import (
    ConfigError,
    JudgeError,
    RewardError,
    SandboxError,
    ScorerError,
    by_kind,
)
from envserver_records.framing import FrameReader, frame
from envserver_records.records import Result, Score, Task

from ..environment import Environment
from ..judges.client import JudgeAddress
from ..judges.server import JudgeServer
from ..registry import interpreter_of
from ..registry.interpreters import SETTINGS, InterpreterContext, dumped, start_method_stays
from ..sandbox.maker import SandboxAddress
from ..sandbox.places import folder_for_sockets
from . import scorer_process
from .costs import ScoringSpent
from .policy import is_bug
from .rewards import RewardRules, delivered_score
from .scorer_process import Declared, RowScore, RowToScore, ScoreLimits, ScorerAnswer

# Both are frames (`envserver_records.framing`) on a socket between the two, which begin with the
# number of the request; answer 0 says that the process has loaded its environment. What always
# holds: an answer is that of its request; a request that is cancelled, or over its time, ends the
# process, and so does anything else that comes from it; a process that has ended answers nothing
# more.

KILL_GRACE_SECONDS = 5.0
"""Seconds for the process to end all that it started."""
_END = signal.SIGTERM, signal.SIGCONT  # it may be stopped


class ScorerEnded(Exception):
    """The process ended before its answer. `began`: it had read the request; `garbled`: it was
    ended because it sent something else than its answer."""

    def __init__(self, *, began: bool, garbled: bool = False) -> None:
        super().__init__("The scorer process has ended.")
        self.began = began
        self.garbled = garbled


class ScorerChannel(asyncio.Protocol):
    """A process that runs `scorer_process.serve`; made by `started`."""

    def __init__(self, process: BaseProcess, pidfd: int, channel: socket.socket) -> None:
        self._process = process
        self._pidfd = pidfd
        self._frames = FrameReader()
        self._loop = asyncio.get_running_loop()
        # None: it has ended. Not its error, whose traceback holds this object, and so its pipes.
        self._answer: asyncio.Future[bytes | None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._number = 0
        self._ends = False
        self._began = False
        self._garbled = False
        # Also at the end of Python, which else waits for the process as that one for a request.
        util.Finalize(self, _end_and_close, (pidfd,), exitpriority=10)
        self._channel = channel

    @classmethod
    async def started(cls, context: BaseContext, arguments: tuple[Any, ...]) -> ScorerChannel:
        """Starts a process; `loaded` waits for it. `arguments`: of `scorer_process.load`."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.to_thread(_start, context, theirs, arguments)
            channel = cls(process, os.pidfd_open(cast(int, process.pid)), ours)
            await channel._loop.create_unix_connection(lambda: channel, sock=ours)
        except BaseException as error:
            ours.close()  # which ends the process
            if isinstance(error, OSError | EOFError):
                raise ScorerEnded(began=False) from error
            raise
        return channel

    async def loaded(self) -> None:
        await self._answered()

    @property
    def usable(self) -> bool:
        return not (self._ends or self._lost.is_set())

    async def ask(self, request: bytes) -> bytes:
        """Returns the answer to `request`; cancelling it ends the process."""
        self._answer = self._loop.create_future()
        if self._transport is None or not self.usable:
            raise ScorerEnded(began=False)
        self._number += 1
        self._transport.write(frame(self._prefix() + request))
        return await self._answered()

    def _prefix(self) -> bytes:
        return self._number.to_bytes(scorer_process.NUMBER_BYTES, "big")

    async def _answered(self) -> bytes:
        try:
            answer = await self._answer
        except asyncio.CancelledError:
            self.end()
            raise
        if answer is None:
            raise ScorerEnded(began=self._began, garbled=self._garbled)
        return answer

    def end(self) -> None:
        if not self._ends:
            self._ends = True
            _signal(self._pidfd, *_END)
            # The method keeps this object, and so its pidfd, which another process would get.
            self._loop.call_later(KILL_GRACE_SECONDS, self._kill)

    def _kill(self) -> None:
        _signal(self._pidfd, signal.SIGKILL)

    async def ended(self) -> int | None:
        """Waits until it has ended; returns its exit code, that of a signal negative."""
        await self._lost.wait()
        await asyncio.to_thread(self._process.join)
        return self._process.exitcode

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        # Its end closes the socket even where a child of it holds the socket open.
        self._loop.add_reader(self._pidfd, self._shut_down)

    def data_received(self, data: bytes) -> None:
        for answer in self._frames.feed(data):
            if self._answer.done() or not answer.startswith(self._prefix()):
                self._garbled = True
                self.end()
            elif not self._ends:
                self._answer.set_result(answer[scorer_process.NUMBER_BYTES :])

    def _shut_down(self) -> None:
        self._loop.remove_reader(self._pidfd)
        with suppress(OSError):  # closed by `started`, which was cancelled
            self._channel.shutdown(socket.SHUT_RDWR)

    def connection_lost(self, exc: Exception | None) -> None:
        self._loop.remove_reader(self._pidfd)
        self._lost.set()
        self.end()  # it may have closed its socket alone
        if not self._answer.done():
            # The kernel tells apart an end with bytes of the request unread.
            self._began = self._garbled or not isinstance(exc, ConnectionError)
            self._answer.set_result(None)


def _start(context: BaseContext, channel: socket.socket, arguments: tuple[Any, ...]) -> BaseProcess:
    with channel:
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # not in typeshed
            target=scorer_process.serve, args=(channel, arguments), name="scorer"
        )
        process.start()
    return process


def _end_and_close(pidfd: int) -> None:
    _signal(pidfd, *_END)
    os.close(pidfd)


def _signal(pidfd: int, *numbers: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        for number in numbers:
            signal.pidfd_send_signal(pidfd, number)


# Multiprocessing's own forkserver, start method and preloaded modules stay the caller's.


class _Popen(popen_forkserver.Popen):
    """Starts one process; differs from its base class in the forkserver, and in `dumped`."""

    _fds: list[int]

    def _launch(self, process_obj: BaseProcess) -> None:
        data = dumped(self, process_obj)
        self.sentinel, pipe = _server.connect_to_new_process(self._fds)
        # By its end of this pipe the process sees that this one has ended.
        kept = os.dup(pipe)
        self.finalizer = util.Finalize(self, _close, (kept, self.sentinel))
        with os.fdopen(pipe, "wb") as file:
            file.write(data)
        self.pid = forkserver.read_signed(self.sentinel)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _ScorerProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:  # multiprocessing's name
        return _Popen(process_obj)


class _ScorerContext(ForkServerContext):
    Process = _ScorerProcess


def scorer_context(env_reference: str) -> BaseContext:
    """Returns the context that starts the scorers of an environment, in its interpreter.

    Not by forking the server: it has threads, and scorers must not see its memory.
    """
    if (own := interpreter_of(env_reference)) is not None:
        return InterpreterContext(own)
    _start_forkserver()
    return _ScorerContext()


def check_working_directory() -> None:
    """Raises ConfigError if the working directory is gone: no process can be started then."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "The working directory of this process has been removed.",
            hint="Change to a folder that exists.",
        ) from None


def _forget_forkserver() -> None:
    """A process that was forked cannot use the forkserver of its parent."""
    global _server
    _server = _own_forkserver()


def _own_forkserver() -> forkserver.ForkServer:
    own = forkserver.ForkServer()
    own.set_forkserver_preload([scorer_process.__name__])
    return own


_server = _own_forkserver()
os.register_at_fork(after_in_child=_forget_forkserver)


def _start_forkserver() -> None:
    """Starts the process that scorers are forked from, protected from Ctrl-C: a terminal sends it
    to all processes, and the server decides how they react."""
    _place_its_socket()
    # First multiprocessing's helper: starting it unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _without_settings(), start_method_stays():
            _server.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_settings() -> Iterator[None]:
    """Hides the server's own variables, its keys among them, from a process that starts within."""
    ours = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(SETTINGS)}
    try:
        yield
    finally:
        os.environ.update(ours)


def _place_its_socket() -> None:
    """Makes multiprocessing choose its folder once, early, where a socket's path fits."""
    usual = tempfile.tempdir
    tempfile.tempdir = folder_for_sockets()
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = usual


T = TypeVar("T")
START_TIMEOUT_SECONDS = 120.0
_LISTING_SECONDS = 600.0
SCORING_FAILURES = ScorerError, SandboxError, JudgeError
"""Errors of scoring that are not the model's fault. Scoring is retried."""
_THEIR_ERRORS: dict[str, type[SandboxError | JudgeError]] = {
    **by_kind(SandboxError),
    **by_kind(JudgeError),
}

SCORER_KILLED = "scorer_killed"
"""Metric of a score, and flag of a rollout, whose text used up the scorer's CPU seconds."""


class ScorerDied(ScorerError): ...


class ScorerOutOfCpu(ScorerDied):
    """One call used more CPU seconds than the environment allows."""


class ScorerPool:
    """Scores concurrently while its async context is entered.

    Args:
        env_reference: as `registry.find` takes it; a path should be absolute.
        processes: number of scorer processes; 0: nothing is scored here, see `declared`.
        declared: what the environment declares, where there is no process to ask.
        sandbox_address: where the environment's `sandboxes` are made; unset: it has none.
        rubric: scores instead of the environment (see `with_rubric`); its file should be absolute.
        judge: what `self.judge` asks; it stays open for as long as this pool.
        spent: is called with the seconds by the clock and the CPU seconds of each score.
    """

    def __init__(
        self,
        env_reference: str,
        env_config: dict[str, Any],
        processes: int,
        *,
        declared: Declared | None = None,
        sandbox_address: SandboxAddress | None = None,
        rubric: str | None = None,
        judge: JudgeServer | None = None,
        spent: Callable[[float, float], None] = lambda seconds, cpu_seconds: None,
    ) -> None:
        self._spent = spent
        arguments = (env_reference, env_config, sandbox_address, rubric)
        self.judge = judge
        self._scorers = [_Scorer(arguments, judge) for _ in range(processes)]
        self._free: asyncio.LifoQueue[_Scorer] = asyncio.LifoQueue()
        self._limits = ScoreLimits(
            cpu_seconds=math.inf, timeout_seconds=START_TIMEOUT_SECONDS
        )  # until the environment is loaded
        self._declared = declared
        self.rules: RewardRules
        """Known once the context is entered."""
        self.needs_token_ids = False
        """Whether scores need `Result.completion_ids`; known once the context is entered."""

    async def __aenter__(self) -> Self:
        check_working_directory()
        calls = (s.call(scorer_process.declared, (), self._limits) for s in self._scorers)
        try:
            answers = [_value(answer) for answer in await asyncio.gather(*calls)]
        except BaseException:
            await self._close()
            raise
        declared: Declared = (answers or [self._declared])[-1]
        self._limits, self.rules = declared.limits, declared.rewards
        self.needs_token_ids = declared.token_ids
        for scorer in self._scorers:
            self._free.put_nowait(scorer)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    def delivered(self, score: Score) -> Score:
        return delivered_score(score, self.rules)

    async def score(self, task: Task, result: Result, spent: ScoringSpent | None = None) -> Score:
        """Returns the score of one rollout, without totals; the worst reward if its text uses up
        the scorer's CPU seconds. What it takes is added to `spent`, also if it fails."""
        without_text = (task, Result(output=""))
        return await self._score(scorer_process.score, (task, result), without_text, spent)

    async def score_group(
        self,
        task: Task,
        results: list[Result],
        scores: list[Score],
        spent: ScoringSpent | None = None,
    ) -> list[Score]:
        return await self._ask(scorer_process.score_group, (task, results, scores), spent)

    async def task_digests(self, count: int) -> list[str]:
        unlimited = ScoreLimits(cpu_seconds=math.inf, timeout_seconds=_LISTING_SECONDS)
        answer = await self._answer(scorer_process.task_digests, (count,), limits=unlimited)
        digests: list[str] = _value(answer)
        return digests

    async def score_rows(self, tasks: list[Task]) -> list[RowScore]:
        scores: list[RowScore] = _value(await self._answer(scorer_process.score_rows, (tasks,)))
        return scores

    async def score_row(self, row: RowToScore) -> Score:
        """Returns the score of a bare row; its `error` holds any failure. A row whose scorer died
        is scored once more."""
        try:
            try:
                score = await self._score_row(row)
            except ScorerDied:
                score = await self._score_row(row)
        except (*SCORING_FAILURES, ConfigError) as error:
            return Score(error=f"{error.detail.get('cause', error.kind)}: {error}")
        return self.delivered(score)

    async def _score_row(self, row: RowToScore) -> Score:
        empty = msgspec.structs.replace(row, response="", messages=[])
        return await self._score(scorer_process.score_row, (row,), (empty,))

    async def _score(
        self,
        function: Callable[..., Score],
        args: tuple[Any, ...],
        without_text: tuple[Any, ...],
        spent: ScoringSpent | None = None,
    ) -> Score:
        """Returns the score; the worst, with the metric SCORER_KILLED, if the text is to blame.

        It is if the process was killed for its CPU seconds (SIGXCPU; a full memory and a kill from
        outside are other signals, a hanging service is the limit by the clock), and the same task
        with an empty answer (`without_text`) is done within the limit.
        """
        try:
            return await self._ask(function, args, spent)
        except ScorerOutOfCpu as error:
            try:
                await self._answer(function, without_text, spent)
            except ScorerOutOfCpu as again:
                raise ScorerDied(
                    f"{error} An empty answer to the same task takes as long: the environment is "
                    "too slow for it, whatever the model writes.",
                    hint="Set the environment's score_cpu_seconds.",
                ) from again
            return Score(reward=self.rules.range.worst, metrics={SCORER_KILLED: 1.0})

    async def _ask(
        self, function: Callable[..., T], args: tuple[Any, ...], spent: ScoringSpent | None
    ) -> T:
        answer = await self._answer(function, args, spent)
        self._spent(answer.seconds, answer.cpu_seconds)
        value: T = _value(answer)
        return value

    async def _answer(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        spent: ScoringSpent | None = None,
        limits: ScoreLimits | None = None,
    ) -> ScorerAnswer:
        scorer = await self._free.get()
        started = time.monotonic()
        try:
            return await scorer.call(function, args, limits or self._limits)
        finally:
            self._free.put_nowait(scorer)
            judged = scorer.take_judge_usage()
            if spent is not None:
                spent.add(time.monotonic() - started, judged)

    async def _close(self) -> None:
        await asyncio.gather(*(scorer.close() for scorer in self._scorers))


class _Scorer:
    """One scorer process, which is replaced when it has ended."""

    def __init__(
        self,
        arguments: tuple[str, dict[str, Any], SandboxAddress | None, str | None],
        judge: JudgeServer | None,
    ) -> None:
        self._arguments = arguments
        self._judge = judge
        self._address: JudgeAddress | None = None
        self._timer = _Timer(math.inf)
        self._process: ScorerChannel | None = None

    async def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], limits: ScoreLimits
    ) -> ScorerAnswer:
        try:
            request = pickle.dumps((function, args))
        except Exception as error:
            raise ScorerError(f"The scorer's arguments cannot be pickled: {error}") from error
        for _ in range(2):
            try:
                return await self._call_once(request, limits)
            except ScorerEnded as error:
                if error.garbled:
                    await self.close()
                    raise ScorerError(
                        "The scorer process sent something other than its answer and was "
                        "killed. The environment must not write to the socket of its process."
                    ) from error
                if error.began:
                    raise await self._death(limits) from error
                # The process died while idle: nothing was lost, another one takes over.
                await self.close()
        raise ScorerError("A scorer process cannot be started.")

    def take_judge_usage(self) -> JudgeUsage | None:
        """Returns what the judge was asked since the last time; None: nothing."""
        if self._judge is None or self._address is None:
            return None
        return self._judge.take_usage(self._address)

    async def _call_once(self, request: bytes, limits: ScoreLimits) -> ScorerAnswer:
        process = self._process
        if process is None or not process.usable:
            process = self._process = await self._started()
            await process.loaded()
        self._timer = _Timer(limits.timeout_seconds)
        try:
            async with self._timer.running:
                answer = await process.ask(request)
        except TimeoutError as error:
            raise ScorerDied(
                f"Scoring took longer than {limits.timeout_seconds:g} seconds and was killed."
            ) from error
        try:
            return cast(ScorerAnswer, pickle.loads(answer))
        except Exception as error:
            raise ScorerError(
                f"The scorer's answer contains objects that only its own process can read: {error}"
            ) from error

    async def _started(self) -> ScorerChannel:
        if self._judge is not None and self._address is None:
            self._address = self._judge.register(lambda: self._timer.stopped())
        context = await asyncio.to_thread(scorer_context, self._arguments[0])
        return await ScorerChannel.started(context, (*self._arguments, self._address))

    async def _death(self, limits: ScoreLimits) -> ScorerDied:
        process, self._process = self._process, None
        exit_code = None if process is None else await process.ended()
        if exit_code == -signal.SIGXCPU:
            return ScorerOutOfCpu(
                f"Scoring used more than {limits.cpu_seconds:g} CPU seconds and was killed."
            )
        return ScorerDied("The scorer process died while scoring.", exit_code=exit_code)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()
            await process.ended()


class _Timer:
    """Seconds by the clock, without those in which the judge is asked."""

    def __init__(self, seconds: float) -> None:
        self.running = asyncio.timeout(None if math.isinf(seconds) else seconds)
        self._stops = 0
        self._left: float | None = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        now = asyncio.get_running_loop().time
        self._stops += 1
        ends = self.running.when()
        if self._stops == 1 and ends is not None and not self.running.expired():
            with suppress(RuntimeError):  # the score has ended meanwhile
                self.running.reschedule(None)
                self._left = ends - now()
        try:
            yield
        finally:
            self._stops -= 1
            if not self._stops and self._left is not None:
                with suppress(RuntimeError):  # the score has ended meanwhile
                    self.running.reschedule(now() + self._left)
                self._left = None


def _value(answer: ScorerAnswer) -> Any:
    """Errors that a person must repair (a setting, a missing library) stop the run."""
    failure = answer.failure
    if failure is None:
        return answer.value
    if failure.kind in _THEIR_ERRORS:
        raise _THEIR_ERRORS[failure.kind](failure.message, hint=failure.hint)
    for kind in (ConfigError, RewardError):
        if failure.kind == kind.kind:
            raise kind(failure.message, hint=failure.hint, **failure.detail)
    detail = {**failure.detail, "cause": failure.kind}
    raise ScorerError(failure.message, hint=failure.hint, **detail)


async def score_once(
    scorer: ScorerPool, task: Task, result: Result, spent: ScoringSpent | None = None
) -> Score:
    """Scores a rollout; retries a failed scorer once before the rollout fails."""
    try:
        return await scorer.score(task, result, spent)
    except SCORING_FAILURES as error:
        if is_bug(error):
            raise
        return await scorer.score(task, result, spent)


def scores_groups(environment: Environment) -> bool:
    return type(environment).score_group is not Environment.score_group
