"""Hostile programs against the backends: what each holds, and what the weaker ones are known not
to.

The programs stand in `hostile/`, and can be run by hand: see `hostile/driver.py`. Walls without
namespaces are tried as an ordinary user only: what gets through them must not meet root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE

TESTS = Path(__file__).parents[1]
IS_ROOT = os.geteuid() == 0
DRIVER = ("-m", "hostile.driver")
AS_IT_IS = (sys.executable, *DRIVER)
AS_ORDINARY_USER = (sys.executable, "-m", "support.ordinary_user", "python", *DRIVER)
USERS = (
    [
        pytest.param(AS_ORDINARY_USER, 1, id="as an ordinary user"),
        pytest.param(AS_IT_IS, 3, id="as root, some"),
        pytest.param(AS_IT_IS, 1, id="as root", marks=pytest.mark.slow),
    ]
    if IS_ROOT
    else [pytest.param(AS_IT_IS, 1, id="as an ordinary user")]
)
"""Users, and N where a user tries every Nth program."""
SOME_OR_ALL = [
    pytest.param(4, id="some"),
    pytest.param(1, id="all", marks=pytest.mark.slow),
]

# What Landlock, a filter of system calls and a watcher do not hold, or do not let work.
LANDLOCK_LETS_THROUGH = {
    # Files are counted after they were made, so what is over the limit stays: then no other
    # program of the sandbox runs.
    "limits: many big files",
    "limits: sixty thousand empty files",
    # They are counted a few times in a tenth of a second (for root the kernel counts them).
    "limits: many processes",
    "limits: many threads",
    # There are no sockets, and no /dev/shm for semaphores.
    "controls: a server of its own",
    "controls: a pool of processes",
}
# Each of its three writable folders has a limit; their sum is sampled, and what is over it stays.
DOCKER_LETS_THROUGH = {
    "limits: many big files",
    "limits: sixty thousand empty files",
    "limits: a big file in each folder",
}
# Podman's folders have no limit of files, so these are sampled, too.
PODMAN_LETS_THROUGH = {*DOCKER_LETS_THROUGH, "limits: five thousand folders in each other"}
# Nothing but limits and a sweep: the categories that it does not stand for at all, and the rest.
UNSAFE_HAS_NO = ("disclosure:", "process control:", "kernel surface:", "files:", "network:")
UNSAFE_LETS_THROUGH = {
    *LANDLOCK_LETS_THROUGH,
    "limits: big files that were removed and are open",
    "limits: memory in files without a name",
    "limits: memory that is shared and mapped no more",
    "limits: memory of the device of zeros",
    "limits: huge pages of the host",
    "limits: memory in shared segments that nobody holds",
    "limits: memory in message queues",
    "limits: a big file in each folder",
    "limits: memory in pipes",
    "clean-up: modules planted for the next program",
    "result channel: the modules of its server changed",
    "agents in process: environment by a format string",
    "agents in process: commands by a module of a module",
    "agents in process: files by a subclass",
    "agents in process: a call to the host",
}


def report(command: tuple[str, ...], *words: str) -> dict[str, Any]:
    """What the driver tells. `words`: the backend, and options."""
    done = subprocess.run(
        [*command, *words],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["afterwards"] == []
    if "--only" not in words:
        every = int(words[words.index("--every") + 1])
        assert len(told["programs"]) > 140 // every and len(told["controls"]) > 10 // every
    return told


def what_got_through(told: dict[str, Any]) -> dict[str, list[str]]:
    verdicts = told["programs"] + told["controls"]
    return {
        f"{one['category']}: {one['name']}": one["escapes"] for one in verdicts if one["escapes"]
    }


@pytest.mark.parametrize(("command", "every"), USERS)
@pytest.mark.parametrize("backend", ["namespace", "bubblewrap"])
def test_the_walls_hold_every_hostile_program_and_no_ordinary_one(
    command: tuple[str, ...], every: int, backend: str, tell: Callable[[str], None]
) -> None:
    if backend == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is missing: install bwrap")
    told = report(command, backend, "--every", str(every))
    assert what_got_through(told) == {}
    tell(
        f"{backend}, user {told['user']}: {len(told['programs'])} hostile programs held, "
        f"{len(told['controls'])} ordinary ones work, {told['seconds']:.0f} s"
    )


@pytest.mark.parametrize(
    "every",
    [pytest.param("8", id="some"), pytest.param("1", id="all", marks=pytest.mark.slow)],
)
def test_the_walls_of_another_machine_hold(every: str, tell: Callable[[str], None]) -> None:
    told = report(AS_IT_IS, "namespace", "--elsewhere", "--every", every)
    assert what_got_through(told) == {}
    tell(f"elsewhere: {len(told['programs'])} hostile programs held, {told['seconds']:.0f} s")


@pytest.mark.parametrize(
    "part",
    [["--only", "limits:", "--every", "3"], pytest.param(["--every", "1"], marks=pytest.mark.slow)],
    ids=["limits", "all"],
)
def test_a_container_lets_through_what_it_is_known_to(
    docker_image: str, part: list[str], tell: Callable[[str], None]
) -> None:
    told = report(AS_IT_IS, "docker", "--image", docker_image, *part)
    through = what_got_through(told)
    assert set(through) <= DOCKER_LETS_THROUGH, through
    tell(_summary("docker", told, through))


@pytest.mark.slow
def test_podman_lets_through_what_it_is_known_to(
    podman_image: str, tell: Callable[[str], None]
) -> None:
    told = report(AS_IT_IS, "docker", "--image", podman_image, "--every", "1")
    through = what_got_through(told)
    assert set(through) <= PODMAN_LETS_THROUGH, through
    tell(_summary("podman", told, through))


def _summary(name: str, told: dict[str, Any], through: dict[str, list[str]]) -> str:
    tried = len(told["programs"]) + len(told["controls"])
    words = f"{name}: {tried - len(through)} of {tried} programs held or work"
    return f"{words}, not: {', '.join(through) or 'none'}; {told['seconds']:.0f} s"


@pytest.fixture(scope="module", params=SOME_OR_ALL)
def weaker(request: pytest.FixtureRequest) -> dict[str, dict[str, list[str]]]:
    """What got through the weaker backends, which are tried at the same time where users differ."""
    backends = ("landlock", "unsafe-local")
    command = AS_ORDINARY_USER if IS_ROOT else AS_IT_IS
    with ThreadPoolExecutor(2 if IS_ROOT else 1) as pool:
        some = ("--every", str(request.param))
        reports = pool.map(lambda backend: report(command, backend, *some), backends)
        return {
            backend: what_got_through(told) for backend, told in zip(backends, reports, strict=True)
        }


def test_landlock_lets_through_what_it_is_known_to(
    weaker: dict[str, dict[str, list[str]]], tell: Callable[[str], None]
) -> None:
    through = weaker["landlock"]
    surprises = {name: why for name, why in through.items() if name not in LANDLOCK_LETS_THROUGH}
    assert surprises == {}
    tell(f"landlock lets through: {', '.join(sorted(through))}")


def test_without_a_wall_many_get_through(
    weaker: dict[str, dict[str, list[str]]],
    request: pytest.FixtureRequest,
    tell: Callable[[str], None],
) -> None:
    """Else the programs would prove nothing."""
    through = weaker["unsafe-local"]
    surprises = {
        name: why
        for name, why in through.items()
        if not name.startswith(UNSAFE_HAS_NO) and name not in UNSAFE_LETS_THROUGH
    }
    assert surprises == {}
    assert len(through) > 32 // request.node.callspec.params["weaker"]
    tell(f"unsafe-local lets {len(through)} of the hostile programs through")
