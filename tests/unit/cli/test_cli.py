"""The command line itself: how fast it answers, what it lists, how it fails."""

import os
import pwd
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from support.cases import cases_of
from support.commands import ENVSERVER
from support.in_process import Run
from support.waiting import PATIENCE

import envserver
from envserver import main
from envserver.cli import all_commands
from envserver.sandbox import service
from envserver.sandbox.probe import ProbeReport

CASES = cases_of(__file__)


def modules(code: str) -> list[str]:
    """What a new Python has imported after `code`."""
    code += "\nprint(*sys.modules)"
    command = [sys.executable, "-c", f"import sys\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("name", CASES["imports"])
def test_processes_import_only_what_they_do(name: str) -> None:
    case = CASES["imports"][name]
    loaded = modules(case["code"])
    assert not {*case["never"].split()} & {*loaded}
    assert len(loaded) < case.get("most", 9999)


def test_public_names_are_all_there() -> None:
    assert [name for name in envserver.__all__ if not hasattr(envserver, name)] == []


def test_every_command_has_help_and_is_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = run("--help").out
    for name, command in all_commands().items():
        assert f"  {name} " in told
        of_command = run(f"{name} --help").out
        assert f"envserver {name}" in of_command
        assert not command.module or len(of_command.splitlines()) < 70, name
    for columns in ("1", "20", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        assert "--env.group_size" in run("serve --help").out
    assert "Usage" in run("", status=2).out


def test_an_installed_package_adds_commands(tmp_path: Path) -> None:
    (tmp_path / "extra.py").write_text(CASES["extra"])
    for name, table in (("extra", "extra:COMMANDS"), ("broken", "nowhere:COMMANDS")):
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (folder / "entry_points.txt").write_text(f"[envserver.commands]\n{name} = {table}\n")
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}

    def ended(*words: str) -> subprocess.CompletedProcess[str]:
        command = [ENVSERVER, *words]
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=PATIENCE
        )

    listed = ended("--help")
    lines = listed.stdout.splitlines()
    assert lines[lines.index("  greet       says hello") + 1].startswith("  process ")
    assert "nowhere:COMMANDS cannot be loaded" in listed.stderr
    assert ended("greet", "Ada").stdout == "hello Ada\n"


def test_help_shows_the_settings_of_the_environment(run: Run) -> None:
    Path("adder.py").write_text(CASES["adder"])
    told = run("process --env adder.py --help all").out
    assert "--env.digits int [3]\n      How many digits." in told
    assert "--env.group_size int [4]" in told
    assert "--openai.api_key secret [unset]" in told


MISTAKES = cases_of(__file__, "mistakes.toml")["commands"]


def test_mistakes_are_one_clear_line(run: Run) -> None:
    for line, expected in MISTAKES.items():
        told = run(line, status=2)
        assert expected in told and "Traceback" not in told.err


@pytest.mark.parametrize(("line", "status", "says"), CASES["homeless"])
def test_a_user_without_a_home(
    line: str, status: int, says: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    works = ProbeReport(backend="namespace", works=True)
    monkeypatch.setattr(service, "probe", AsyncMock(return_value=works))
    for name in ("one", "two"):
        Path(f"{name}.jsonl").touch()
    assert says in run(line, status)


def test_bugs_show_a_traceback_if_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Mock(side_effect=RuntimeError("a bug"))
    monkeypatch.setattr("envserver.cli.env_command.run_environments", command)
    assert "Internal error: RuntimeError: a bug" in run("list", status=1)
    with pytest.raises(RuntimeError):
        run("list --debug")
    command.side_effect = KeyboardInterrupt
    run("list", status=130)


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
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def test_entry_modules_offer_commands_of_environments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["process", "--env", "other"], environment="math") == 2
    assert "--env is given twice (math and other)" in capsys.readouterr().err
    assert main(["--help"], environment="math") == 0
    assert "python -m envserver_environments.math" in capsys.readouterr().out
    assert main(["run-api"], environment="math") == 2
    assert main(["run", "--help"], environment="math") == 0
    told = capsys.readouterr().out
    usage = "Usage: python -m envserver_environments.math run (--question TEXT | --task ID)"
    assert told.startswith(usage)
    assert "  --question " in told and "  --env " not in told


def test_list_shows_built_in_environments(run: Run) -> None:
    header, *rows = run("list").out.splitlines()
    assert header.split() == ["NAME", "ISOLATION", "FROM", "WHAT"]
    (math,) = [row for row in rows if row.startswith("math ")]
    assert "pooled" in math and "built in" in math


def test_a_reader_that_goes_away_is_no_error_worth_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [ENVSERVER, "process", "--env", "math", "--help"]
    ran = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (1, "")
