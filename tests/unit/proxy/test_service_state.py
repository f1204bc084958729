"""Services get the hidden part of the task, and a state of their own for each attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from envserver_records.errors import ConflictError
from support.waiting import until
from test_services import Desk, desk

from envserver import Caller, ServiceError, Services, Task
from envserver.proxy import ProxyAttempt
from envserver.workers.run import AttemptRun


class Games:
    """Number games: each attempt guesses the number that its task hides."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @asynccontextmanager
    async def state(self, task: Task) -> AsyncIterator[dict[str, Any]]:
        self.events.append(f"open {task.id}")
        async with asyncio.TaskGroup():  # must be left in the task that entered it
            yield {"secret": task.hidden["secret"], "guesses": 0}
        self.events.append(f"closed {task.id}")

    async def guess(self, arguments: dict[str, Any], caller: Caller) -> Any:
        caller.state["guesses"] += 1
        assert caller.state["secret"] == caller.task.hidden["secret"]
        return [arguments["number"] == caller.state["secret"], caller.state["guesses"]]

    async def hangs(self, arguments: dict[str, Any], caller: Caller) -> Any:
        self.events.append("hangs")
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("stopped")

    def services(self) -> Services:
        return Services({"guess": self.guess, "hangs": self.hangs}, state=self.state)


def opened(house: Desk, secret: int) -> tuple[ProxyAttempt, AttemptRun]:
    return house.open(task=Task(f"game-{secret}", {}, {"secret": secret}))


async def test_attempts_play_side_by_side_each_with_its_own_state() -> None:
    games = Games()
    async with desk(games.services()) as house:
        one, first = opened(house, 1)
        two, second = opened(house, 2)
        assert games.events == []  # no request, no state
        assert await first.call_tool("guess", {"number": 2}) == [False, 1]
        assert await second.call_tool("guess", {"number": 2}) == [True, 1]
        many = [first.call_tool("guess", {"number": 1}) for _ in range(20)]
        assert sorted(await asyncio.gather(*many)) == [[True, n] for n in range(2, 22)]
        house.proxy.seal(one)
        await house.proxy.settle(one)
        assert games.events == ["open game-1", "open game-2", "closed game-1"]
        assert await second.call_tool("guess", {"number": 3}) == [False, 2]
        await house.proxy.services.close()  # the end of the server
        assert games.events[-1] == "closed game-2"
        assert not two.sealed


async def test_a_state_is_left_after_the_last_request_of_its_attempt() -> None:
    games = Games()
    async with desk(games.services()) as house:
        attempt, run = opened(house, 1)
        call = asyncio.create_task(run.call_tool("hangs", {}))
        await until(lambda: "hangs" in games.events)
        house.proxy.seal(attempt)
        await house.proxy.settle(attempt)
        assert games.events == ["open game-1", "hangs", "stopped", "closed game-1"]
        with pytest.raises((ServiceError, ConflictError)):
            await call


async def test_a_state_that_cannot_be_made_is_a_failure_of_ours() -> None:
    def fails(task: Task) -> Any:
        raise RuntimeError(f"secret={task.hidden}")

    async def guess(arguments: dict[str, Any], caller: Caller) -> Any:
        raise AssertionError("never called")

    async with desk(Services({"guess": guess}, state=fails)) as house:
        attempt, run = opened(house, 1)
        with pytest.raises(ServiceError, match="RuntimeError") as caught:
            await run.call_tool("guess", {})
        assert "secret" not in str(caught.value)
        assert attempt.service_failure is not None


async def test_a_plain_object_is_a_state() -> None:
    async def count(arguments: dict[str, Any], caller: Caller) -> Any:
        caller.state.append(1)
        return len(caller.state)

    async with desk(Services({"count": count}, state=lambda task: [])) as house:
        _, run = opened(house, 1)
        assert [await run.call_tool("count", {}) for _ in range(3)] == [1, 2, 3]
