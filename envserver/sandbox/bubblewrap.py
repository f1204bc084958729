"""The outer layer made by bubblewrap, if installed: the same layout as in `namespaces`.

Bubblewrap makes the namespaces and the root directory around a holder that only waits; then the
zygote, its imports done, joins them. So this project need not be visible inside. Sandboxes get the
same inner backend as without it.

What bubblewrap leaves to its caller is seen to here: its environment is empty (all inside could
read it), nothing of its own is writable or of unlimited size, and nested user namespaces stay
allowed, for the inner backend needs them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from . import linux
from .linux import MS_NODEV, MS_NOEXEC, MS_NOSUID
from .namespaces import DEVICES, LINKS, PLACE

_DIRECTORIES = ("/work", "/tmp", "/box", "/run", "/dev/shm")
_HOLDER = ["/bin/sh", "-c", "echo ready && exec cat"]
"""Reports when the backend is ready, and ends when its input is closed."""

_NAMESPACES = (
    linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
)


def installed() -> str | None:
    return shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")


def command(
    program: str,
    visible: Sequence[str],
    files: Mapping[str, int],
    status_fd: int,
    folder: str = "",
) -> list[str]:
    """The command line that builds the backend around the holder.

    Args:
        visible: host paths that appear at the same place, read-only; links stay links.
        files: open descriptors with the contents of files of /etc, by name.
        status_fd: where bubblewrap tells the holder's process id, as JSON.
        folder: appears at `PLACE`, read-only; "": none.
    """
    words = [program, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    words += ["--unshare-pid", "--unshare-ipc", "--unshare-net", "--unshare-uts"]
    if os.geteuid() != 0:
        words.append("--unshare-user")
    words += ["--json-status-fd", str(status_fd)]
    shown = set(visible)
    parents = {str(parent) for path in visible for parent in Path(path).parents}
    for path in sorted({*_DIRECTORIES, *parents} - {"/", *shown}):
        words += ["--dir", path]  # other users cannot enter those that bubblewrap makes by itself
    for path in visible:
        words += _show(path)
    if folder:
        words += ["--ro-bind", folder, PLACE]
    for name, descriptor in files.items():
        if f"/etc/{name}" not in shown:
            words += ["--file", str(descriptor), f"/etc/{name}"]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, number in LINKS.items():
        words += ["--symlink", f"/proc/self/fd{number}", f"/dev/{name}"]
    words += ["--proc", "/proc", "--remount-ro", "/", "--chdir", "/"]
    return [*words, "--", *_HOLDER]


def enter_outer(seen: Mapping[str, Any], then: Callable[[], None], shown: str = "") -> int:
    """See `namespaces.enter_outer`."""
    program = installed()
    if program is None:
        raise OSError("bwrap is not installed")
    with ExitStack() as stack:
        holder, pid = _build(stack, program, seen, shown)
        try:
            backend = os.pidfd_open(pid)
            status = _child(lambda: _join(backend, then), os.getpid())
            os.close(backend)
            return status
        finally:
            holder.kill()  # and with it all that is inside
            holder.wait()


def _build(
    stack: ExitStack, program: str, seen: Mapping[str, Any], shown: str
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts the holder; returns when the backend is ready, with the holder's process id."""
    files = {name: _file_with(stack, text).fileno() for name, text in seen["etc"].items()}
    ours, theirs = os.pipe()
    status = stack.enter_context(os.fdopen(ours, "rb"))
    try:
        holder = subprocess.Popen(
            command(program, seen["visible"], files, theirs, shown),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            pass_fds=[*files.values(), theirs],
        )
    finally:
        os.close(theirs)
    for pipe in (holder.stdin, holder.stdout, holder.stderr):
        assert pipe is not None
        stack.enter_context(pipe)
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != b"ready\n":
        holder.kill()
        words = holder.stderr.read(2000).decode(errors="replace").strip()
        holder.wait()
        raise OSError(f"bubblewrap failed: {words or 'without a message'}")
    return holder, int(json.loads(status.readline())["child-pid"])


def _file_with(stack: ExitStack, text: str) -> IO[bytes]:
    file: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack's
    file.write(text.encode())
    file.seek(0)
    return file


def _join(backend: int, then: Callable[[], None]) -> int:
    own_users = 0 if os.geteuid() == 0 else linux.CLONE_NEWUSER
    linux.join(backend, _NAMESPACES | own_users)
    return _child(lambda: _inside(then), 0)


def _inside(then: Callable[[], None]) -> int:
    if os.geteuid() == 0:
        # Bubblewrap covers parts of root's /proc; but only who sees a whole one may mount another.
        linux.mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir("/")
    then()
    return 0


def _child(run: Callable[[], int], parent_pid: int) -> int:
    """Its exit status; it ends with this process. `parent_pid`: as the child sees it, 0 from
    another pid namespace."""
    pid = os.fork()
    if pid == 0:
        linux.die_with(parent_pid, signal.SIGKILL)
        os._exit(run())
    return linux.wait_for(pid)


def _show(path: str) -> list[str]:
    if stat.S_ISLNK(os.lstat(path).st_mode):
        return ["--symlink", str(Path(path).readlink()), path]
    return ["--ro-bind", path, path]
