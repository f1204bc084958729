"""`--ray` on a real Ray cluster of several nodes, in `.venv-ray` (`make ray-peer`)."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import environment_variables, group_ids, running, until
from support.process_tree import alive_with
from support.ray_nodes import RayNodes, assert_none_twice_and_no_hole, ray_nodes, served_at, trainer
from support.waiting import PATIENCE

OPEN = 5
"""Groups that a runner has open at most: those of 8 rollouts, and one."""
SIM = (
    *("--env.group_size", 2, "--env.ensure_scores_are_not_same", "false"),
    *("--model", "sim", "--workers.processes", 1, "--rollouts.max_concurrent", 8),
)

SUMS = """
from envserver import Environment, Score, Task


class Sums(Environment):
    def tasks(self, split):
        for number in range(100):
            yield Task(f"sum-{number}", {"number": number}, {"sum": str(number + number)})

    async def rollout(self, task, run):
        question = f"What is {task.public['number']} and as much again?"
        return (await run.chat([{"role": "user", "content": question}])).content

    def score(self, task, result):
        return Score(reward=float(task.hidden["sum"] in (result.output or "")))

    def demonstration(self, task):
        return [{"role": "assistant", "content": task.hidden["sum"]}]
"""


@pytest.fixture(scope="module")
def cluster(ray_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """Two nodes with one CPU each, and a head without any."""
    with ray_nodes(ray_python, tmp_path_factory.mktemp("ray"), nodes=2) as nodes:
        yield nodes


@pytest.fixture
def program(ray_python: Path) -> Path:
    return ray_python.with_name("envserver")


def envserver_of(program: Path, *words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command of `program` to its end."""
    return subprocess.run(
        [str(program), *map(str, words)],
        cwd=folder,
        env=environment_variables(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_one_node_is_killed_another_added(cluster: RayNodes, program: Path, tmp_path: Path) -> None:
    words = ("--env", "math", *SIM, "--ray", cluster.address, "--ray.runners", 2, "--port", 0)
    with running(
        "serve", *words, "--store", tmp_path / "s.db", folder=tmp_path, program=program
    ) as server:
        url = served_at(server)
        with trainer(url, 4) as one:

            def latest(seed: int) -> int:
                """The largest number of a stream that the trainer has."""
                prefix = f"math-train-{seed}-"
                mine = (name for name in one.got if name.startswith(prefix))
                return max((int(name.split("-")[3]) for name in mine), default=0)

            def train_until(both_have: list[int]) -> None:
                one.train(lambda: all(latest(n) > has for n, has in enumerate(both_have)))

            train_until([0, 0])
            at_kill = [latest(seed) for seed in (0, 1)]
            cluster.kill(0)
            cluster.add()
            # Both go on, past what was open when the node was killed.
            train_until([number + 3 * OPEN for number in at_kill])
        server.send(signal.SIGTERM)
        assert server.end() == 0, server.output()
        assert "runner_lost" in server.output()
    assert_none_twice_and_no_hole(one.got, tmp_path / "s.db", 2)
    assert not alive_with(url)


def test_process_makes_the_same_groups(cluster: RayNodes, program: Path, tmp_path: Path) -> None:
    """Also where the environment's code comes to the nodes with the command."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sums.py").write_text(SUMS)
    words = ("process", "--env", "sums.py", *SIM, "--total_groups", 24)
    folder = tmp_path / "code"
    here = envserver_of(program, *words, "-o", tmp_path / "here.jsonl", folder=folder)
    assert here.returncode == 0, here.stderr
    ray = ("--ray", cluster.address, "--ray.max", 2, "--ray.runtime_env", '{"working_dir": "."}')
    there = envserver_of(program, *words, *ray, "-o", tmp_path / "there.jsonl", folder=folder)
    assert there.returncode == 0, there.stderr
    made = [group_ids(tmp_path / name) for name in ("here.jsonl", "there.jsonl")]
    assert len(made[0]) == 24
    assert sorted(made[0]) == sorted(made[1]), there.stderr


def test_what_fits_nowhere_is_said(cluster: RayNodes, program: Path, tmp_path: Path) -> None:
    ray = ("--ray", cluster.address, "--ray.resources", '{"tpu": 1}', "--ray.place_seconds", 0)
    done = envserver_of(program, "process", "--env", "math", *SIM, *ray, folder=tmp_path)
    assert done.returncode == 2
    assert "CPU 1, tpu 1" in done.stderr and "zone=b" in done.stderr


def test_a_trainer_on_ray_has_a_server(cluster: RayNodes, ray_python: Path, tmp_path: Path) -> None:
    trainer = Path(__file__).parents[1] / "support" / "ray_peer" / "trainer.py"
    done = envserver_of(ray_python, trainer, cluster.address, tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    url = facts.pop("url")
    assert facts == {"groups": 4, "rows": 8, "dtypes": ["int32", "float32"], "same": True}
    assert not alive_with(url)


def test_a_killed_server_leaves_nothing(cluster: RayNodes, program: Path, tmp_path: Path) -> None:
    words = ("--env", "math", *SIM, "--ray", cluster.address, "--ray.max", 2, "--port", 0)
    with running("serve", *words, folder=tmp_path, program=program) as server:
        url = served_at(server)
        server.wait_for(r"(?s)(environment_registered.*){2}")
        assert alive_with(url)
        server.kill()
        until(lambda: not alive_with(url), lambda: str(alive_with(url)))
