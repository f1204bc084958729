"""Records what produced a group: code, settings, engine, model, sampling, policy versions.

Equal facts mean equal code and settings; no secret and no path of this machine is in them.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import envserver_records
import msgspec
import orjson
from envserver_records.records import Trajectory, digest_of

from ..environment import Environment
from ..proxy.attempts import AgentRoute
from ..proxy.server import Proxy
from ..registry.hosted import HostedEnvironment
from ..rollout_interface import HarnessSpec
from ..settings.config import SamplingConfig, TokensConfig
from ..settings.section import EnvironmentConfig
from ..version import __version__

_SOURCES: Final = frozenset(
    {".py", ".jinja", ".j2", ".json", ".md", ".toml", ".txt", ".yaml", ".yml"}
)
_LARGEST_FILE: Final = 1 << 20
_MOST_FILES: Final = 2000
WHERE_ONLY: Final = {"data_path_to_save_groups", "total_steps"}
"""Settings of an environment that say where groups go and how many, not how they are made."""
_OF_AGENTS: Final = {"api_key", "base_url", "timeout"}
_SECRET: Final = re.compile("token|key|secret|password").search
_NOT_OF_TOKENS: Final = {"tokenizer", "audit_fraction", "audit_tolerance", "keep_calls", "experts"}


def made_with(
    environment: Environment,
    sampling: SamplingConfig,
    tokens: TokensConfig,
    harness: HarnessSpec | None = None,
) -> dict[str, Any]:
    """Returns the facts that are the same for all groups of a run; reads source files.

    Keys: `environment` (its package and version, if it is installed, and a digest of its files),
    `code` (this package's version and a digest of its files), `settings` (a digest), `agent` (the
    external agent, if there is one).
    """
    config = environment.config.model_dump(
        mode="json", exclude={**dict.fromkeys(WHERE_ONLY, True), "agents": {"__all__": _OF_AGENTS}}
    )
    settings = {
        "env": config,
        "sampling": sampling.model_dump(mode="json"),
        "tokens": tokens.model_dump(mode="json", exclude=_NOT_OF_TOKENS),
    }
    return {
        "environment": _environment(type(environment)),
        "code": {"package": "envserver", "version": __version__, "digest": _own_digest()},
        "settings": digest_of(orjson.dumps(settings, option=orjson.OPT_SORT_KEYS)),
        **({} if harness is None else {"agent": harness.identity()}),
    }


def provenance_of(
    run: Mapping[str, Any],
    *,
    engine: Mapping[str, Any],
    model: str,
    sampling: Mapping[str, Any],
    trajectories: Iterable[Trajectory],
) -> dict[str, Any]:
    """Returns the provenance of one group. `run`: the result of `made_with`; `engine`: what it says
    of itself and its model."""
    versions = {
        int(version)
        for trajectory in trajectories
        for row in trajectory.sequences
        for version in set(row.versions[row.mask == 1].tolist())
    }
    return {
        **run,
        "engine": {**engine, "model": model},
        "sampling": dict(sampling),
        "policy_versions": sorted(versions),
    }


def _environment(kind: type[Environment]) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": kind.name}
    if issubclass(kind, HostedEnvironment):
        facts |= {"package": kind.installed.package, "version": kind.installed.version}
        return {**facts, **_files_facts(Path(kind.file))}
    package = kind.__module__.partition(".")[0]
    for name in (package, package.replace("_", "-")):
        try:
            facts |= {"package": name, "version": version(name)}
            break
        except PackageNotFoundError:
            continue
    if package in ("envserver_environments", "envserver_integrations"):
        facts |= {"package": "envserver", "version": __version__}
    return {**facts, **_files_facts(Path(inspect.getfile(kind)))}


def _files_facts(file: Path) -> dict[str, Any]:
    """Returns the number and the digest of an environment's files: its folder, or a single file and
    the modules beside it."""
    files = _sources(file)
    return {"files": len(files), "digest": _digest(file.parent, files)}


def _sources(file: Path) -> list[Path]:
    folder = file.parent
    if file.name not in ("env.py", "__init__.py"):
        loaded = {Path(name) for name in map(_file_of, list(sys.modules.values())) if name}
        beside = {
            path for path in loaded if path.parent == folder and "site-packages" not in path.parts
        }
        return sorted(beside | {file})
    found = [path for path in folder.rglob("*") if _is_source(path, folder)]
    python = [path for path in found if path.suffix == ".py"]
    return sorted(found if len(found) <= _MOST_FILES else python)


def _file_of(module: ModuleType | None) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and file.endswith(".py") else None


def _is_source(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    hidden = any(part.startswith((".", "__pycache__")) for part in parts)
    is_text = path.suffix in _SOURCES and path.is_file()
    return is_text and not hidden and path.stat().st_size <= _LARGEST_FILE


@functools.cache
def _own_digest() -> str:
    parts = []
    for module in (Path(__file__).parent.parent, Path(str(envserver_records.__file__)).parent):
        parts.append(_digest(module, sorted(module.rglob("*.py"))).encode())
    return digest_of(*parts)


def _digest(folder: Path, files: Iterable[Path]) -> str:
    parts = []
    for path in files:
        name = path.relative_to(folder).as_posix()
        parts.append(f"{name}\0{digest_of(path.read_bytes())}\n".encode())
    return digest_of(*parts)


def kept_config(config: EnvironmentConfig) -> dict[str, Any]:
    """Returns the settings that replaying a rollout needs, without secrets."""
    others = {"agents", "total_steps", "data_path_to_save_groups"}  # secrets, and irrelevant fields
    kept = config.model_dump(mode="json", exclude=others)
    # An environment in another interpreter has its secrets as text.
    hidden = (name for name, value in kept.items() if isinstance(value, str) and _SECRET(name))
    return kept | dict.fromkeys(hidden, "**********")


def rendering_of(proxy: Proxy, routes: dict[str, AgentRoute]) -> dict[str, Any]:
    described = proxy.engine_described()
    described.pop("differs_at", None)  # says something of another rollout
    if not routes:
        return described
    own = described.pop("agents", {})
    agents = {
        name: {"model": route.model, "trained": route.trained, **own.get(route.endpoint, {})}
        for name, route in routes.items()
    }
    return {**described, "agents": agents}


MOST_BYTES: Final = 16 * 1024


def bounded_public(public: dict[str, Any]) -> dict[str, Any]:
    """Returns `public`, with values that do not fit replaced by `{"left_out_bytes": size}`. Small
    values are kept first; what JSON cannot hold is left out."""
    sizes = {name: _size(value) for name, value in public.items()}
    left = MOST_BYTES
    kept: set[str] = set()
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        left -= size + len(name)
        if left < 0:
            break
        kept.add(name)
    return {
        name[:MOST_BYTES]: value if name in kept else {"left_out_bytes": sizes[name]}
        for name, value in list(public.items())[:100]
    }


def _size(value: Any) -> int:
    try:
        return len(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError):
        return MOST_BYTES + 1
