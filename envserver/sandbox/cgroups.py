"""What a container's engine counts: the numbers of its cgroup, read from inside.

Engines show a container its own cgroup, read-only, below /sys/fs/cgroup: one folder per controller
(cgroups version 1), or one folder for all (version 2). Unlike what is sampled, they miss nothing:
CPU time of children that were not waited for, memory between two looks, threads.
"""

from __future__ import annotations

import os
import time

from .accounts import Accounts

_ROOT = "/sys/fs/cgroup"
_SERVER_PROCESSES = 1


class CgroupAccounts(Accounts):
    """Accounts of a container in whose cgroup only the in-sandbox server and its programs are.

    A file that is missing (old kernels have no `pids.peak`) leaves its number to sampling.

    Args:
        root: where the cgroup is shown.
    """

    def __init__(self, root: str = _ROOT) -> None:
        super().__init__()
        self._root = root
        self._all_in_one = os.path.exists(f"{root}/cgroup.controllers")
        self.cpu_exact = self._cpu() is not None
        self._memory_of_server = self._number("memory/memory.usage_in_bytes", "memory.current") or 0

    def cpu_seconds(self, living: float = 0.0) -> float:
        used = self._cpu()
        if used is None:
            return super().cpu_seconds(living)
        return max(0.0, used - time.process_time())

    def peak_memory(self) -> int:
        peak = self._number("memory/memory.max_usage_in_bytes", "memory.peak")
        return 0 if peak is None else max(0, peak - self._memory_of_server)

    def peak_tasks(self) -> int:
        return max(0, (self._number("pids/pids.peak", "pids.peak") or 0) - _SERVER_PROCESSES)

    def memory_kills(self) -> int:
        return self._field("oom_kill", "memory/memory.oom_control", "memory.events") or 0

    def _cpu(self) -> float | None:
        if self._all_in_one:
            microseconds = self._field("usage_usec", "", "cpu.stat")
            return None if microseconds is None else microseconds / 1e6
        nanoseconds = self._number("cpuacct/cpuacct.usage", "")
        return None if nanoseconds is None else nanoseconds / 1e9

    def _number(self, version_1: str, version_2: str) -> int | None:
        text = self._text(version_1, version_2).strip()
        return int(text) if text.isdigit() else None

    def _field(self, name: str, version_1: str, version_2: str) -> int | None:
        for line in self._text(version_1, version_2).splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == name:
                return int(words[1])
        return None

    def _text(self, version_1: str, version_2: str) -> str:
        try:
            with open(f"{self._root}/{version_2 if self._all_in_one else version_1}") as file:
                return file.read()
        except OSError:  # this kernel or engine does not tell
            return ""
