"""Commands about environments: `sample`, `list`, `env WORD`, and `agents WORD` (external
agents)."""

from __future__ import annotations

import inspect
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from envserver_records.errors import ConfigError, ConflictError, EnvserverError, UsageError
from envserver_records.files import storing
from pydantic import Field

from ..settings.section import Section
from . import lean_imports
from .command_line import CommandSpec, program, say

if TYPE_CHECKING:
    from ..registry.installed import Installed


_SAMPLE = """Writes sample files of an environment's inputs (rows, documents, repositories,
captions) in the format that it reads. Prints the files and the command that reads them."""


class SampleSettings(Section):
    environment: str
    """Name of the environment, or its path. Can be given as the first argument."""
    out: Path | None = None
    """New folder for the files; unset: samples/<environment>."""


SAMPLE = CommandSpec("sample", _SAMPLE, SampleSettings, usage="NAME", arguments=("environment",))


def run_sample(argv: list[str]) -> int:
    with lean_imports():
        from ..registry import find

    settings = SAMPLE.read(argv)
    environment = find(settings.environment)
    folder = settings.out or Path("samples") / environment.name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConflictError(f"{folder} exists.", hint="Name another folder: --out DIR.")
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        reading = environment.write_sample(folder)
    if not reading:
        folder.rmdir()
        raise ConfigError(f"The tasks of {environment.name!r} are generated: it reads no files.")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    command = f"{program()} process --env {settings.environment} {_flags(reading)} --model sim"
    sys.stdout.write("\n".join([*map(str, files), "Read by:", f"  {command}"]) + "\n")
    return 0


def _flags(reading: Mapping[str, Any]) -> str:
    pairs = [
        (name, item)
        for name, value in reading.items()
        for item in (value if isinstance(value, list) else [value])
    ]
    return " ".join(f"--env.{name} {shlex.quote(str(value))}" for name, value in pairs)


_HELP = """Usage: envserver list

Shows every environment that --env can name: its name, its isolation, where it comes from and the
first line of its docstring; then the schemes of other frameworks (SCHEME:NAME). A
path/to/file.py[:Class] or a folder can be named too."""


def run_environments(argv: list[str]) -> int:
    if argv in (["--help"], ["-h"]):
        print(_HELP)
        return 0
    if argv:
        raise UsageError("`envserver list` takes no arguments.")
    from .console import show_rows

    show_rows([("NAME", "ISOLATION", "FROM", "WHAT"), *_environment_rows()])
    return 0


def _environment_rows() -> Iterator[tuple[str, str, str, str]]:
    from ..registry import builtin_names, entry_point_names
    from ..registry.installed import integration_points, with_own_interpreter

    built_in = builtin_names()
    for name in built_in:
        yield _environment_row(name, "built in")
    for name, point in sorted(entry_point_names().items()):
        if name not in built_in:
            yield _environment_row(name, point.dist.name if point.dist else point.value)
    for name, (package, _) in sorted(with_own_interpreter().items()):
        if name not in entry_point_names():
            yield _environment_row(name, f"{package.package} (own venv)")
    for scheme, point in sorted(integration_points().items()):
        origin = point.dist.name if point.dist else point.value
        yield (f"{scheme}:NAME", "", origin, _what(scheme))


def _what(scheme: str) -> str:
    from ..registry.installed import integration

    try:
        return integration(scheme).what
    except EnvserverError as error:
        return f"cannot be loaded: {error}"


def _environment_row(name: str, origin: str) -> tuple[str, str, str, str]:
    from ..registry import find

    try:
        environment = find(name)
    except (EnvserverError, ImportError) as error:
        return (name, "?", origin, f"cannot be loaded: {error}")
    first_line = (inspect.getdoc(environment) or "").partition("\n")[0]
    return (name, environment.isolation, origin, first_line)


class InstallSettings(Section):
    source: str
    """A project's folder, a wheel, git+https://...[@revision], hub:owner/name[@revision], or an
    environment of another framework, SCHEME:NAME."""
    packages: list[str] = Field(default_factory=list)
    """With SCHEME:NAME: what pip installs beside the framework: a path, a wheel, a requirement.
    May be repeated."""
    interpreter: Literal["auto", "shared", "own"] = "auto"
    """shared: envserver's Python; own: a virtual environment; auto: own if its dependencies are not
    met here."""
    replace: bool = False
    """Install over an installed package of that name."""


class ListSettings(Section): ...


class RemoveSettings(Section):
    name: str
    """Name of the package, or of one of its environments."""


class PushSettings(Section):
    project: Path
    """Folder of the project, with pyproject.toml and environment.yaml."""
    to: str
    """OWNER/NAME on the hub."""
    dry_run: bool = False
    """Check everything and list the files, and upload nothing."""


INSTALL = CommandSpec(
    "env install",
    "Installs a package of environments, in its own virtual environment if its dependencies "
    "need one.",
    InstallSettings,
    usage="SOURCE",
    arguments=("source",),
    aliases={"with": "packages"},
)
LIST = CommandSpec("env list", "Lists the packages that `env install` installed.", ListSettings)
REMOVE = CommandSpec(
    "env remove",
    "Removes an installed package with its virtual environment.",
    RemoveSettings,
    usage="NAME",
    arguments=("name",),
)
PUSH = CommandSpec(
    "env push",
    "Uploads a project to the hub, so that `env install hub:OWNER/NAME` finds it. Without a token "
    "of the hub it is a dry run.",
    PushSettings,
    usage="PROJECT --to OWNER/NAME",
    arguments=("project",),
)


def run_install(argv: list[str]) -> int:
    with lean_imports():
        from ..registry.installed import MANIFEST
        from ..running.installing import install

    settings = INSTALL.read(argv)
    package = install(
        settings.source,
        packages=settings.packages,
        interpreter=settings.interpreter,
        replace=settings.replace,
        on_progress=lambda text: say(f"{text} ..."),
    )
    where = "in its own virtual environment" if package.interpreter else "beside envserver"
    manifest = package.folder / MANIFEST
    say(f"Installed {package.package} {package.version} {where}. Its manifest: {manifest}")
    print("\n".join(package.names))
    return 0


def run_list(argv: list[str]) -> int:
    with lean_imports():
        from ..registry.installed import installed
        from .console import show_rows

    LIST.read(argv)
    rows = [("PACKAGE", "VERSION", "PYTHON", "ENVIRONMENTS", "FROM"), *map(_row, installed())]
    show_rows(rows)
    return 0


def run_remove(argv: list[str]) -> int:
    with lean_imports():
        from ..running.installing import remove

    package = remove(REMOVE.read(argv).name)
    say(f"Removed {package.package} {package.version}.")
    return 0


def run_push(argv: list[str]) -> int:
    with lean_imports():
        from envserver_factory.publishing.models import upload

        from ..running.installing import prepare

    settings = PUSH.read(argv)
    target = f"hf://datasets/{settings.to}"
    with tempfile.TemporaryDirectory(prefix="envserver-push-") as temporary:
        folder = Path(temporary)
        manifests = prepare(settings.project, settings.to, folder)
        why = "--dry-run" if settings.dry_run else _why_no_hub()
        if why:
            for path in sorted(each for each in folder.rglob("*") if each.is_file()):
                print(f"{target}/{path.relative_to(folder).as_posix()}")
        else:
            upload(folder, target, on_progress=print)
    names = ", ".join(f"{manifest.name} {manifest.version}" for manifest in manifests)
    if why:
        say(f"Dry run ({why}): {names} was not uploaded.")
    else:
        say(f"Uploaded {names}. To install: envserver env install hub:{settings.to}")
    return 0


def _why_no_hub() -> str:
    """ "" if something can be uploaded."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        return "huggingface_hub is not installed"
    return "" if get_token() else "there is no token; run `hf auth login` or set HF_TOKEN"


def _row(package: Installed) -> tuple[str, ...]:
    python = "shared" if package.interpreter is None else "own venv"
    return (package.package, package.version, python, ",".join(package.names), package.source)


class InstallAgentSettings(Section):
    names: list[str]
    """Names of agents, as `agents list` shows them."""
    version: str = ""
    """Version of a single agent; unset: the one that is tested with this envserver."""
    folder: Path | None = None
    """Folder of all installed agents; unset: $XDG_DATA_HOME/envserver/agents. Give the same one to
    runs, as --agent.folder."""


class ListAgentsSettings(Section):
    folder: Path | None = None
    """Folder of all installed agents; unset: $XDG_DATA_HOME/envserver/agents."""


AGENTS_INSTALL = CommandSpec(
    "agents install",
    "Installs coding agents from npm and PyPI, each in a folder of its own, for --agent NAME.",
    InstallAgentSettings,
    usage="NAME...",
    arguments=("names",),
)
AGENTS_LIST = CommandSpec(
    "agents list", "Lists the agents that --agent can name.", ListAgentsSettings
)


def run_agents_install(argv: list[str]) -> int:
    with lean_imports():
        from ..harnesses import harness_of
        from ..harnesses.installing import install

    settings = AGENTS_INSTALL.read(argv)
    chosen = [harness_of(name) for name in settings.names]
    if settings.version and len(chosen) > 1:
        raise UsageError("--version is for a single agent.")
    for harness in chosen:
        say(f"Installing {harness.name} ...")
        print(install(harness, settings.folder, settings.version))
    return 0


def run_agents_list(argv: list[str]) -> int:
    with lean_imports():
        from ..harnesses import HARNESSES
        from ..harnesses.installing import installed_version
        from .console import show_rows

    settings = AGENTS_LIST.read(argv)
    rows = [("AGENT", "INSTALLED", "TESTED", "PACKAGE")]
    for harness in HARNESSES.values():
        package = harness.package
        assert package is not None
        installed = installed_version(harness.name, settings.folder) or "-"
        origin = f"{package.registry}:{package.name}"
        rows.append((harness.name, installed, package.version, origin))
    show_rows(rows)
    return 0
