"""The number of files and connections that this process may have open."""

from __future__ import annotations

import resource

_ENOUGH = 65536
"""More would only make children slow that close every possible descriptor."""


def raise_open_files() -> int:
    """Raises the soft limit of open files to the hard one, up to 65,536; returns the soft limit.

    The usual soft limit of 1,024 is there for programs that use select(), which this one does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
