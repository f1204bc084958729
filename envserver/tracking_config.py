"""`--track` and `--tracking.*`: where a run's numbers go; part of the tree in `config`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from .described import Section


class TrackingConfig(Section):
    """What trackers get (`--track wandb,trackio,mlflow,tensorboard,jsonl`)."""

    project: str = "envserver"
    """Project, or experiment, at the tracker."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """Name of the run; unset: command, environment and time."""
    folder: Path = Path("runs/track")
    """Folder for files that have no other place: W&B offline, MLflow's database, TensorBoard,
    JSON lines."""
    seconds: float = Field(default=30.0, gt=0)
    """Seconds between two writes of numbers; nothing is written without a new group."""
    close_seconds: float = Field(default=60.0, ge=0)
    """Seconds that the end of the run waits for trackers."""
    rollouts: int = Field(default=8, ge=0)
    """Rollouts in each addition to the table: the best and the worst of the latest groups."""
    rollouts_minutes: float = Field(default=5.0, ge=0)
    """Minutes between two additions to the table of rollouts."""
