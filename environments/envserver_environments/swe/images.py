"""Repositories that exist only in a container image, for the backend `docker`.

In: a row, or the image that a task names, and a way to open sandboxes. Out: the repository's files.
They are read in a container in which nothing of an agent has run. Agents and tests get them in
/work, and find the image's own place for them empty: it has the history, and where a row's patch is
the bug, the solution.
"""

from __future__ import annotations

import shlex
import tarfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from msgspec import structs

from envserver import ConfigError, InputError, Sandbox, SandboxSpec

from .repositories import SPEC
from .trees import Tree, tree_of_tar

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
    """Paths inside of images.

    Args:
        repository: the directory to copy.
        path: directories prepended to PATH, separated by colons.
    """

    repository: str = "/testbed"
    path: str = "/opt/miniconda3/envs/testbed/bin"

    def spec(self, spec: SandboxSpec, image: str, *, for_agent: bool) -> SandboxSpec:
        """Returns `spec` in a container of `image`, without the image's own copy of the repository.

        for_agent: make Python find packages in /work, as it found the image's copy, and make git
        trust the repository there: engines give /work to root.
        """
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
    """The repository's files in an image.

    Args:
        tree: the repository.
        built: files built in it that are not part of it.
    """

    tree: Tree
    built: Tree


def image_of(row: dict[str, Any], template: str) -> str:
    """Returns the image of a row, or "" if it has none.

    Args:
        template: image of rows that name none: `{owner}` and `{name}` are the two parts of an
        `instance_id` (`django__django-1`: django, django-1).
    """
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


def python_of(row: dict[str, Any]) -> str:
    """The Python that a row's `test_cmd` names first; else `python`, as PATH has it."""
    said = row.get("test_cmd")
    try:
        words = shlex.split(said) if isinstance(said, str) else list(said or [])
    except (TypeError, ValueError):
        return "python"
    first = words[0] if words and isinstance(words[0], str) else ""
    return first if PurePosixPath(first).name.startswith("python") else "python"


class Images:
    """The files of repositories in images; some are kept.

    Args:
        rules: where they are.
    """

    def __init__(self, rules: ImageRules) -> None:
        self.rules = rules
        self._kept: dict[str, ImageFiles] = {}

    async def files(self, image: str, open_sandbox: Open) -> ImageFiles:
        """
        Raises:
            InputError: the image has no such repository, or it is too large.
            SandboxError: there is no such image, no backend for it, or the sandbox failed.
        """
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
