"""The gate's table (tests/gate.toml) fits the tree, and a change runs what it can break."""

import subprocess
from pathlib import Path

import pytest
from support import code_size, gate


def test_each_long_test_belongs_to_a_group_and_each_pattern_to_something() -> None:
    files = gate.long_files()
    groups = gate.groups(files)
    assert not set(files) - {file for _, tests, _ in groups for file in tests}
    tracked = gate._git("ls-files", "-co", "--exclude-standard").splitlines()
    for name, tests, rooms in groups:
        assert tests, name
        for pattern in rooms:
            assert any(gate.matches(path, [pattern]) for path in tracked), (name, pattern)
    patterns = [pattern for group in gate.TABLE["groups"] for pattern in group["tests"]]
    patterns += [name for key in ("everything", "nothing", "elsewhere") for name in gate.TABLE[key]]
    assert not [one for one in patterns if not any(gate.matches(path, [one]) for path in tracked)]
    targets = (gate.ROOT / "Makefile").read_text()
    for name, peer in gate.PEERS.items():
        assert f"\n{peer['install']}:" in targets
        file, _, test = peer["smoke"].partition("::")
        assert f"def {test}" in (gate.ROOT / file).read_text(), name


@pytest.mark.parametrize(
    ("changed", "runs", "not_run"),
    [
        ("envserver/proxy/x.py", "tests/peers/test_real_tokens.py", "tests/peers/test_ray.py"),
        ("environments/envserver_integrations/openenv/x.py", "tests/peers/test_openenv_peer.py",
         "tests/peers/test_real_tokens.py"),
        ("tests/peers/test_ray.py", "tests/peers/test_ray.py", "tests/peers/test_learning.py"),
    ],
)  # fmt: skip
def test_a_change_runs_its_own_groups(changed: str, runs: str, not_run: str) -> None:
    choice = gate.choose([changed])
    assert not choice.everything
    assert runs in choice.files
    assert not_run not in choice.files


def test_what_is_shared_or_unknown_runs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gate.choose(["README.md", "tests/support/api.py"]).everything == "tests/support/api.py"
    assert gate.choose(["pyproject.toml"]).everything
    texts = ["README.md", "envserver/proxy/README.md", "clients/envserver_clients/vertex/README.md"]
    unread = gate.choose([*texts, "envserver/api/NOTES.md", "docs/x.html", "tests/unit/api/x.py"])
    assert unread == gate.Choice()
    assert gate.choose(["environments/envserver_environments/tau/data/mini_mock/policy.md"]).files
    monkeypatch.setitem(gate.TABLE, "nothing", [])
    assert "LICENSE" in gate.choose(["LICENSE"]).everything
    assert not gate.choose(["gone"]).everything


def test_the_newest_passed_commit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    commits = []
    for name in ("first", "second", "third"):
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-qm", name)
        commits.append(git("rev-parse", "HEAD"))
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr(gate, "_CACHE", tmp_path / "cache")
    monkeypatch.delenv("GATE_BASE", raising=False)
    assert gate.passed_commit() == ("", "")
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/passed").write_text(f"{commits[0]}\nelsewhere\n")
    assert gate.passed_commit()[0] == commits[0]
    monkeypatch.setenv("GATE_BASE", commits[1])
    assert gate.passed_commit() == (commits[1], "GATE_BASE")
    (tmp_path / "new file").write_text("")
    assert gate.changes_since(commits[1]) == [".ci/passed", "new file", "third"]
    (tmp_path / ".gitignore").write_text("cache\n")
    git("add", "-A")
    git("commit", "-qm", "fourth")
    gate._remember()
    assert gate.passed_commit()[0] == git("rev-parse", "HEAD")


def test_a_folder_over_its_budget_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(code_size, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/size.toml").write_text("[tests]\nlines = 3\ntokens = 4\n")
    module = tmp_path / "tests/one.py"
    module.write_text('"""A docstring."""\n\nx = 1  # a comment\n')
    assert code_size.main([]) == 0
    module.write_text("x = 1\ny = x\n")
    assert code_size.main(["--rooms"]) == 1
    assert "tests has 6 tokens, 4 are allowed" in capsys.readouterr().err
