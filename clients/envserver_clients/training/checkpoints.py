"""Checkpoints: a folder `step-N` that is there whole or not at all.

In: the learner's state and what the server has to be told after a restart. Out: `Saved`. What
holds: a folder named `step-N` is complete and on disk: it was written under another name, synced,
and renamed. `kill -9` at any moment leaves the last one as it was.
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
class Saved:
    """What a checkpoint says of itself, in its `about.json`.

    Args:
        step: batches that it has learned from.
        version: of the policy, as the server knows it.
        lease_id: of the last of them: its acknowledgement may have been lost. "": there is none.
        group_ids: of the last of them.
    """

    step: int
    version: int
    lease_id: str = ""
    group_ids: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As the server knows it."""
        return f"step-{self.step}"


class Checkpoints:
    """The checkpoints below a folder.

    Args:
        folder: made when needed.
        keep: so many of the last ones stay.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, saved: Saved, state: dict[str, Any]) -> None:
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
        """Half a checkpoint must not bear a checkpoint's name."""
        going = folder.with_name(f".{folder.name}")
        folder.rename(going)
        shutil.rmtree(going)

    def latest(self) -> Saved | None:
        """What the last checkpoint says of itself, None where there is none."""
        steps = self._steps()
        if not steps:
            return None
        about = json.loads((self._folder / f"step-{steps[-1]}" / "about.json").read_text())
        return Saved(**{**about, "group_ids": tuple(about["group_ids"])})

    def load(self, saved: Saved) -> dict[str, Any]:
        """The state that it was saved with."""
        path = self._folder / saved.name / "state.pt"
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def _steps(self) -> list[int]:
        """Of all checkpoints, ascending."""
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)
