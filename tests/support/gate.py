"""Runs what a change needs to pass, and says why: `bash .ci/run`.

    python -m support.gate               what changed since the newest commit that passed
    python -m support.gate --dry-run     only says what would run
    python -m support.gate --peer NAME   all tests with one peer (the nightly jobs)
    python -m support.gate --list-peers  their names as JSON

In: git's changes and `tests/gate.toml`, which names for each group of long tests the rooms that it
depends on. Out: `make test`, then the chosen groups, after the peers that they ask for were
installed. A change of what all tests share, or of a path that no group and no pattern of gate.toml
knows, runs everything. Property tests try as many examples as in `make test`; the nightly jobs
(`--peer`, `make test-all`) try all.

A passed commit is remembered in a file of the user's cache; those in `.ci/passed` count, too.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
TABLE: dict[str, Any] = tomllib.loads((ROOT / "tests/gate.toml").read_text())
PEERS: dict[str, dict[str, Any]] = TABLE["peers"]
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "envserver-gate"
_LONG = re.compile(r"mark\.thorough|\bfirst_of\(|\bbrowser\b")


@dataclass
class Choice:
    """What to run beside `make test`.

    Attributes:
        everything: why all of it runs; empty: only `files`.
        files: test files, each with the reasons for it.
    """

    everything: str = ""
    files: dict[str, list[str]] = field(default_factory=dict)

    @property
    def peers(self) -> list[str]:
        """Peers that the files ask for."""
        return sorted({peer for file in self.files for peer in peers_of(file)})


def fixtures_of(peer: dict[str, Any]) -> list[str]:
    """Fixtures that a peer of gate.toml is behind."""
    return [*peer.get("fixtures", ()), *peer.get("pythons", ())]


def _is_installed(peer: dict[str, Any]) -> bool:
    needed = [f"{folder}/.installed" for folder in peer.get("pythons", {}).values()]
    return all((ROOT / path).exists() for path in needed or [peer["installed"]])


@functools.cache
def peers_of(file: str) -> list[str]:
    """Peers whose fixtures a test file asks for."""
    text = (ROOT / file).read_text()
    return [
        name
        for name, peer in PEERS.items()
        if re.search(rf"\b({'|'.join(fixtures_of(peer))})\b", text)
    ]


@functools.cache
def long_files() -> list[str]:
    """Test files that `make test` does not run, or not whole."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = path.relative_to(ROOT).as_posix()
        if not file.startswith("tests/peers/learning/") and (
            file.startswith(("tests/peers/", "tests/hostile/", "tests/browser/"))
            or _LONG.search(path.read_text())
            or peers_of(file)
        ):
            found.append(file)
    return found


def groups(files: Iterable[str]) -> list[tuple[str, list[str], list[str]]]:
    """Returns (name, test files, rooms) of gate.toml's groups and of the folders of tests/unit."""
    files = list(files)
    found = [
        (group["name"], [file for file in files if matches(file, group["tests"])], group["rooms"])
        for group in TABLE["groups"]
    ]
    named = {file for _, tests, _ in found for file in tests}
    by_room: dict[str, list[str]] = {}
    for file in files:
        if file.startswith("tests/unit/") and file not in named:
            by_room.setdefault(file.split("/")[2], []).append(file)
    for room, tests in by_room.items():
        found.append((f"tests/unit/{room}", tests, TABLE["unit"].get(room, [f"envserver/{room}/"])))
    return found


def choose(changed: Iterable[str]) -> Choice:
    """Returns the long tests that a change of these paths can affect."""
    files = long_files()
    choice = Choice()
    for path in changed:
        if matches(path, TABLE["everything"]):
            return Choice(everything=path)
        if matches(path, TABLE["nothing"]):
            continue
        hit = [(name, tests) for name, tests, rooms in groups(files) if matches(path, rooms)]
        for name, tests in hit:
            for file in tests:
                choice.files.setdefault(file, []).append(f"{name}: {path}")
        if path in files:
            choice.files.setdefault(path, []).append("it changed itself")
        elif not hit and not matches(path, TABLE["elsewhere"]) and (ROOT / path).exists():
            return Choice(everything=f"{path}, which no group of tests/gate.toml knows")
    return choice


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is a folder above the path ("x/") or a glob of it or its name."""
    return any(_regex(pattern).fullmatch(path) for pattern in patterns)


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    form = re.escape(pattern).replace(r"\*", "[^/]*")
    form += ".*" if pattern.endswith("/") else ""
    return re.compile(form if "/" in pattern else f"(.*/)?{form}", re.DOTALL)


def passed_commit() -> tuple[str, str]:
    """Returns the newest ancestor that has passed, and where that is written; empty: none."""
    known = {os.environ.get("GATE_BASE", ""): "GATE_BASE"}
    for path in (_CACHE / "passed", ROOT / ".ci/passed"):
        if path.exists():
            known |= dict.fromkeys(path.read_text().split(), str(path))
    for commit in _git("rev-list", "--max-count=5000", "HEAD").split():
        if commit in known:
            return commit, known[commit]
    return "", ""


def changes_since(base: str) -> list[str]:
    """Paths that differ from a commit, uncommitted and new ones included."""
    changed = _git("diff", "--name-only", "--no-renames", "-z", base)
    new = _git("ls-files", "--others", "--exclude-standard", "-z")
    return sorted({*changed.split("\0"), *new.split("\0")} - {""})


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _remember() -> None:
    if changes_since("HEAD"):
        return
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "passed").open("a") as passed:
        passed.write(_git("rev-parse", "HEAD") + "\n")


def _make(*words: str) -> None:
    print("+ make", *words, flush=True)
    if status := subprocess.run(["make", *words], cwd=ROOT, check=False).returncode:
        sys.exit(status)


def _pytest(files: Iterable[str], marks: str, *, whole: bool = False) -> None:
    command = [sys.executable, "-m", "pytest", "-n", "3", "--no-loadscope-reorder", "-m", marks]
    variables = os.environ | ({"TEST_EXTENT": "whole"} if whole else {})
    print("+", *command, "--all-peers ...", flush=True)
    done = subprocess.run([*command, "--all-peers", *files], cwd=ROOT, env=variables, check=False)
    if done.returncode not in (0, 5):  # 5: none of them is long
        sys.exit(done.returncode)


def _install(files: Iterable[str]) -> None:
    """Installs what test files ask for, and PostgreSQL, which `make test` would skip without."""
    targets = {"postgres"}
    for file in files:
        text = (ROOT / file).read_text()
        targets |= {PEERS[peer]["install"] for peer in peers_of(file)}
        targets |= {target for target, word in TABLE["programs"].items() if word in text}
    _make("-j4", "--output-sync=target", *sorted(targets))


def _run_everything() -> None:
    _make("-j4", "--output-sync=target", "peers")
    _make("size")
    _pytest(["tests"], "not slow")


def _run(choice: Choice) -> None:
    _install(choice.files)
    _make("test")
    smoke = {
        peer["smoke"].partition("::")[0]: peer["smoke"]
        for peer in PEERS.values()
        if _is_installed(peer)
    }
    if choice.files:
        _pytest(choice.files, "not slow and (peer or thorough)")
    if tests := [test for file, test in smoke.items() if file not in choice.files]:
        _pytest(tests, "not slow")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and why")
    parser.add_argument("--base", help="the commit to compare with, instead of the last passed one")
    parser.add_argument("--peer", choices=sorted(PEERS), help="run all tests with this peer")
    parser.add_argument("--list-peers", action="store_true", help="print the peers as JSON")
    chosen = parser.parse_args(argv)
    if chosen.list_peers:
        print(json.dumps(sorted(PEERS)))
    elif chosen.peer:
        # The tests of several peers run with the first of them.
        files = [file for file in long_files() if peers_of(file)[:1] == [chosen.peer]]
        _install(files)
        _pytest(files, "not slow and peer", whole=True)
    else:
        base, source = (chosen.base, "--base") if chosen.base else passed_commit()
        choice = choose(changes_since(base)) if base else Choice(everything="no commit has passed")
        _report(choice, base, source)
        if not chosen.dry_run:
            _run_everything() if choice.everything else _run(choice)
            _remember()


def _report(choice: Choice, base: str, source: str) -> None:
    if base:
        print(f"Compared with {base[:12]}, the newest commit known to have passed ({source}).")
    if choice.everything:
        print(f"Everything runs, because of {choice.everything}.")
        return
    print("make test runs, and the long tests of")
    for file, reasons in choice.files.items():
        more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        print(f"  {file}  ({reasons[0]}{more})")
    if not choice.files:
        print("  nothing that changed")
    print(f"Peers: {', '.join(choice.peers) or 'none'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
