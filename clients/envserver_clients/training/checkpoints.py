"""Saves checkpoints in folders `step-N`, which are always complete.

Invariants: a folder named `step-N` is complete and on disk, because it was written under another
name, synced and renamed, after all ranks had written their parts. `kill -9` at any moment leaves
the last checkpoint intact. One process writes `state.pt`. Several ranks write their parts side by
side (torch's distributed checkpoint, in `parts/`). Any number of ranks reads both.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from envserver_records.files import sync_path, sync_tree

from .ranks import Ranks

State = dict[str, Any]
_PARTS: Final = "parts"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint's `about.json`.

    `step`: number of batches that it learned from. `version`: at the server. `lease_id`: of the
    last batch, whose acknowledgement may have been lost. `group_ids`: of the last batch.
    """

    step: int
    version: int
    lease_id: str = ""
    group_ids: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"step-{self.step}"


class Checkpoints:
    """Manages the last `keep` checkpoints below a folder that all ranks see."""

    def __init__(self, folder: Path, keep: int = 3, ranks: Ranks | None = None) -> None:
        self._folder = folder
        self._keep = keep
        self._ranks = ranks or Ranks()

    def save(self, saved: CheckpointInfo, state: Callable[[], State]) -> None:
        """Writes a checkpoint, then removes old ones; called on rank 0. `state` returns its part;
        others call their own in `save_part`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f".{saved.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        if not self._ranks.divided:
            torch.save(state(), unfinished / "state.pt")
        else:
            with self._ranks.together("save_part", saved):
                self.save_part(saved, state())
        (unfinished / "about.json").write_text(json.dumps(asdict(saved)))
        sync_tree(unfinished)
        unfinished.rename(self._folder / saved.name)
        sync_path(self._folder)
        for step in self._steps()[: -self._keep]:
            self._remove(self._folder / f"step-{step}")

    def save_part(self, saved: CheckpointInfo, state: State) -> None:
        """Writes this rank's part, and waits until all ranks have."""
        from torch.distributed import checkpoint

        checkpoint.save(
            state,
            checkpoint_id=self._folder / f".{saved.name}" / _PARTS,
            process_group=self._ranks.group,
        )

    def _remove(self, folder: Path) -> None:
        """Renames before removing, so that no partial checkpoint is visible."""
        going = folder.with_name(f".{folder.name}")
        folder.rename(going)
        shutil.rmtree(going)

    def latest(self) -> CheckpointInfo | None:
        found: CheckpointInfo | None = self._ranks.broadcast(
            self._latest() if self._ranks.leads else None
        )
        return found

    def _latest(self) -> CheckpointInfo | None:
        steps = self._steps()
        if not steps:
            return None
        about = json.loads((self._folder / f"step-{steps[-1]}" / "about.json").read_text())
        return CheckpointInfo(**{**about, "group_ids": tuple(about["group_ids"])})

    def load(self, saved: CheckpointInfo, blank: Callable[[Collection[str]], State]) -> State:
        """The state of a checkpoint; called on all ranks. `blank` returns tensors to read the parts
        into, given the names of what is stored."""
        folder = self._folder / saved.name
        if (folder / "state.pt").exists():
            whole: State = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
            return whole
        return self._from_parts(folder / _PARTS, blank)

    def _from_parts(self, folder: Path, blank: Callable[[Collection[str]], State]) -> State:
        from torch.distributed import checkpoint

        reader = checkpoint.FileSystemReader(folder)
        state = blank(reader.read_metadata().state_dict_metadata)
        checkpoint.load(
            state,
            storage_reader=reader,
            process_group=self._ranks.group,
            no_dist=not self._ranks.divided,
        )
        return state

    def _steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)
