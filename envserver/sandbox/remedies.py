"""Suggests remedies for a backend that does not work, from this machine's settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from . import landlock

_APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_CLONE = Path("/proc/sys/kernel/unprivileged_userns_clone")
_MOST = Path("/proc/sys/user/max_user_namespaces")

LANDLOCK_ENOUGH = 6
"""The first version of Landlock that keeps programs from signalling the server."""


def remedies(backend: str) -> list[str]:
    """Returns what to do if a backend does not work here, likeliest first.

    Empty only for unsafe-local.
    """
    match backend:
        case "bubblewrap":
            return ["Install bubblewrap (apt install bubblewrap).", *_user_namespaces()]
        case "namespace":
            return [*_user_namespaces(), *_reachable_python()]
        case "landlock":
            return [*_landlock(), *_reachable_python()]
        case "docker":
            return [
                "Start Docker or Podman, and be allowed to use it.",
                "Name an image with python3 (3.11 or newer), bash and git: --sandbox.docker_image "
                "(one that the engine has, or with --sandbox.docker_pull missing).",
            ]
    return []


def _user_namespaces() -> list[str]:
    found = []
    if _number(_APPARMOR) == 1:
        python = os.path.realpath(sys.executable)
        found.append(
            "AppArmor keeps ordinary users from making user namespaces (Ubuntu since 23.10). Allow "
            f"it for this Python: echo 'abi <abi/4.0>, profile envserver {python} "
            "flags=(unconfined) { userns, }' | sudo tee /etc/apparmor.d/envserver && "
            "sudo apparmor_parser -r /etc/apparmor.d/envserver"
        )
        found.append("Or for all: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0")
    if _number(_CLONE) == 0:
        found.append("User namespaces are off: sudo sysctl -w kernel.unprivileged_userns_clone=1")
    if _number(_MOST) == 0:
        found.append("User namespaces are off: sudo sysctl -w user.max_user_namespaces=15000")
    if _in_container():
        found.append(
            "This is a container: start it with --security-opt seccomp=unconfined "
            "--security-opt systempaths=unconfined, as an ordinary user (--user 1000) or with "
            "--cap-add SYS_ADMIN (Kubernetes: hostUsers: false and procMount: Unmasked)."
        )
    return found or ["Allow unprivileged user namespaces on this machine."]


def _landlock() -> list[str]:
    version = landlock.abi()
    if version == 0:
        return ["Turn Landlock on: Linux 6.12 or newer, and landlock in the kernel's lsm= list."]
    if version < LANDLOCK_ENOUGH:
        return [
            f"This kernel's Landlock is version {version}; version {LANDLOCK_ENOUGH} (Linux 6.12) "
            "is needed. --sandbox.backend landlock takes it all the same, at your own risk."
        ]
    return []


def _reachable_python() -> list[str]:
    """Sandboxes of a root server have other users, who cannot pass a closed directory."""
    for path in {sys.base_prefix, sys.prefix}:
        for parent in Path(os.path.realpath(path)).parents:
            if os.geteuid() == 0 and not parent.stat().st_mode & 0o001:
                return [f"Install Python where every user can reach it: {parent} is closed."]
    return []


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
