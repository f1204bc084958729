"""The repository of a task: the tree that the agent starts from, and the sandboxes for it.

A task's public part says where the tree is: `files` (the texts themselves), `archive` (a tar file
on this machine), `folder` (as it is on this machine), `mirror` and `commit` (a git repository on
this machine), or `image` (of a container: see `images`); then `bug` (a patch
that is applied to it) and `removed` (files that the agent does not get). Trees of mirrors are read
by the git of this machine, and some are kept.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

from envserver_tools.sandboxed import PRELOAD
from msgspec import structs

from envserver import Caller, ConfigError, InputError, SandboxLimits, SandboxSpec, Task

from .patches import PatchError, apply_changes, read_patch
from .trees import Entry, Tree, git_files, tar_of, tree_of, tree_of_tar

GRADING_PRELOAD = (
    "pytest", "_pytest._argcomplete", "_pytest.doctest", "_pytest.faulthandler",
    "_pytest.helpconfig", "_pytest.junitxml", "_pytest.logging", "_pytest.pastebin",
    "_pytest.setuponly", "_pytest.setupplan", "_pytest.skipping", "_pytest.stepwise",
    "_pytest.threadexception", "_pytest.unittest", "_pytest.unraisableexception",
    "_pytest.warnings", "difflib", "pdb", "tarfile", "unittest",
    "unittest.mock",
)  # fmt: skip
"""Modules of the grading sandboxes. None of this project: a repository may use the same names."""
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
"""Limits of this environment's sandboxes."""
_GIT_SECONDS = 120
_LARGEST_FOLDER_BYTES = 200 << 20
_LEFT_BEHIND = (".git", "__pycache__", ".venv", "node_modules", ".pytest_cache", ".mypy_cache")


def base_tree(public: dict[str, Any], in_image: Tree | None = None) -> Tree:
    """Returns the tree that the agent starts from.

    Args:
        in_image: the files in the task's image, if it has one.
    """
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
    """Returns the tree of a commit of a repository on this machine."""
    return tree_of_tar(git(mirror, "archive", "--format=tar", commit))


@functools.lru_cache(maxsize=4)
def archived_tree(path: str) -> Tree:
    """Returns the tree in a tar file on this machine."""
    try:
        return tree_of_tar(Path(path).read_bytes())
    except (OSError, tarfile.TarError) as error:
        raise InputError("Its archive cannot be read.", said=str(error)) from error


@functools.lru_cache(maxsize=1)
def folder_tree(path: str) -> Tree:
    """Returns the files in a folder on this machine: of a git repository those that git does not
    ignore, else all but the temporary files of tools.
    """
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
            data = file.read_bytes()
            program = bool(file.stat().st_mode & 0o100)
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}.") from error
        size += len(data)
        if size > _LARGEST_FOLDER_BYTES:
            raise InputError(f"{path} holds more than {_LARGEST_FOLDER_BYTES >> 20} MB.")
        tree[name] = Entry(data, "program" if program else "file")
    if not tree:
        raise InputError(f"There is no file in {path}.")
    return tree


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
    """Returns git's output for a repository on this machine. Raises like `mirror_tree`."""
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
    public: dict[str, Any],
    command_seconds: float,
    in_image: Tree | None = None,
    built: Tree | None = None,
) -> tuple[SandboxSpec, str]:
    """The agent's sandbox, with a git repository of one commit in it, and that commit's id.

    Args:
        in_image: see `base_tree`.
        built: files beside the repository that are not part of it.
    """
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
    """
    Raises:
        InputError: there is no such folder, it is too large, or there is no terminal to ask at.
    """
    if not question.strip():
        raise InputError("The question is empty.")
    folder = repository.expanduser().resolve()
    if not folder.is_dir():
        raise InputError(f"{str(repository)!r} is not a folder.", hint="Name one with --repo.")
    if confirm and not sys.stdin.isatty():
        raise InputError(
            "Each command is to be confirmed, and there is no terminal to ask on.",
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

    async def confirm(self, arguments: dict[str, Any], caller: Caller) -> bool:
        """Asks whether this command may run; a service of the environment."""
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
