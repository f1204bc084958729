"""The repository of a task: the tree that the agent starts from, and the sandboxes for it.

A task's public part has `files` (the texts), `archive` (a tar file here), `folder` (here), `mirror`
and `commit` (a git repository here), or `image` (of a container); then `bug` (a patch that is
applied to it) and `removed` (files that the agent does not get).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envserver_records.tasks import Json
from envserver_tools.sandboxed import PRELOAD
from msgspec import structs

from envserver import Caller, ConfigError, InputError, Sandbox, SandboxLimits, SandboxSpec, Task

from .patches import PatchError, apply_changes, read_patch
from .trees import Entry, Tree, git_files, tar_of, tree_of, tree_of_tar

SPEC = SandboxSpec(
    preload=(*PRELOAD, "tarfile"),
    limits=SandboxLimits(
        wall_seconds=600.0,
        cpu_seconds=600.0,
        memory_mb=1024,
        disk_mb=512,
        inodes=40_000,
        processes=64,
        open_files=1024,
        output_kb=4096,
        input_kb=8192,
    ),
)
_GIT_SECONDS = 120
_LARGEST_FOLDER_BYTES = 200 << 20
_LEFT_BEHIND = (".git", "__pycache__", ".venv", "node_modules", ".pytest_cache", ".mypy_cache")


def base_tree(public: Json, in_image: Tree | None = None) -> Tree:
    if "files" in public:
        return tree_of(public["files"])
    if in_image is not None:
        tree = dict(in_image)
    elif "archive" in public:
        tree = dict(archived_tree(public["archive"]))
    elif "folder" in public:
        tree = dict(folder_tree(public["folder"]))
    else:
        tree = dict(mirror_tree(public["mirror"], public["commit"]))
    try:
        tree = apply_changes(tree, read_patch(public.get("bug", "")))
    except PatchError as error:
        raise ConfigError(f"The task's own patch does not fit its repository: {error}") from error
    for path in public.get("removed", ()):
        tree.pop(path, None)
    return tree


@functools.lru_cache(maxsize=4)
def mirror_tree(mirror: str, commit: str) -> Tree:
    return tree_of_tar(git(mirror, "archive", "--format=tar", commit))


@functools.lru_cache(maxsize=4)
def archived_tree(path: str) -> Tree:
    try:
        return tree_of_tar(Path(path).read_bytes())
    except (OSError, tarfile.TarError) as error:
        raise InputError("Its archive cannot be read.", said=str(error)) from error


@functools.lru_cache(maxsize=1)
def folder_tree(path: str) -> Tree:
    """The files that git does not ignore; without git, all but the temporary ones of tools."""
    root = Path(path)
    tree: Tree = {}
    size = 0
    for name in sorted(_names_in(root)):
        file = root / name
        try:
            if file.is_symlink():
                tree[name] = Entry(os.fsencode(file.readlink()), "link")
                continue
            if not file.is_file():
                continue
            tree[name] = entry_of(file)
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}.") from error
        size += len(tree[name].data)
        if size > _LARGEST_FOLDER_BYTES:
            raise InputError(f"{path} holds more than {_LARGEST_FOLDER_BYTES >> 20} MB.")
    if not tree:
        raise InputError(f"There is no file in {path}.")
    return tree


def entry_of(file: Path) -> Entry:
    return Entry(file.read_bytes(), "program" if file.stat().st_mode & 0o100 else "file")


def _names_in(root: Path) -> list[str]:
    if (root / ".git").exists():
        said = git(str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        return [os.fsdecode(name) for name in said.split(b"\0") if name]
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_BEHIND]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files]
    return names


def git(mirror: str, *arguments: str) -> bytes:
    command = ["git", "-C", mirror, *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"git cannot read the repository: {error}.") from error
    if ran.returncode:
        raise InputError(
            "The mirror has no such commit.", said=ran.stderr[-300:].decode("utf-8", "replace")
        )
    return ran.stdout


def workspace(
    public: Json,
    command_seconds: float,
    in_image: Tree | None = None,
    built: Tree | None = None,
) -> tuple[SandboxSpec, str]:
    """The agent's sandbox, with a git repository of one commit in it, and that commit's id."""
    tree = base_tree(public, in_image)
    repository, commit = git_files(tree)
    archive = tar_of({**(built or {}), **tree, **repository})
    # What looks after a command needs a little longer than it.
    limits = limits_of(command_seconds + 5)
    return SandboxSpec(archive=archive, preload=SPEC.preload, limits=limits), commit


def limits_of(seconds: float) -> SandboxLimits:
    """Our sandboxes' limits, of programs that may take so long, on two cores."""
    return structs.replace(SPEC.limits, wall_seconds=seconds, cpu_seconds=2 * seconds)


def asked_task(question: str, repository: Path, *, confirm: bool) -> Task:
    if not question.strip():
        raise InputError("The question is empty.")
    folder = repository.expanduser().resolve()
    if not folder.is_dir():
        raise InputError(f"{str(repository)!r} is not a folder.", hint="Name one with --repo.")
    if confirm and not sys.stdin.isatty():
        raise InputError(
            "Commands must be confirmed, but there is no terminal to ask on.",
            hint="--yolo runs them without asking (in the sandbox).",
        )
    folder_tree(str(folder))
    name = hashlib.sha256(f"{folder}\0{question}".encode()).hexdigest()[:12]
    public = {"problem": question, "folder": str(folder), "asked": True, "confirm": confirm}
    return Task(f"asked-{name}", public)


class Terminal:
    """Asks before commands; `a` allows all that follow."""

    def __init__(self) -> None:
        self._all = False
        self._asking = asyncio.Lock()

    async def confirm(self, arguments: Json, caller: Caller) -> bool:
        if not caller.task.public.get("confirm"):
            raise InputError("This task asks for no confirmation.")
        command = arguments.get("command") or arguments.get("cmd") or arguments
        async with self._asking:
            if self._all:
                return True
            shown = command if isinstance(command, str) else json.dumps(command)
            # Control characters could show another command than the one that runs.
            shown = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in shown)
            sys.stderr.write(f"\n{shown}\nRun it? [y]es, [n]o, [a]ll: ")
            sys.stderr.flush()
            answer = (await _line()).strip().lower()
            self._all = answer in ("a", "all")
            return self._all or answer in ("y", "yes")


def _line() -> asyncio.Future[str]:
    """Reads a line from the terminal, in a thread that is not joined at the end."""
    reading: concurrent.futures.Future[str] = concurrent.futures.Future()
    reading.set_running_or_notify_cancel()

    def work() -> None:
        try:
            reading.set_result(sys.stdin.readline())
        except BaseException as error:  # noqa: BLE001 - it goes to the awaiting task
            reading.set_exception(error)

    threading.Thread(target=work, name="terminal", daemon=True).start()
    return asyncio.wrap_future(reading)


MOST_BYTES = 56 << 20
"""Maximum size of a repository's files, build results included: they are sent at once."""
_TRUST = b"[safe]\n\tdirectory = *\n"
_TRUST_PLACE = ".git/trust"
_SEARCHED = "/usr/local/bin:/usr/bin:/bin"

Open = Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]]

# What git ignores was built: tests need it, a patch must not hold it. The rest is the repository.
_READ = """
import os, subprocess, sys, tarfile

def names(*words):
    command = ["git", "ls-files", "-z", *words, "--exclude-standard"]
    said = subprocess.run(command, capture_output=True, check=True).stdout
    return {os.fsdecode(name) for name in said.split(bytes(1)) if name}

def useful(name):
    if name.endswith((".pyc", ".pyo")) or name.startswith(".git/") or not os.path.lexists(name):
        return False
    if os.path.islink(name):
        return not os.readlink(name).startswith("/")
    return os.path.isfile(name)

place, most = sys.argv[1], int(sys.argv[2])
os.chdir(place)
parts = {"files": names("--cached", "--others"), "built": names("--others", "--ignored")}
for part, found in parts.items():
    found = sorted(filter(useful, found))
    most -= sum(os.lstat(name).st_size + 1024 for name in found)
    if most < 0:
        sys.exit("too large")
    with tarfile.open(f"/work/{part}.tar", "w:gz", compresslevel=1) as tar:
        for name in found:
            tar.add(name, recursive=False)
"""


@dataclass(frozen=True)
class ImageRules:
    """Paths inside of images: the directory to copy, and directories prepended to PATH."""

    repository: str = "/testbed"
    path: str = "/opt/miniconda3/envs/testbed/bin"

    def spec(self, spec: SandboxSpec, image: str, *, for_agent: bool) -> SandboxSpec:
        """`spec` in a container of `image`, without the image's own copy of the repository. For an
        agent Python finds packages in /work, as it found the image's copy, and git trusts the
        repository there: engines give /work to root."""
        files = dict(spec.files)
        env = {**spec.env, "PATH": f"{self.path}:{_SEARCHED}".lstrip(":")}
        if for_agent:
            env["PYTHONPATH"] = "/work:/work/src"
            env["GIT_CONFIG_GLOBAL"] = f"/work/{_TRUST_PLACE}"
            files[_TRUST_PLACE] = _TRUST
        return structs.replace(
            spec, files=files, env=env, image=image, image_hides=(self.repository,)
        )


@dataclass(frozen=True)
class ImageFiles:
    """The repository's files in an image, and files built in it that are not part of it."""

    tree: Tree
    built: Tree


def image_of(row: Json, template: str) -> str:
    """The image of a row, or ""; in `template`, of rows that name none, `{owner}` and `{name}` are
    the parts of an `instance_id` (`django__django-1`: django, django-1)."""
    for field in ("image", "image_name", "docker_image"):
        if row.get(field):
            return str(row[field])
    owner, _, name = str(row.get("instance_id") or "").lower().partition("__")
    if not template or not name:
        return ""
    try:
        return template.format(owner=owner, name=name)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError("env.image_name may hold {owner} and {name} only.") from error


def python_of(row: Json) -> str:
    """The Python that a row's `test_cmd` names first; else `python`, as PATH has it."""
    said = row.get("test_cmd")
    try:
        words = shlex.split(said) if isinstance(said, str) else list(said or [])
    except (TypeError, ValueError):
        return "python"
    first = words[0] if words and isinstance(words[0], str) else ""
    return first if PurePosixPath(first).name.startswith("python") else "python"


class Images:
    """The files of repositories in images; some are kept."""

    def __init__(self, rules: ImageRules) -> None:
        self.rules = rules
        self._kept: dict[str, ImageFiles] = {}

    async def files(self, image: str, open_sandbox: Open) -> ImageFiles:
        """Raises InputError for such a repository that is missing or too large, SandboxError for a
        missing image or backend."""
        if image not in self._kept:
            found = await _read(image, self.rules.repository, open_sandbox)
            while len(self._kept) >= 4:
                del self._kept[next(iter(self._kept))]
            self._kept[image] = found
        return self._kept[image]


async def _read(image: str, place: str, open_sandbox: Open) -> ImageFiles:
    # The repository is another user's.
    spec = SandboxSpec(files={".gitconfig": _TRUST}, limits=SPEC.limits, image=image)
    async with open_sandbox(spec) as sandbox:
        result = await sandbox.run_python(_READ, argv=[place, str(MOST_BYTES)])
        if not result.ok:
            if result.stderr.strip() == b"too large":
                raise InputError("The repository in its image is too large.")
            said = result.stderr[-300:].decode("utf-8", "replace")
            raise InputError("The repository in its image cannot be read.", said=said)
        try:
            tree, built = [
                tree_of_tar(await sandbox.read(f"/work/{part}.tar", MOST_BYTES + (1 << 20)))
                for part in ("files", "built")
            ]
        except tarfile.TarError as error:
            raise InputError("The repository in its image cannot be read.") from error
    return ImageFiles(tree, built)
