"""Isolated agents per second, with a model that answers at once: ours, and the archived way.

    python tests/benchmarks/bench_agents.py [agents]

Each agent is smolagents' CodeAgent, takes three steps and answers; eight run at a time. Ours: a
fork of a warm parent in the sandbox for each, and an interpreter of its own in there. The archived
way, built after a description of Atropos's smolagents integration: groups of eight, a process for
each agent, nothing sandboxed, smolagents' own interpreter and prompts; model calls go through
queues of which the parent takes one request every 10 ms, and it gives each answer to every agent.
An agent that is being added or removed meanwhile makes that fail: the agent that asked dies, or
hears nothing until `TIMEOUT_SECONDS` are over (here it is ended sooner; the time is reckoned).

Prints agents per second without and with the time lost to timeouts, the CPU time of an agent with
all that it takes but the server, the peak of memory (PSS of all processes together), and how many
agents gave no answer. Run it on a machine that does nothing else.
"""

import asyncio
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from smolagents import CodeAgent, LogLevel, Model
from smolagents.models import ChatMessage, MessageRole

sys.path.insert(0, str(Path(__file__).parents[2]))
from api_load import cpu_below, peak_megabytes
from support.gaia_standin import ZOO, scripted

from envserver import WorkersConfig
from envserver.workers import LocalPool, WorkerSandbox

AT_ONCE = 8
TICK_SECONDS = 0.01
TIMEOUT_SECONDS = 240.0
"""Of the archived integration's agents, unless told otherwise."""
PATIENCE_SECONDS = 5.0
"""After which the benchmark ends one that hears nothing."""
CODES = ("x = 6", "y = x * 7")
ANSWER = "final_answer('42')"


@dataclass
class Run:
    """What a way did with `agents` agents, without its own start."""

    agents: int
    seconds: float = 0.0
    lost: int = 0
    hung: int = 0
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0
    groups_hung: int = 0

    def __str__(self) -> str:
        answered = self.agents - self.lost
        reckoned = self.seconds + self.groups_hung * (TIMEOUT_SECONDS - PATIENCE_SECONDS)
        return (
            f"{answered / self.seconds:6.1f} agents per second"
            f" ({answered / reckoned:5.1f} with timeouts),"
            f" {self.cpu_seconds / self.agents * 1000:5.1f} ms of CPU each,"
            f" {self.peak_memory_mb:4.0f} MB at most,"
            f" {self.lost} of {self.agents} lost ({self.hung} hung)"
        )


def ours(agents: int) -> Run:
    """Any agent that gives no answer raises."""
    return uvloop.run(_ours(agents))


async def _ours(agents: int) -> Run:
    async with scripted() as proxy:
        config = WorkersConfig(processes=1, dedicated=AT_ONCE)
        sandbox = WorkerSandbox(backend="namespace", port=proxy.port, memory_mb=600, disk_mb=32)
        async with LocalPool(
            config, [f"{ZOO}:GaiaZoo"], sandbox=sandbox, listen=proxy.also_on
        ) as pool:
            await pool.run(proxy.ask(*CODES))
            jobs = [proxy.ask(*CODES, seconds=600) for _ in range(agents)]
            began, cpu = time.perf_counter(), cpu_below()
            await asyncio.gather(*(pool.run(job) for job in jobs))
            run = Run(agents, time.perf_counter() - began)
            run.cpu_seconds = cpu_below() - cpu
            assert all(proxy.posted(job)["output"]["answer"] == "42" for job in jobs)
            return run


class _Queued(Model):  # type: ignore[misc]  # a class of a library without types
    def __init__(self, number: int, requests: Any, answers: Any) -> None:
        super().__init__(model_id="queued")
        self._number, self._requests, self._answers = number, requests, answers

    def generate(self, messages: list[ChatMessage], **options: Any) -> ChatMessage:
        turn = sum(message.role == MessageRole.ASSISTANT for message in messages)
        self._requests.put((self._number, turn))
        while True:
            number, text = self._answers.get()
            if number == self._number:
                if text is None:
                    raise RuntimeError("the model could not be asked")
                return ChatMessage(role=MessageRole.ASSISTANT, content=text)


def _agent(number: int, requests: Any, answers: Any, results: Any) -> None:
    model = _Queued(number, requests, answers)
    results.put((number, CodeAgent([], model, verbosity_level=LogLevel.OFF).run("How much is it?")))


def archived(agents: int) -> Run:
    """Groups of eight, one after the other."""
    run, cpu = Run(agents), cpu_below()
    context = multiprocessing.get_context("fork")
    began = time.perf_counter()
    for _ in range(agents // AT_ONCE):
        with context.Manager() as manager:
            hung, answered = _group(context, manager)
        run.hung += hung
        run.groups_hung += hung > 0
        run.lost += AT_ONCE - answered
    run.seconds = time.perf_counter() - began
    run.cpu_seconds = cpu_below() - cpu
    return run


def _group(context: Any, manager: Any) -> tuple[int, int]:
    requests, results = manager.Queue(), manager.Queue()
    answers: dict[int, Any] = {}
    over = threading.Event()
    server = threading.Thread(target=_serve, args=(requests, answers, over))
    server.start()
    children = []
    for number in range(AT_ONCE):
        answers[number] = manager.Queue()
        asked = (number, requests, answers[number], results)
        children.append(context.Process(target=_quiet, args=asked))
        children[-1].start()
    hung = 0
    until = time.monotonic() + PATIENCE_SECONDS
    for number, child in enumerate(children):
        child.join(max(0.0, until - time.monotonic()))
        if child.is_alive():
            hung += 1
            child.kill()
            child.join()
        del answers[number]
    over.set()
    server.join()
    return hung, results.qsize()


def _quiet(*asked: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # tracebacks of those that the race kills
    _agent(*asked)


def _serve(requests: Any, answers: dict[int, Any], over: threading.Event) -> None:
    while not over.is_set():
        try:
            number, turn = requests.get_nowait()
        except queue.Empty:
            pass
        else:
            code = CODES[turn] if turn < len(CODES) else ANSWER
            _tell_all(answers, number, f"Now.\n<code>\n{code}\n</code>")
        time.sleep(TICK_SECONDS)


def _tell_all(answers: dict[int, Any], number: int, text: str) -> None:
    for words in (text, None):
        try:
            for one in answers.values():
                one.put((number, words))
        except RuntimeError:  # the dictionary changed its size meanwhile
            continue
        return


def _measured(way: Callable[[int], Run], agents: int) -> Run:
    with peak_megabytes(os.getpid(), 0.2, itself=False) as peak:
        run = way(agents)
    run.peak_memory_mb = peak[0]
    return run


def main() -> None:
    agents = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    for number in (1, 2):
        for name, way in (("archived", archived), ("ours", ours)):
            print(f"{number} {name:8} {_measured(way, agents)}", flush=True)


if __name__ == "__main__":
    main()
