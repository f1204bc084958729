"""Isolated agents per second, with a model that answers at once: ours, and the way of old.

    python tests/benchmarks/bench_agents.py [agents]

Each agent is smolagents' CodeAgent, takes three steps and answers; eight run at a time. Ours: a
fork of a warm parent behind the wall for each, and an interpreter of its own in there. The way of
old: a process for each, nothing walled off, smolagents' own interpreter and prompts, model calls
through queues of which the parent takes one request every 10 ms. Prints rates, and the CPU time of
an agent with all that it takes but the server. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvloop
from smolagents import CodeAgent, LogLevel, Model
from smolagents.models import ChatMessage, MessageRole

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from support.gaia_standin import ZOO, scripted

from envserver.config import WorkersConfig
from envserver.workers.local import LocalPool
from envserver.workers.walled import Wall

AT_ONCE = 8
TICK_SECONDS = 0.01
CODES = ("x = 6", "y = x * 7")
ANSWER = "final_answer('42')"


async def ours(agents: int) -> float:
    """Seconds, without the start of the pool."""
    async with scripted() as proxy:
        config = WorkersConfig(processes=1, dedicated=AT_ONCE)
        wall = Wall(kind="namespace", port=proxy.port, memory_mb=600, disk_mb=32)
        async with LocalPool(config, [f"{ZOO}:GaiaZoo"], wall=wall, listen=proxy.also_on) as pool:
            await pool.run(proxy.ask(*CODES))
            jobs = [proxy.ask(*CODES, seconds=600) for _ in range(agents)]
            began = time.perf_counter()
            await asyncio.gather(*(pool.run(job) for job in jobs))
            seconds = time.perf_counter() - began
            assert all(proxy.posted(job)["output"]["answer"] == "42" for job in jobs)
            return seconds


class _Queued(Model):  # type: ignore[misc]  # a class of a library without types
    def __init__(self, number: int, requests: Any, answers: Any) -> None:
        super().__init__(model_id="queued")
        self._number, self._requests, self._answers = number, requests, answers

    def generate(self, messages: list[ChatMessage], **options: Any) -> ChatMessage:
        turn = sum(message.role == MessageRole.ASSISTANT for message in messages)
        self._requests.put((self._number, turn))
        return ChatMessage(role=MessageRole.ASSISTANT, content=self._answers.get())


def _agent(number: int, requests: Any, answers: Any, results: Any) -> None:
    model = _Queued(number, requests, answers)
    results.put(CodeAgent([], model, verbosity_level=LogLevel.OFF).run("How much is it?"))


def of_old(agents: int) -> float:
    """Seconds for groups of eight, one after the other."""
    context = multiprocessing.get_context("fork")
    began = time.perf_counter()
    for _ in range(agents // AT_ONCE):
        with context.Manager() as manager:
            requests, results = manager.Queue(), manager.Queue()
            answers = [manager.Queue() for _ in range(AT_ONCE)]
            over = threading.Event()
            server = threading.Thread(target=_serve, args=(requests, answers, over))
            server.start()
            children = [
                context.Process(target=_agent, args=(number, requests, answers[number], results))
                for number in range(AT_ONCE)
            ]
            for child in children:
                child.start()
            assert all(str(results.get()) == "42" for _ in children)
            for child in children:
                child.join()
            over.set()
            server.join()
    return time.perf_counter() - began


def _serve(requests: Any, answers: list[Any], over: threading.Event) -> None:
    while not over.is_set():
        try:
            number, turn = requests.get_nowait()
        except queue.Empty:
            pass
        else:
            code = CODES[turn] if turn < len(CODES) else ANSWER
            answers[number].put(f"Now.\n<code>\n{code}\n</code>")
        time.sleep(TICK_SECONDS)


def main() -> None:
    agents = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    for round_number in (1, 2):
        for name, seconds_of in (("of old", of_old), ("ours", lambda n: uvloop.run(ours(n)))):
            before = _cpu_seconds()
            seconds = seconds_of(agents)
            cpu = (_cpu_seconds() - before) / agents * 1000
            rate = agents / seconds
            print(
                f"{round_number} {name:7} {rate:6.1f} agents per second, {cpu:5.1f} ms of CPU each"
            )


def _cpu_seconds() -> float:
    """Of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
