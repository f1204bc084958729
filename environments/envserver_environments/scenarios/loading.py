"""Reads scenarios: a folder with `scenario.yaml` (and `workspace/`), a YAML file by itself, or a
folder as ipsissima/esm-agentbench has them (`real_agent_prompts/LABEL.md`, `targets/`). Every
mistake is an InputError that names file and key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from envserver_environments.swe.repositories import entry_of
from envserver_environments.swe.trees import Entry, Tree
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from envserver import InputError, NotFoundError

SAMPLE = Path(__file__).parent / "data"
MOST_BYTES = 8 << 20
MOST_FILES = 2000
_SKIPPED = {".git", "__pycache__", ".venv", "node_modules", ".pytest_cache"}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Check(_Part):
    """A condition at the end. Exactly one of `run`, `file` and `answer` names its subject."""

    name: str = ""  # unset: made of the other fields
    run: list[str] | None = Field(default=None, min_length=1)  # words, no shell; must end with 0
    files: dict[str, str] = {}  # written before it runs: tests that the model cannot change
    seconds: PositiveFloat = 60.0
    file: str | None = None  # a file of the workspace
    answer: bool = False  # check the text after FINAL
    contains: str | None = None
    matches: str | None = None  # a regular expression
    equals: str | None = None
    absent: bool = False  # the file must not exist

    @model_validator(mode="after")
    def _is_one_thing(self) -> Check:
        if (self.run is not None) + (self.file is not None) + self.answer != 1:
            raise ValueError("give one of run, file and answer")
        if self.run is None and not self.absent and not self._texts:
            raise ValueError("say what the text must be: contains, matches or equals")
        if self.matches is not None:
            try:
                re.compile(self.matches)
            except re.error as error:
                raise ValueError(f"matches is not a regular expression: {error}") from error
        return self

    @property
    def _texts(self) -> bool:
        return any(
            condition is not None for condition in (self.contains, self.matches, self.equals)
        )

    @property
    def title(self) -> str:
        return self.name or (" ".join(self.run) if self.run else self.file or "answer")

    def holds(self, text: str) -> bool:
        return (
            (self.contains is None or self.contains in text)
            and (self.matches is None or re.search(self.matches, text) is not None)
            and (self.equals is None or self.equals.strip() == text.strip())
        )


class Scenario(_Part):
    """A piece of work."""

    name: str = Field(default="", max_length=100)  # unset: the name of its folder or file
    prompt: str = ""
    prompts: dict[str, str] = {}  # by label, if it differs
    files: dict[str, str] = {}  # by path, besides those in `workspace`
    workspace: str | None = None  # folder, relative to the scenario's
    checks: list[Check] = []  # unset: only whether the model reached FINAL is known
    solution: list[str] = []  # messages in the text protocol, for the simulated engine

    def asked(self, label: str) -> str:
        text = self.prompts.get(label, self.prompt)
        if not text.strip():
            known = ", ".join(self.prompts) or "none"
            raise InputError(
                f"The scenario {self.name!r} has no prompt for the label {label!r}.",
                hint=f"It has prompts for: {known}.",
            )
        return text


def read_scenario(path: Path) -> tuple[Scenario, Tree]:
    """Reads the scenario at `path`, or of this name in `scenarios/` or here; and its workspace."""
    named = (path, Path("scenarios") / path, SAMPLE / f"{path}.yaml")
    path = next((candidate for candidate in named if candidate.exists()), path)
    if path.is_dir():
        inside = path / "scenario.yaml"
        if not inside.is_file():
            return _bench_folder(path)
        scenario, root, name = _from_yaml(inside), path, path.resolve().name
    elif path.is_file():
        scenario, root, name = _from_yaml(path), path.parent, path.stem
    else:
        raise NotFoundError(f"There is no scenario {str(path)!r}.", hint="A folder or a YAML file.")
    if not scenario.name:
        scenario = scenario.model_copy(update={"name": name})
    folder = scenario.workspace or ("workspace" if path.is_dir() else None)
    tree: Tree = {}
    if folder is not None and (scenario.workspace or (root / folder).is_dir()):
        tree = _tree(root / folder)
    for inner, text in scenario.files.items():
        tree[_inner(inner, path)] = Entry(text.encode())
    return scenario, tree


def _bench_folder(path: Path) -> tuple[Scenario, Tree]:
    prompts = {
        file.stem: file.read_text(encoding="utf-8")
        for file in sorted((path / "real_agent_prompts").glob("*.md"))
    }
    if not prompts:
        raise InputError(
            f"{path} is not a scenario.",
            hint="It needs a scenario.yaml, or real_agent_prompts/LABEL.md and targets/.",
        )
    targets = path / "targets"
    tree = _tree(targets) if targets.is_dir() else {}
    return Scenario(name=path.resolve().name, prompts=prompts), tree


def _from_yaml(path: Path) -> Scenario:
    try:
        read: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Scenario.model_validate(read)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {error}", place=str(path)) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise InputError(f"{path}: {place}: {first['msg']}.", place=str(path)) from error


def _tree(root: Path) -> Tree:
    if not root.is_dir():
        raise NotFoundError(f"There is no workspace {str(root)!r}.")
    tree: Tree = {}
    size = 0
    for file in _files(root):
        if file.is_symlink():
            raise InputError(f"{file} is a link: a workspace holds files.")
        size += file.stat().st_size
        if size > MOST_BYTES or len(tree) >= MOST_FILES:
            raise InputError(
                f"The workspace {root} is too large.",
                hint=f"At most {MOST_FILES} files with {MOST_BYTES >> 20} MB together.",
            )
        tree[file.relative_to(root).as_posix()] = entry_of(file)
    return tree


def _files(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name in _SKIPPED:
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _files(entry)
        else:
            yield entry


def _inner(name: str, path: Path) -> str:
    parts = Path(name).parts
    if not parts or name.startswith("/") or ".." in parts or ".git" in parts:
        raise InputError(f"{path}: the file {name!r} is not below the workspace.", place=str(path))
    return Path(name).as_posix()
