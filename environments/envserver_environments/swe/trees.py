"""A repository's files in memory, and what can be made of them: a tar, a git repository, a patch.
Pure: equal trees give equal bytes, on every machine and without git."""

from __future__ import annotations

import difflib
import hashlib
import io
import re
import struct
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["file", "program", "link"]

_MODES: dict[Kind, int] = {"file": 0o100644, "program": 0o100755, "link": 0o120000}
_COMMIT_SECONDS = 1_700_000_000
_PERSON = f"Repository <repository@example.invalid> {_COMMIT_SECONDS} +0000"
_IGNORED = "__pycache__/\n*.py[co]\n.pytest_cache/\n.cache/\n.bash_history\n.python_history\n"
"""Temporary files of tools and interpreters; never part of a diff."""
_GIT_CONFIG = """[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = false
[user]
\tname = Agent
\temail = agent@example.invalid
"""


@dataclass(frozen=True)
class Entry:
    """One file; the `data` of a link is its target."""

    data: bytes
    kind: Kind = "file"


Tree = dict[str, Entry]


def tree_of(files: Mapping[str, str]) -> Tree:
    return {path: Entry(text.encode()) for path, text in sorted(files.items())}


def tar_of(tree: Tree, prefix: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, entry in sorted(tree.items()):
            info = tarfile.TarInfo(prefix + path)
            info.mtime = _COMMIT_SECONDS
            info.mode = 0o755 if entry.kind == "program" else 0o644
            if entry.kind == "link":
                info.type, info.linkname = tarfile.SYMTYPE, entry.data.decode()
                tar.addfile(info)
            else:
                info.size = len(entry.data)
                tar.addfile(info, io.BytesIO(entry.data))
    return buffer.getvalue()


def tree_of_tar(data: bytes) -> Tree:
    """Returns files and links of a tar, such as `git archive` makes, without git's own files."""
    tree: Tree = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            name = info.name.removeprefix("./")
            if name.startswith(".git/"):
                continue
            if info.issym():
                tree[name] = Entry(info.linkname.encode(), "link")
            elif info.isreg():
                file = tar.extractfile(info)
                content = b"" if file is None else file.read()
                tree[name] = Entry(content, "program" if info.mode & 0o100 else "file")
    return tree


def git_files(tree: Tree) -> tuple[Tree, str]:
    """`.git` of a repository whose only commit is `tree`, on one branch, `main`; and the commit's
    id."""
    objects: dict[str, bytes] = {}
    blobs = {path: _store(objects, "blob", entry.data) for path, entry in tree.items()}
    root = _store_folder(objects, tree, blobs)
    commit = f"tree {root}\nauthor {_PERSON}\ncommitter {_PERSON}\n\nThe repository\n"
    head = _store(objects, "commit", commit.encode())
    files = {
        "HEAD": b"ref: refs/heads/main\n",
        "config": _GIT_CONFIG.encode(),
        "refs/heads/main": f"{head}\n".encode(),
        "info/exclude": _IGNORED.encode(),
        "index": _index(tree, blobs),
        **{f"objects/{name[:2]}/{name[2:]}": data for name, data in objects.items()},
    }
    return {f".git/{name}": Entry(data) for name, data in files.items()}, head


def make_patch(old: Tree, new: Tree) -> str:
    """The difference in git's form; files must be UTF-8."""
    parts = []
    for path in sorted({*old, *new}):
        before, after = old.get(path), new.get(path)
        if before == after:
            continue
        parts.append(f"diff --git a/{path} b/{path}\n")
        old_name, new_name = f"a/{path}", f"b/{path}"
        match before, after:
            case None, Entry(kind=kind):
                parts.append(f"new file mode {_MODES[kind]:o}\n")
                old_name = "/dev/null"
            case Entry(kind=kind), None:
                parts.append(f"deleted file mode {_MODES[kind]:o}\n")
                new_name = "/dev/null"
            case Entry(kind=kind), Entry(kind=changed) if kind != changed:
                parts.append(f"old mode {_MODES[kind]:o}\nnew mode {_MODES[changed]:o}\n")
        lines = difflib.unified_diff(_lines(before), _lines(after), old_name, new_name)
        parts += map(_marked, lines)
    return "".join(parts)


def _lines(entry: Entry | None) -> list[str]:
    if entry is None:
        return []
    return re.findall(r"[^\n]*\n|[^\n]+", entry.data.decode())


def _marked(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _store(objects: dict[str, bytes], kind: str, data: bytes) -> str:
    whole = f"{kind} {len(data)}\0".encode() + data
    name = hashlib.sha1(whole, usedforsecurity=False).hexdigest()
    objects[name] = zlib.compress(whole, 1)
    return name


def _store_folder(objects: dict[str, bytes], tree: Tree, blobs: dict[str, str]) -> str:
    folders: dict[str, Tree] = {}
    rows: list[tuple[str, int, str]] = []
    for path, entry in tree.items():
        name, slash, rest = path.partition("/")
        if slash:
            folders.setdefault(name, {})[rest] = entry
        else:
            rows.append((name, _MODES[entry.kind], blobs[path]))
    for name, inner in folders.items():
        own = {rest: blobs[f"{name}/{rest}"] for rest in inner}
        rows.append((name, 0o40000, _store_folder(objects, inner, own)))
    # git sorts folders as if their names ended with a slash
    rows.sort(key=lambda row: (row[0] + ("/" if row[1] == 0o40000 else "")).encode())
    return _store(
        objects,
        "tree",
        b"".join(f"{mode:o} {name}\0".encode() + bytes.fromhex(sha) for name, mode, sha in rows),
    )


def _index(tree: Tree, blobs: dict[str, str]) -> bytes:
    """The index (version 2) as if everything were added; file times 0, so that git looks itself."""
    paths = sorted(tree, key=str.encode)
    parts = [b"DIRC", struct.pack(">II", 2, len(paths))]
    for path in paths:
        name = path.encode()
        stat = struct.pack(">10I", 0, 0, 0, 0, 0, 0, _MODES[tree[path].kind], 0, 0, 0)
        row = stat + bytes.fromhex(blobs[path]) + struct.pack(">H", min(len(name), 0xFFF)) + name
        parts.append(row + b"\0" * (8 - len(row) % 8))
    body = b"".join(parts)
    return body + hashlib.sha1(body, usedforsecurity=False).digest()
