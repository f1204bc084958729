"""Hostile programs against the backends: what each holds, and what the weaker ones are known not
to.

The programs stand in `hostile/`, and can be run by hand: see `hostile/driver.py`. Walls without
namespaces are tried as an ordinary user only: what gets through them must not meet root.
"""

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
SOME_OR_ALL = [pytest.param(4, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


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


def what_got_through(told: dict[str, Any], backend: str = "") -> dict[str, list[str]]:
    """By name; it may be nothing but what a backend is known to let through."""
    found = [one for one in told["programs"] + told["controls"] if one["escapes"]]
    surprises = [one for one in found if backend not in one["lets_through"]]
    assert not (backend and surprises), surprises
    return {f"{one['category']}: {one['name']}": one["escapes"] for one in found}


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
    "every", [pytest.param("8", id="some"), pytest.param("1", id="all", marks=pytest.mark.slow)]
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
    tell(_summary("docker", report(AS_IT_IS, "docker", "--image", docker_image, *part)))


@pytest.mark.slow
def test_podman_lets_through_what_is_known(podman_image: str, tell: Callable[[str], None]) -> None:
    tell(_summary("podman", report(AS_IT_IS, "docker", "--image", podman_image, "--every", "1")))


def _summary(name: str, told: dict[str, Any]) -> str:
    through = what_got_through(told, name)
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
            backend: what_got_through(told, backend)
            for backend, told in zip(backends, reports, strict=True)
        }


def test_a_weaker_wall_lets_through_what_it_is_known_to(
    weaker: dict[str, dict[str, list[str]]],
    request: pytest.FixtureRequest,
    tell: Callable[[str], None],
) -> None:
    """Without a wall many get through: else the programs would prove nothing."""
    assert len(weaker["unsafe-local"]) > 32 // request.node.callspec.params["weaker"]
    tell(f"landlock lets through: {', '.join(sorted(weaker['landlock']))}")
    tell(f"unsafe-local lets {len(weaker['unsafe-local'])} of the hostile programs through")
