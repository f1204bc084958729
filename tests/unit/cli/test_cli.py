"""The command line itself: how fast it answers, what it lists, how it fails."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.commands import ENVSERVER
from support.waiting import PATIENCE

import envserver
from envserver import main, registry
from envserver.cli import COMMANDS
from envserver.cli.loop import run_loop

ADDER = '''
from envserver import Environment, Score, Task

class Adder(Environment):
    """Adds two numbers."""

    class Config(Environment.Config):
        digits: int = 3
        """How many digits."""

    def tasks(self, split):
        yield Task("1", {})

    def rollout(self, task, run):
        return ""

    def score(self, task, result):
        return Score(reward=1.0)
'''


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    ).stdout


@pytest.mark.parametrize("word", ["--help", "--version", "nonsense"])
def test_simple_answers_import_nothing_heavy(word: str) -> None:
    loaded = python(
        f"import sys\nfrom envserver.cli import main\nmain([{word!r}])\n"
        "print('loaded:', *(n for n in sys.modules if '.' not in n))"
    ).rpartition("loaded:")[2]
    heavy = {"pydantic", "numpy", "msgspec", "fastapi", "aiohttp", "openai", "rich", "asyncio"}
    assert heavy.isdisjoint(loaded.split())


def test_help_of_a_command_imports_only_its_settings() -> None:
    loaded = python(
        "import sys\nfrom envserver.cli import COMMANDS, main\n"
        "heavy = {'aiohttp', 'asyncio', 'fastapi', 'httpx', 'numpy', 'rich', 'sqlalchemy',\n"
        "    'structlog', 'tokenizers', 'torch', 'transformers', 'uvicorn', 'uvloop',\n"
        "    'envserver.api', 'envserver.environment', 'envserver.evaluation',\n"
        "    'envserver.export', 'envserver.models', 'envserver.proxy',\n"
        "    'envserver.registry', 'envserver.rollouts',\n"
        "    'envserver.sandbox', 'envserver.store', 'envserver.workers'}\n"
        "for name, command in COMMANDS.items():\n"
        "    named = [[name]] if command.module and command.spec else []\n"
        "    for words in [*named, *([name, word] for word in command.words)]:\n"
        "        assert main([*words, '--help']) == 0\n"
        "        if found := heavy & set(sys.modules):\n"
        "            print('loaded:', *words, *found)\n"
        "            raise SystemExit\n"
    ).partition("loaded:")[2]
    assert loaded == ""


def test_a_server_without_environments_imports_only_what_it_serves() -> None:
    loaded = python(
        "import sys\nfrom envserver.cli.lean_imports import import_command\n"
        "import_command('envserver.cli.run_api')\nprint(*sys.modules)\n",
    ).split()
    rooms = {"models.sim", "registry", "rollouts.group", "sandbox", "workers.process"}
    heavy = {"aiohttp", "dotenv", "jinja2", "pebble", "rich", "tokenizers", "websockets", "yaml"}
    heavy.add("sqlalchemy.dialects.postgresql")
    assert not (heavy | {f"envserver.{room}" for room in rooms}) & set(loaded)
    assert len(loaded) < 1080  # 1,655 before; each takes about half a millisecond


@pytest.mark.parametrize(
    ("module", "most", "never"),
    [
        ("envserver.cli.serve", 1490, "aiohttp dotenv sympy yaml envserver.models.openai"),
        ("envserver.cli.process", 1090, "aiohttp dotenv fastapi sqlalchemy sympy yaml"),
        (
            "envserver.rollouts.scorer_process",
            370,
            "structlog rich aiohttp fastapi numpy envserver.config",
        ),
    ],
)
def test_processes_of_a_server_import_only_what_they_do(module: str, most: int, never: str) -> None:
    loaded = python(f"import sys, {module}\nprint(*sys.modules)\n").split()
    assert not set(never.split()) & set(loaded)
    assert len(loaded) < most


def test_the_parent_of_workers_imports_and_builds_all_that_they_need_and_no_more() -> None:
    loaded = python(
        "import sys\nfrom envserver.workers.forkserver import _preload\n_preload(['kuhn'])\n"
        "from envserver import registry\nkind = registry.find('kuhn')\n"
        "print(kind.Config.__pydantic_complete__)\n"
        "print(*sys.modules)\n"
    ).split()
    assert loaded[0] == "True"
    assert not {"structlog", "rich", "sqlalchemy", "fastapi", "envserver.config"} & set(loaded)
    assert len(loaded) < 625


def test_installed_packages_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry.known_names()
    reading = Mock(side_effect=AssertionError("read again"))
    monkeypatch.setattr(registry.integrated, "entry_points", reading)
    assert registry.known_names() == known
    assert "math" in registry.builtin_names()
    assert "verifiers" in registry.integrated.integration_points()


def test_public_names_are_all_there() -> None:
    missing = [name for name in envserver.__all__ if not hasattr(envserver, name)]
    assert missing == []


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"envserver {name}" in capsys.readouterr().out


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage" in capsys.readouterr().out


def test_an_unknown_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proces"]) == 2
    assert "Did you mean 'process'?" in capsys.readouterr().err


def test_help_shows_the_settings_of_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adder.py").write_text(ADDER)
    assert main(["process", "--env", str(tmp_path / "adder.py"), "--help", "all"]) == 0
    told = capsys.readouterr().out
    assert "--env.digits int [3]\n      How many digits." in told
    assert "--env.group_size int [4]" in told
    assert "--openai.api_key secret [unset]" in told


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.module])
def test_help_of_a_command_fits_on_a_page(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 70


def test_help_of_run_shows_the_fields_of_the_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"], environment="math") == 0
    told = capsys.readouterr().out
    usage = "Usage: python -m envserver_environments.math run (--question TEXT | --task ID)"
    assert told.startswith(usage)
    assert "  --question " in told
    assert "  --env " not in told


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["process", "--env", "mathh"], 2, "no environment 'mathh'"),
        (["process"], 2, "needs an environment"),
        (["process", "--env.grop_size", "3"], 2, "Did you mean --env.group_size?"),
        (["score", "--env", "math"], 2, "--input is needed (JSONL file of rows to score)."),
        (["models"], 2, "needs a command: `envserver models list`, "),
        (["models", "prob"], 2, "There is no command `models prob`. Did you mean 'probe'?"),
        (["token"], 2, "`envserver token revoke`"),
        (["export", "--to", "parquet"], 2, "`envserver export` needs --out"),
        (["verify", "a.jsonl", "b.jsonl"], 2, "Unexpected argument after SOURCE and its value."),
        (["list", "everything"], 2, "takes no arguments"),
        (["run-api", "--port", "no"], 2, "--port: must be a valid integer"),
        (["run-api", "--host", "0.0.0.0"], 2, "--host: must be a loopback address"),
    ],
)
def test_mistakes_are_one_clear_line(
    words: list[str], status: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == status
    told = capsys.readouterr().err
    assert expected in told
    assert "Traceback" not in told


def test_bugs_show_a_traceback_only_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(argv: list[str]) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("envserver.cli.list_command.run", broken)
    assert main(["list"]) == 1
    assert "Internal error: RuntimeError: a bug" in capsys.readouterr().err
    with pytest.raises(RuntimeError):
        main(["list", "--debug"])


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("envserver.cli.list_command.run", interrupted)
    assert main(["list"]) == 130


def test_ctrl_c_waits_for_libraries_that_are_being_imported() -> None:
    program = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "datetime":  # pydantic's core imports it from Rust
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from envserver.cli import main
sys.exit(main(["doctor"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=PATIENCE, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


@pytest.mark.parametrize("columns", [1, 20, 60])
def test_help_fits_into_any_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["serve", "--help"]) == 0
    assert "--env.group_size" in capsys.readouterr().out


def test_the_environment_of_an_entry_module_is_not_named_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["process", "--env", "other"], environment="math") == 2
    assert "--env is given twice (math and other)" in capsys.readouterr().err


def test_an_entry_module_offers_only_commands_with_an_environment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"], environment="math") == 0
    assert "python -m envserver_environments.math" in capsys.readouterr().out
    assert main(["run-api"], environment="math") == 2


def test_list_shows_built_in_environments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "ISOLATION", "FROM", "WHAT"]
    (math,) = [row for row in rows if row.startswith("math ")]
    assert "pooled" in math
    assert "built in" in math


@pytest.mark.parametrize("words", [["--help"], ["process", "--env", "math", "--help"]])
def test_a_reader_that_goes_away_is_no_error_worth_a_traceback(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [ENVSERVER, *words], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_a_command_that_is_cancelled_from_within_does_not_end_silently() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="though no signal told it to end"):
        run_loop(cancelled())
