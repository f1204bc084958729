"""Services and hooks of an environment that runs in another interpreter: asked over HTTP as any."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import PATIENCE, until
from test_services import Desk, desk

import envserver.api.bodies  # noqa: F401 - as in a server: it has another error of a kind of ours
from envserver import ConfigError, InputError, ServiceError, Services, Task
from envserver.hook_interface import HookBug, ModelCall
from envserver.registry.hosted_services import HostedServices
from envserver.registry.installed import Interpreter
from envserver.registry.service_host import Request, _Host, send
from envserver.service_interface import Caller

CODE = '''
import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path

from envserver import Caller, Environment, InputError, Score, Services, Task, ToolError, tool


class Games(Environment):
    class Config(Environment.Config):
        log: str = ""

    def tasks(self, split):
        yield Task("t", {})

    async def rollout(self, task, run):
        return None

    def score(self, task, result):
        return Score(reward=0.0)

    def note(self, word):
        with Path(self.config.log).open("a") as log:
            log.write(word + "\\n")

    @asynccontextmanager
    async def state(self, task):
        self.note(f"open {task.id}")
        async with asyncio.TaskGroup():  # must be left in the task that entered it
            yield {"secret": task.hidden["secret"], "guesses": 0}
        self.note(f"closed {task.id}")

    async def guess(self, arguments, caller):
        caller.state["guesses"] += 1
        if arguments["number"] < 0:
            raise InputError("Guess a positive number.")
        caller.flag(f"guessed{arguments['number']}")
        return [arguments["number"] == caller.state["secret"], caller.state["guesses"]]

    async def hangs(self, arguments, caller):
        self.note("hangs")
        try:
            await asyncio.Event().wait()
        finally:
            self.note("stopped")

    async def breaks(self, arguments, caller):
        raise KeyError("key=hidden")

    async def pid(self, arguments, caller):
        return os.getpid()

    @tool(on_server=True)
    def peek(self, far: bool, caller: Caller) -> str:
        """Tells the secret, in a thread."""
        if far:
            raise ToolError("it is too far.")
        caller.flag("peeked")
        return str(caller.task.hidden["secret"])

    @asynccontextmanager
    async def services(self):
        self.note("up")
        names = ("guess", "hangs", "breaks", "pid")
        served = {name: getattr(self, name) for name in names}
        yield Services(served, state=self.state, counts=lambda: {"games": 1.0})
        self.note("down")

    async def on_request(self, call):
        if call.messages[-1]["content"] == "bug":
            raise KeyError("k")
        call.caller.flag("looked")
        call.change("shorter", messages=call.messages[-1:])


class Broken(Games):
    def services(self):
        raise ValueError("no index")
'''
PYTHON = Interpreter(
    executable=sys.executable,
    own_path=[],
    version=f"{sys.version_info.major}.{sys.version_info.minor}",
)


def hosted(folder: Path, kind: str = "Games") -> HostedServices:
    file = folder / "games.py"
    file.write_text(CODE)
    return HostedServices(PYTHON, f"{file}:{kind}", {"log": str(folder / "log")})


def game(house: Desk, secret: int):  # type: ignore[no-untyped-def]  # as Desk.open
    return house.open(seconds=60.0, task=Task(f"game-{secret}", {}, {"secret": secret}))


@asynccontextmanager
async def playing(folder: Path) -> AsyncIterator[Desk]:
    async with hosted(folder).running() as services, desk(services) as house:
        yield house


async def test_rollouts_call_services_in_the_environments_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with playing(tmp_path) as house:
        one, first = game(house, 1)
        _, second = game(house, 2)
        assert await first.call_tool("guess", {"number": 2}) == [False, 1]
        assert await second.call_tool("guess", {"number": 2}) == [True, 1]
        many = [first.call_tool("guess", {"number": 1}) for _ in range(20)]
        assert sorted(await asyncio.gather(*many)) == [[True, n] for n in range(2, 22)]
        with pytest.raises(InputError, match="positive number"):
            await first.call_tool("guess", {"number": -1})
        assert await first.call_tool("peek", {"far": False}) == "1"
        with pytest.raises(InputError, match="it is too far"):
            await first.call_tool("peek", {"far": True})
        with pytest.raises(InputError, match="Expected `bool`"):
            await first.call_tool("peek", {"far": 1})
        assert one.flags == {"guessed1", "guessed2", "peeked"}
        assert house.proxy.services.counts() == {"games": 1.0}
        assert await second.call_tool("pid", {}) != os.getpid()
        # One that fails, and one that hangs, hold nobody up.
        hanging = asyncio.create_task(first.call_tool("hangs", {}))
        await until(lambda: "hangs" in log.read_text())
        with pytest.raises(ServiceError) as failed:
            await second.call_tool("breaks", {})
        assert "KeyError" in failed.value.message and "hidden" not in failed.value.message
        house.proxy.seal(one)
        await house.proxy.settle(one)
        await asyncio.gather(hanging, return_exceptions=True)
        await until(lambda: "closed game-1" in log.read_text())
        assert await second.call_tool("guess", {"number": 3}) == [False, 2]
        await house.proxy.services.close()
    words = ["up", "open game-1", "open game-2", "hangs", "stopped", "closed game-1"]
    assert log.read_text().splitlines() == [*words, "closed game-2", "down"]


@pytest.mark.thorough
async def test_a_process_that_dies_fails_its_rollouts_which_may_be_tried_again(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as house:
        attempt, run = game(house, 1)
        hanging = asyncio.create_task(run.call_tool("hangs", {}))
        await until(lambda: "hangs" in (tmp_path / "log").read_text())
        os.kill(await run.call_tool("pid", {}), signal.SIGKILL)
        with pytest.raises(ServiceError, match="ended"):
            await hanging
        assert attempt.service_failure is not None
        with pytest.raises(ServiceError, match="ended"):  # its state is lost
            await run.call_tool("guess", {"number": 1})
        _, again = game(house, 1)
        assert await again.call_tool("guess", {"number": 1}) == [True, 1]


@pytest.mark.thorough
async def test_hooks_look_at_calls_in_the_environments_process(tmp_path: Path) -> None:
    flags: list[str] = []

    def call(text: str) -> ModelCall:
        task = Task("t", {}, {"secret": 7})
        caller = Caller(rollout_id="r", group_id="g", task=task, flag=flags.append)
        messages = [{"role": "user", "content": "?"}, {"role": "user", "content": text}]
        return ModelCall(caller=caller, agent=None, messages=messages, tools=[])

    environment = hosted(tmp_path)
    async with environment.running():
        looked = call("hi")
        await environment.hook("on_request", looked)
        assert (looked.reason, looked.refused) == ("shorter", False)
        assert looked.changes == {"messages": [{"role": "user", "content": "hi"}]}
        assert flags == ["looked"]
        with pytest.raises(HookBug, match=r"KeyError: 'k' \(.*games.py:\d+, in Games.on_request"):
            await environment.hook("on_request", call("bug"))


@pytest.mark.thorough
async def test_what_cannot_be_started_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ValueError: no index"):
        async with hosted(tmp_path, "Broken").running():
            pass
    with pytest.raises(ConfigError, match="None"):
        async with hosted(tmp_path, "None").running():
            pass


async def test_a_state_whose_answer_crosses_its_cancel_is_left() -> None:
    left = asyncio.Event()

    @asynccontextmanager
    async def state(task: Task) -> AsyncIterator[str]:
        yield "state"
        left.set()

    sent: list[bytes] = []
    writer: Any = SimpleNamespace(write=sent.append)
    nothing: Any = None
    host = _Host(nothing, Services({}, state=state), writer)
    reader = asyncio.StreamReader()
    running = asyncio.create_task(host.run(reader))
    asked: Any = SimpleNamespace(write=reader.feed_data)
    send(asked, Request(1, "open_state", (Task("one", {}),)))
    while not sent:
        await asyncio.sleep(0)
    send(asked, Request(1, "cancel"))
    await asyncio.wait_for(left.wait(), PATIENCE)
    reader.feed_eof()
    await running
