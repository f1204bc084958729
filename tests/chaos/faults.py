"""What is done to the world, drawn from a seed: one fault at a time, each counted by its name."""

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from .relay import TROUBLES
from .world import TAKEOVER_SECONDS, Name, World

Fault = Callable[[World, random.Random], bool]
"""Whether it could be done."""


def _kill(name: Name) -> Fault:
    def fault(world: World, draw: random.Random) -> bool:
        world.kill(name)
        return True

    return fault


def _kill_child(part: str) -> Fault:
    def fault(world: World, draw: random.Random) -> bool:
        return world.kill_child(draw.choice(["server", "joined"]), part, draw)

    return fault


def _pause(world: World, draw: random.Random) -> bool:
    world.pause(draw.choice(world.names), draw.uniform(0.1, 1.5))
    return True


def _kill_a_server(world: World, draw: random.Random) -> bool:
    world.kill(draw.choice([*world.relays]))
    return True


def _stop_a_server(world: World, draw: random.Random) -> bool:
    """Stops it for so long that another one takes over, or not."""
    world.pause(draw.choice([*world.relays]), draw.uniform(0.1, 3.5 * TAKEOVER_SECONDS))
    return True


def _database(world: World, draw: random.Random) -> bool:
    if world.postgres is None:
        return False
    world.postgres.kill()
    time.sleep(draw.uniform(0.0, 0.8))
    world.postgres.start()
    return True


def _trouble(world: World, draw: random.Random) -> bool:
    draw.choice([*world.relays.values()]).trouble(draw.choice(TROUBLES), draw.randint(1, 3))
    return True


def _go_back(world: World, draw: random.Random) -> bool:
    world.go_back(draw.choice(["a", "b"]))
    return True


def _full_disk(world: World, draw: random.Random) -> bool:
    """Fills the disk of the store, where it has one of its own, for a moment."""
    disk = Path(world.store).parent
    if world.postgres is not None or not os.path.ismount(disk):
        return False
    filler = disk / "filler"
    try:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65_536))
        time.sleep(draw.uniform(0.3, 1.5))
    finally:
        filler.unlink()
    return True


FAULTS: dict[str, tuple[float, Fault]] = {
    "kill -9 of the server": (2, _kill("server")),
    "kill -9 of the engine": (1.5, _kill("engine")),
    "kill -9 of the joined environment": (1.5, _kill("joined")),
    "kill -9 of trainer a": (2, _kill("a")),
    "kill -9 of trainer b": (2, _kill("b")),
    "kill -9 of a process of workers": (2, _kill_child("envserver.workers")),
    "kill -9 of a scorer": (1.5, _kill_child("envserver.rollouts")),
    "kill -9 of the database": (1.5, _database),
    "a full disk": (1.5, _full_disk),
    "a paused process": (3, _pause),
    "requests lost or sent twice": (5, _trouble),
    "a trainer goes back to an earlier checkpoint": (0.7, _go_back),
}


FAULTS_OF_SEVERAL: dict[str, tuple[float, Fault]] = {
    "kill -9 of a server": (5, _kill_a_server),
    "a stopped server": (4, _stop_a_server),
    "kill -9 of the database": (2, _database),
    "requests lost or sent twice": (5, _trouble),
    "kill -9 of the joined environment": (1, _kill("joined")),
    "kill -9 of trainer a": (1, _kill("a")),
}
"""Where several servers share a store."""


def torment(
    world: World, seed: int, faults: int, *, rest_seconds: tuple[float, float], progress: float
) -> Counter[str]:
    """Does `faults` things, one after the other, and keeps everything started; how many of each.

    Every kind is done at least once where there are as many, and where it can be done. After a
    fault, with the probability `progress`, the next one waits until trainers get on.
    """
    draw = random.Random(seed)
    kinds = FAULTS_OF_SEVERAL if world.is_shared else FAULTS
    names, weights = list(kinds), [weight for weight, _ in kinds.values()]
    wanted = draw.sample(names, len(names)) if faults >= len(names) - 1 else []
    done: Counter[str] = Counter()
    world.until_progress()
    for _ in range(8 * faults):  # some cannot be done at that moment
        if done.total() >= faults:
            break
        (name,) = [wanted.pop()] if wanted else draw.choices(names, weights)
        if kinds[name][1](world, draw):
            done[name] += 1
        world.keep_up()
        time.sleep(draw.uniform(*rest_seconds))
        if draw.random() < progress:
            world.until_progress()
    return done
