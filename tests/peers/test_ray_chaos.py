"""`serve --ray` while nodes die one after the other, and what it costs beside one machine."""

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support.commands import Running, running
from support.process_tree import alive_with, cpu_seconds, descendants
from support.ray_nodes import RayNodes, assert_none_twice_and_no_hole, ray_nodes, served_at, trainer

pytestmark = pytest.mark.slow
KILLS = 10
GROUPS = 400
"""Over which CPU time is measured."""
SIM = (
    *("--env", "math", "--env.ensure_scores_are_not_same", "false", "--env.group_size", 8),
    *("--model", "sim", "--port", 0),
)


@pytest.fixture(scope="module")
def cluster(ray_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """Three nodes with one CPU each."""
    with ray_nodes(ray_python, tmp_path_factory.mktemp("ray"), nodes=3) as nodes:
        yield nodes


def registrations(server: Running) -> int:
    return len(re.findall("environment_registered", server.output()))


def is_more(server: Running, registered: int) -> bool:
    return registrations(server) > registered


def test_ten_nodes_are_killed_at_random(
    cluster: RayNodes, ray_python: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    rng, alive = random.Random(23), [0, 1, 2]
    words = (*SIM, "--workers.processes", 1, "--rollouts.max_concurrent", 32)
    ray = ("--ray", cluster.address, "--ray.runners", 3, "--store", tmp_path / "s.db")
    program = ray_python.with_name("envserver")
    with running("serve", *words, *ray, folder=tmp_path, program=program) as server:
        url = served_at(server)
        longest = 0.0
        with trainer(url, 8) as one:
            one.train(lambda: registrations(server) >= 3)
            for _ in range(KILLS):
                seen = registrations(server)
                cluster.kill(alive.pop(rng.randrange(len(alive))))
                alive.append(cluster.add())
                before = time.monotonic()
                one.train(partial(is_more, server, seen))
                longest = max(longest, time.monotonic() - before)
            cluster.add()  # one more than there were
            enough = len(one.got) + 200
            one.train(lambda: len(one.got) >= enough)
        server.send(signal.SIGTERM)
        assert server.end() == 0, server.output()
    assert_none_twice_and_no_hole(one.got, tmp_path / "s.db", 3)
    assert not alive_with(url)
    tell(
        f"{KILLS} nodes killed: {len(one.got)} groups trained on, none twice, no hole in a stream; "
        f"{longest:.0f} s at most from a new node to the runner's next registration"
    )


def test_a_group_costs_hardly_more_cpu_than_on_one_machine(
    cluster: RayNodes, ray_python: Path, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """The same number of worker processes in both."""
    program = ray_python.with_name("envserver")
    words = (*SIM, "--rollouts.max_concurrent", 32)

    def cost(name: str, *more: object, runners: int) -> float:
        """CPU milliseconds of the server and its runners for a group."""
        place = ("--store", tmp_path / f"{name}.db")
        with running("serve", *words, *more, *place, folder=tmp_path, program=program) as server:
            url = served_at(server)
            with trainer(url, 8) as one:
                one.train(lambda: len(one.got) >= 200 and len(alive_with(url)) >= runners)
                begun, groups = used(server, url), len(one.got)
                one.train(lambda: len(one.got) >= groups + GROUPS)
                return (used(server, url) - begun) / (len(one.got) - groups) * 1000

    def used(server: Running, url: str) -> float:
        """CPU seconds so far; a process that has ended counts with the one that waited for it."""
        return sum(cpu_seconds({top, *descendants(top)}) for top in (server.pid, *alive_with(url)))

    # Twice each, by turns: the machine does other things, too.
    here, there = [], []
    for turn in range(2):
        here.append(cost(f"here-{turn}", "--workers.processes", 2, runners=0))
        ray = ("--ray", cluster.address, "--ray.runners", 2, "--workers.processes", 1)
        there.append(cost(f"there-{turn}", *ray, runners=2))
    efficiency = min(here) / min(there)
    tell(
        f"CPU for a group of 8: {min(here):.1f} ms on one machine, {min(there):.1f} ms on Ray: "
        f"efficiency {efficiency:.2f}"
    )
    assert efficiency > 0.9
