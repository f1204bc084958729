"""Saves checkpoints in folders `step-N`, which are always complete.

In: the learner's state, and what the server must learn after a restart. Out: `CheckpointInfo`. What
always holds: a folder named `step-N` is complete and on disk, because it was written under another
name, synced and renamed. `kill -9` at any moment leaves the last checkpoint intact.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from envserver_records.files import sync_path, sync_tree

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint's description, stored in its `about.json`.

    Args:
        step: number of batches that it learned from.
        version: the policy version at the server.
        lease_id: the last batch's lease, whose acknowledgement may have been lost. "": none.
        group_ids: groups of the last batch.
    """

    step: int
    version: int
    lease_id: str = ""
    group_ids: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The checkpoint's name at the server."""
        return f"step-{self.step}"


class Checkpoints:
    """Manages the checkpoints below a folder.

    Args:
        folder: made when needed.
        keep: number of last checkpoints to keep.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, saved: CheckpointInfo, state: dict[str, Any]) -> None:
        """Writes a checkpoint, then removes old ones."""
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f".{saved.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        torch.save(state, unfinished / "state.pt")
        (unfinished / "about.json").write_text(json.dumps(asdict(saved)))
        sync_tree(unfinished)
        unfinished.rename(self._folder / saved.name)
        sync_path(self._folder)
        for step in self._steps()[: -self._keep]:
            self._remove(self._folder / f"step-{step}")

    def _remove(self, folder: Path) -> None:
        """Renames before removing, so that no partial checkpoint is visible."""
        going = folder.with_name(f".{folder.name}")
        folder.rename(going)
        shutil.rmtree(going)

    def latest(self) -> CheckpointInfo | None:
        """Returns the last checkpoint's description, None if there is none."""
        steps = self._steps()
        if not steps:
            return None
        about = json.loads((self._folder / f"step-{steps[-1]}" / "about.json").read_text())
        return CheckpointInfo(**{**about, "group_ids": tuple(about["group_ids"])})

    def load(self, saved: CheckpointInfo) -> dict[str, Any]:
        """Returns the state of a checkpoint."""
        path = self._folder / saved.name / "state.pt"
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def _steps(self) -> list[int]:
        """Returns the steps of all checkpoints, ascending."""
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)
