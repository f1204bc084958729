"""The durable state of the Atropos protocol besides its groups, so that a restart needs no
new registration.

Stored under one key and written whole: a few hundred bytes per environment.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from .batching import Waiting
from .models import Registration
from .queue import Registered

KEY: Final = "atropos"


class WireState(msgspec.Struct, kw_only=True):
    """The trainer, its environments and its progress.

    Args:
        wandb_group .. num_steps: as registered by the trainer; the values after a reset are those
            of the original protocol.
        registered: whether a trainer has registered since the start or the last reset.
        started: whether it has asked for a batch; until then environments are told to wait.
        step: number of batches formed, counted from the trainer's starting step.
        ahead: how many of those are not delivered yet.
        environments: by number.
        leases: batches leased to trainers that acknowledge: lease id to group ids.
        latest: the group queued last.
    """

    registered: bool = False
    started: bool = False
    wandb_group: str | None = None
    wandb_project: str | None = None
    batch_size: int = -1
    max_token_len: int = -1
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = -1
    num_steps: int = -1
    step: int = 0
    ahead: int = 0
    environments: list[Registered] = msgspec.field(default_factory=list)
    leases: dict[str, list[str]] = msgspec.field(default_factory=dict)
    latest: Waiting | None = None

    def register(self, registration: Registration) -> None:
        """Starts a new run; registered environments stay."""
        self.registered = True
        self.started = False
        self.wandb_group = registration.wandb_group
        self.wandb_project = registration.wandb_project
        self.batch_size = registration.batch_size
        self.max_token_len = registration.max_token_len
        self.checkpoint_dir = registration.checkpoint_dir
        self.save_checkpoint_interval = registration.save_checkpoint_interval
        self.num_steps = registration.num_steps
        self.step = registration.starting_step
        self.ahead = 0

    def reset(self) -> None:
        """Forgets the run and its environments, but keeps the longest row, the checkpoint settings
        and the latest group, as the protocol does.
        """
        self.registered = False
        self.started = False
        self.wandb_group = None
        self.wandb_project = None
        self.batch_size = -1
        self.num_steps = -1
        self.step = 0
        self.ahead = 0
        self.environments = []
        self.leases = {}

    def add_environment(self, environment: Registered) -> int:
        """Adds an environment and returns its number."""
        self.environments.append(environment)
        return len(self.environments) - 1

    def knows(self, env_id: int | None) -> bool:
        """Returns whether this is the number of a registered environment."""
        return env_id is not None and 0 <= env_id < len(self.environments)


def to_json_like(state: WireState) -> Any:
    """Converts the state for `store.set_value`."""
    return msgspec.to_builtins(state)


def from_json_like(value: Any) -> WireState:
    """Converts a value of `store.get_value`; None gives an initial state."""
    return WireState() if value is None else msgspec.convert(value, WireState)
