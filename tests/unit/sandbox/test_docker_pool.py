"""The pool of containers: who gets one, how many start at once and how often, which stay warm."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from envserver.sandbox import docker_pool
from envserver.sandbox.docker import ContainerKey, Engine, PoolRules
from envserver.sandbox.docker_pool import Container, NoContainer, Pool, Wanted

ENGINE = Engine(program="/usr/bin/docker", image="image", variables={})


class House:
    """A pool whose engine is this test, and whose clock it sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **rules: Any) -> None:
        self.now = 1000.0
        self.commands: list[Started] = []
        self.given: list[tuple[int, Container | NoContainer]] = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(docker_pool, "time", clock)
        monkeypatch.setattr(docker_pool, "Child", self._child)
        usual = {"pull": "never", "warm": 0, "most_warm": 8, "starts": 2, "starts_per_second": 1.0}
        self._selector = selectors.DefaultSelector()
        settings = PoolRules(prefix="p", **{**usual, **rules})
        self.pool = Pool(ENGINE, settings, self._selector)

    def _child(self, selector: Any, argv: list[str], *rest: Any, talks: bool = False) -> Any:
        started = Started(argv, rest[1], rest[2])
        self.commands.append(started)
        return started

    @property
    def starts(self) -> list[Started]:
        return [each for each in self.commands if each.argv[1] == "run"]

    def want(self, number: int, image: str = "image") -> None:
        key = ContainerKey(image, (), (), 1, 1, 1, 1)
        self.pool.want(Wanted(key, lambda found: self.given.append((number, found))))

    def look(self, seconds: float = 0.0) -> None:
        self.now += seconds
        while ready := self._selector.select(0):
            for key, _ in ready:
                key.data()
        self.pool.tend()


class Started:
    """A command of the engine."""

    def __init__(self, argv: list[str], seconds: float, then: Callable[[int], None]) -> None:
        self.argv, self.then, self.said = argv, then, b"Error: no such thing\n"
        self.expires = 1000.0 + seconds
        self.their_input, stdin = os.pipe()
        stdout, self.their_output = os.pipe()
        self.process = SimpleNamespace(
            stdin=os.fdopen(stdin, "wb", 0), stdout=os.fdopen(stdout, "rb", 0), kill=lambda: None
        )

    def is_ready(self) -> None:
        os.set_blocking(self.their_input, False)
        while True:
            try:
                os.read(self.their_input, 2**20)
            except BlockingIOError:
                break
        os.write(self.their_output, docker_pool.CONTAINER_READY)


def test_starts_are_bounded_at_once_and_per_second_and_the_first_is_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House(monkeypatch)
    for number in range(4):
        house.want(number)
    counts = []
    for seconds in (0.0, 0.5, 0.5, 1.0, 1.0):
        house.look(seconds)
        counts.append(len(house.starts))
    assert counts == [1, 1, 2, 2, 2]  # one a second, two at once
    for started in house.starts:
        house.look()
        started.is_ready()
    house.look()
    house.look()
    assert [number for number, _ in house.given] == [0, 1]
    assert len(house.starts) == 3


def test_a_kind_that_was_used_often_is_kept_warm_for_two_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House(monkeypatch, warm=2, starts=8, starts_per_second=100.0)
    starts = []
    for number in range(8):
        house.want(number)
        house.look(1.0)
        house.starts[-1].is_ready()
        house.look(1.0)
        house.look(1.0)
        starts.append(len(house.starts))
    assert starts == [1, 2, 3, 5, 6, 7, 8, 10]  # the fourth and the eighth bring one in advance
    assert [number for number, _ in house.given] == list(range(8))
    house.starts[-2].is_ready()
    house.starts[-1].is_ready()
    house.look()
    house.look()
    house.want(8)
    house.look(200.0)
    kept = [each for each in house.starts[8:10] if not each.process.stdin.closed]
    (_, given) = house.given[-1]
    assert isinstance(given, Container)
    assert kept == [given.child]  # the other was let go


def test_a_missing_image_is_told_to_all_who_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch)
    house.want(0, "other")
    house.want(1, "other")
    (asked,) = house.commands
    assert asked.argv[1:] == ["image", "inspect", "other"]
    asked.then(1)
    assert [(n, str(why)) for n, why in house.given] == [
        (n, "Error: no such thing") for n in (0, 1)
    ]
    assert all(isinstance(why, NoContainer) and why.image_missing for _, why in house.given)


def test_an_image_is_pulled_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch, pull="missing")
    house.want(0, "other")
    house.want(1, "other")
    house.commands[0].then(1)
    assert house.commands[1].argv[1:] == ["pull", "--quiet", "other"]
    house.commands[1].then(0)
    house.look(2.0)
    house.look(2.0)
    assert len(house.commands) == 4 and len(house.starts) == 2
