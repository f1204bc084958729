"""The client without the server: few packages, and a trainer's whole loop against a server.

The environment here holds what the client's wheel requires and nothing else. It is put together
from the packages that the tests run with, so that nothing is downloaded; `make dist` installs the
wheel by pip.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.commands import environment_variables, free_port, running
from support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
MOST_PACKAGES = 8
MOST_MEGABYTES = 100
_MAY_LACK = {"torch", "transformers", "trl", "datasets", "verl", "skyrl", "slime", "ray", "hydra"}


class Alone:
    """A Python that has the client and its requirements.

    Args:
        python: its interpreter.
        packages: the distributions that the client brings, by name.
    """

    def __init__(self, python: Path, packages: dict[str, Distribution]) -> None:
        self.python = python
        self.packages = packages

    def run(self, code: str, *arguments: object) -> str:
        """Runs a program; returns what it printed."""
        ended = subprocess.run(
            [self.python, "-I", "-c", code, *map(str, arguments)],
            env=environment_variables(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    subprocess.run(build, cwd=ROOT / "clients", check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--quiet", wheel], check=True)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (installed,) = site.glob("envserver_clients-*.dist-info")
    packages = _required_by(Distribution.at(installed))
    for package in packages.values():
        for name in _top_names(package):
            (site / name).symlink_to(package.locate_file(name))
    return Alone(python, packages)


def _required_by(package: Distribution) -> dict[str, Distribution]:
    """Returns what `package` requires without extras, and what that requires."""
    found: dict[str, Distribution] = {}
    waiting = [package]
    while waiting:
        for text in waiting.pop().requires or []:
            requirement = Requirement(text)
            name = requirement.name.lower().replace("_", "-")
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if needed and name not in found:
                found[name] = distribution(name)
                waiting.append(found[name])
    return found


def _top_names(package: Distribution) -> set[str]:
    """Returns the names of the files and folders that a package has in site-packages."""
    tops = {path.parts[0] for path in package.files or []}
    return tops - {"..", "__pycache__"}


def test_the_client_brings_few_packages(alone: Alone) -> None:
    expected = {"numpy", "msgspec", "httpx", "httpcore", "h11", "certifi", "idna", "anyio"}
    assert len(expected) == MOST_PACKAGES
    # Before Python 3.13 anyio needs typing_extensions.
    assert expected <= alone.packages.keys() <= expected | {"typing-extensions"}
    total = sum(
        Path(str(package.locate_file(file))).stat().st_size
        for package in alone.packages.values()
        for file in package.files or []
        if file.suffix != ".pyc"
    )
    print(f"{len(alone.packages)} packages, {total / 1e6:.0f} MB")
    assert total < MOST_MEGABYTES * 1e6


def test_the_client_and_its_adapters_are_importable_without_a_server(alone: Alone) -> None:
    code = """
import importlib, importlib.util, json, pkgutil
import envserver_clients
from envserver_clients import adapters
assert all(hasattr(envserver_clients, name) for name in envserver_clients.__all__)
assert importlib.util.find_spec("envserver") is None
lacks = {}
for module in pkgutil.iter_modules(adapters.__path__):
    try:
        importlib.import_module(f"envserver_clients.adapters.{module.name}")
    except ModuleNotFoundError as error:
        lacks[module.name] = error.name
print(json.dumps(lacks))
"""
    lacks: dict[str, str] = json.loads(alone.run(code))

    assert lacks.pop("trl_environments") == "envserver_tools"  # runs environments itself
    assert set(lacks.values()) <= _MAY_LACK
    assert not lacks.keys() & {"atropos", "completions", "slime", "whole_groups"}


def test_a_trainer_leases_learns_acknowledges_and_publishes(alone: Alone, tmp_path: Path) -> None:
    trainer = """
import sys
from envserver_clients import SyncEnvClient
from envserver_clients.compression import HAS_ZSTD
assert not HAS_ZSTD or sys.version_info >= (3, 14)
url, seen = sys.argv[1], set()
with SyncEnvClient(url, run="alone", batch_size=2, keep_leases_seconds=60) as client:
    for step in range(1, 3):  # one lease at a time
        batch = client.lease(wait_seconds=60)
        assert not seen & {group.group_id for group in batch.groups}
        seen |= {group.group_id for group in batch.groups}
        assert all(row.tokens.size == row.mask.size == row.versions.size for row in batch.rows)
        assert any(row.mask.any() for row in batch.rows)
        client.ack(batch, checkpoint=f"step-{step}")
        client.publish_policy_version(step)
    for batch in client.stream():  # as they are made
        assert not seen & {group.group_id for group in batch.groups}
        if any(group.policy_version == 2 for group in batch.groups):
            client.nack(batch, reason="done")
            break
        client.ack(batch)
    print(client.status()["policy_version"], len(seen))
"""
    port = free_port()
    words = (
        "serve", "--env", "math", "--model", "sim", "--sim.latency_seconds", 0, "--port", port,
        "--env.group_size", 2, "--env.ensure_scores_are_not_same", "false", "--store", "groups.db",
    )  # fmt: skip
    with running(*words, folder=tmp_path) as server:
        server.wait_for("Trainers: ")
        assert alone.run(trainer, f"http://127.0.0.1:{port}").split() == ["2", "4"]
