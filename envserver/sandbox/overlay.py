"""One mount for a folder of which programs see all but some paths.

Each namespace inside the outer layer copies its mounts, and hundreds of them (one for each package)
take 1 to 2 ms of CPU. Overlayfs shows the folder below a layer of whiteouts: what these name is not
there, for whoever looks. Names that come later are seen.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from . import linux
from .linux import MS_NODEV, MS_NOSUID, MS_RDONLY

_READ_ONLY = MS_RDONLY | MS_NOSUID | MS_NODEV
_SPECIAL = frozenset(":,\\ \t\n")
"""Characters that have a meaning in the options of overlayfs, or that mountinfo escapes."""


def show_without(folder: str, hidden: Sequence[str], target: str, spare: str) -> bool:
    """Shows `folder` at `target`, read-only, without what is hidden in it.

    Args:
        hidden: paths below `folder`.
        target, spare: empty folders; nothing stays in `spare`.

    Returns:
        Whether it does: not on every file system and kernel, nor where something is mounted in it.
    """
    real = os.path.realpath(folder)  # where mounts are listed
    if _SPECIAL & {*real, *spare} or _holds_mounts(real):
        return False
    linux.mount("tmpfs", spare, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
    try:
        for path in hidden:
            parent, name = os.path.split(path)
            os.mknod(f"{_like(parent, folder, spare)}/{name}", stat.S_IFCHR)
        linux.mount("overlay", target, "overlay", _READ_ONLY, f"lowerdir={spare}:{real}")
    except OSError:  # it is shown by a mount for each entry then
        return False
    finally:
        linux.unmount(spare)  # an overlay that uses it keeps it
    return True


def _like(path: str, folder: str, spare: str) -> str:
    """Makes a folder in `spare` with the owner and the rights of `path`, which is in `folder`."""
    made = spare + path.removeprefix(folder)
    if path != folder:
        _like(os.path.dirname(path), folder, spare)
        os.makedirs(made, exist_ok=True)
    state = os.stat(path)
    if os.geteuid() == 0:  # nobody else can
        os.chown(made, state.st_uid, state.st_gid)
    os.chmod(made, stat.S_IMODE(state.st_mode))
    return made


def _holds_mounts(folder: str) -> bool:
    """Returns whether something is mounted below `folder`: an overlay would not show it."""
    below = os.fsencode(folder) + b"/"
    with open("/proc/self/mountinfo", "rb") as lines:
        return any(line.split()[4].startswith(below) for line in lines)
