"""Makes a patch of a repository's changes, whatever was planted in it.

Nothing in the repository influences git here. Git runs in a separate directory with its own
configuration, attributes and index, and only borrows the objects: no configuration, hook,
attribute, filter or file monitor of the repository is read, and nothing in it is changed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from .files import Refused, resolve, shown

INLINE_BYTES = 25_000
"""A longer patch is left in a file."""

_OBJECT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SETTINGS = """\
[core]
	repositoryFormatVersion = 1
	bare = false
	fileMode = true
	symlinks = true
	ignoreCase = false
	autocrlf = false
	hooksPath = /dev/null
	fsmonitor = false
	untrackedCache = false
[extensions]
	objectFormat = {}
"""
_ATTRIBUTES = "* -text -eol -ident -filter -working-tree-encoding !diff\n"
_NOT_SOURCE = "__pycache__/\n*.py[co]\n.pytest_cache/\n.mypy_cache/\n.ruff_cache/\n"
"""Temporary files of programs; never part of a patch, even if no .gitignore names them."""


def git_patch(repository: str, base: str, most: int) -> dict[str, Any]:
    """The changes of the files in `repository` since `base` (a full object id, or HEAD), committed
    or not.

    Returns `{"patch": text, its bytes as Latin-1}` or, of a long one, `{"file": its path}`, which
    the caller removes; `"left_out"`: new files that cannot be in it: repositories inside of this
    one, unreadable files, and files longer than `most` bytes.
    """
    tree = resolve(repository)
    store = os.path.join(tree, ".git")
    if not os.path.isdir(os.path.join(store, "objects")):
        name = os.path.normpath(os.path.join("/work", repository))
        raise Refused(f"there is no git repository in {shown(name)}.")
    commit = base if _OBJECT.fullmatch(base) else _head(store)
    place = tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))
    try:
        git = _Git(place, tree, store, commit)
        left_out = git.stage(most)
        patch = git.patch(most)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if len(patch) <= INLINE_BYTES:
        return {"patch": patch.decode("latin-1"), "left_out": left_out}
    name = f".patch-{secrets.token_hex(16)}"
    with open(name, "xb") as file:
        file.write(patch)
    return {"file": name, "left_out": left_out}


def _head(store: str) -> str:
    name = "HEAD"
    for _ in range(5):
        words = _small_text(store, name) or _packed(store, name)
        if _OBJECT.fullmatch(words):
            return words
        name = words.removeprefix("ref: ")
        if name == words or not name.startswith("refs/") or ".." in name:
            break
    raise Refused("HEAD is not a commit.")


def _small_text(store: str, name: str) -> str:
    path = os.path.join(store, name)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1000).strip()
    except OSError:
        return ""


def _packed(store: str, name: str) -> str:
    path = os.path.join(store, "packed-refs")
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file.read(10_000_000).splitlines():
            commit, _, packed = line.partition(" ")
            if packed == name:
                return commit
    return ""


class _Git:
    """Git in a separate directory, with the files of `tree` and the objects of `store`."""

    def __init__(self, place: str, tree: str, store: str, commit: str) -> None:
        self._tree, self._commit = tree, commit
        self._errors = os.path.join(place, "errors")
        directory = os.path.join(place, "git")
        for name in ("objects/info", "refs", "info"):
            os.makedirs(os.path.join(directory, name))
        contents = {
            "HEAD": "ref: refs/heads/none\n",
            "config": _SETTINGS.format("sha1" if len(commit) == 40 else "sha256"),
            "objects/info/alternates": f"{store}/objects\n",
            "info/attributes": _ATTRIBUTES,
            "info/exclude": _NOT_SOURCE,
        }
        for name, text in contents.items():
            with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
                file.write(text)
        self._env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C",
            "HOME": place,
            "XDG_CONFIG_HOME": place,
            "GIT_DIR": directory,
            "GIT_WORK_TREE": tree,
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_LITERAL_PATHSPECS": "1",
            "GIT_ALLOW_PROTOCOL": "none",
        }

    def stage(self, most: int) -> list[str]:
        """Makes an index of the base and new files; returns files that cannot be in a patch."""
        self._run("read-tree", self._commit)
        strange = [name for name in self._names("--cached") if _is_strange(self._tree, name)]
        self._run("update-index", "-z", "--force-remove", "--stdin", names=strange)
        new = self._names("--others", "--exclude-standard")
        left_out = [name for name in new if not self._can_be_added(name, most)]
        wanted = sorted(set(new) - set(left_out))
        self._run("add", "-N", "--pathspec-from-file=-", "--pathspec-file-nul", names=wanted)
        return [shown(os.fsdecode(name)) for name in left_out]

    def patch(self, most: int) -> bytes:
        options = (
            "--binary", "--full-index", "--no-renames", "--no-color", "--no-ext-diff",
            "--no-textconv", "--ignore-submodules=all", "--src-prefix=a/", "--dst-prefix=b/",
        )  # fmt: skip
        with self._started("diff", *options, self._commit, "--") as process:
            assert process.stdout is not None
            patch = process.stdout.read(most + 1)
            if len(patch) > most:
                process.kill()
                raise Refused(f"the patch is longer than {most} bytes.")
            self._check(process.wait())
            return patch

    def _names(self, *what: str) -> list[bytes]:
        return [name for name in self._run("ls-files", "-z", *what).split(b"\0") if name]

    def _can_be_added(self, name: bytes, most: int) -> bool:
        place = os.path.join(os.fsencode(self._tree), name)
        status = os.lstat(place)
        if stat.S_ISLNK(status.st_mode):
            return True
        return stat.S_ISREG(status.st_mode) and status.st_size <= most and os.access(place, os.R_OK)

    def _run(self, *words: str, names: Sequence[bytes] | None = None) -> bytes:
        if names is not None and not names:
            return b""
        with self._started(*words) as process:
            output, _ = process.communicate(b"\0".join(names or ()))
            self._check(process.returncode)
            return output

    def _started(self, *words: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        try:
            with open(self._errors, "wb") as errors:
                return subprocess.Popen(
                    ["git", *words],
                    cwd=self._tree,
                    env=self._env,
                    stdin=pipe,
                    stdout=pipe,
                    stderr=errors,
                )
        except FileNotFoundError:
            raise Refused("git is not installed here.") from None

    def _check(self, status: int) -> None:
        if status:
            with open(self._errors, "rb") as errors:
                said = errors.read(1000).decode("utf-8", "replace").strip()
            raise Refused(f"git failed: {shown(said.replace(chr(10), '; '))}")


def _is_strange(tree: str, name: bytes) -> bool:
    """It exists and is neither file, link nor directory: git would fail."""
    try:
        mode = os.lstat(os.path.join(os.fsencode(tree), name)).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode))
