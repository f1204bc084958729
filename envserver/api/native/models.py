"""What trainers send under /v1, and the bounds of it."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

LONGEST_WAIT_SECONDS: Final = 60.0
MOST_GROUPS: Final = 1024
_LONGEST_LEASE_SECONDS: Final = 7 * 24 * 3600.0
VERSION_LIMIT: Final = 2**31 - 1

Seconds = Annotated[float, Field(gt=0, le=_LONGEST_LEASE_SECONDS, allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RunRequest(_Body):
    """A run to be created, or resumed when there is one of this name."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    batch_size: int | None = Field(default=None, ge=1, le=MOST_GROUPS)
    """Groups per lease where the lease names no number; 8 for a new run."""
    settings: dict[str, Any] | None = None
    """Anything the trainer wants to find again."""


class LeaseRequest(_Body):
    max_groups: int | None = Field(default=None, ge=1, le=MOST_GROUPS)
    """Most groups; unset: the run's batch size."""
    min_groups: int = Field(default=1, ge=1, le=MOST_GROUPS)
    """Wait until so many are there."""
    wait_seconds: float = Field(default=0.0, ge=0, le=LONGEST_WAIT_SECONDS)
    seconds: Seconds | None = None
    """How long the lease lasts; unset: as the server is set."""

    @model_validator(mode="after")
    def _in_order(self) -> LeaseRequest:
        if self.max_groups is not None and self.min_groups > self.max_groups:
            raise ValueError("min_groups is more than max_groups")
        return self


class LeaseReference(_Body):
    lease_id: str


class LeaseExtension(LeaseReference):
    seconds: Seconds


class PolicyVersionRequest(_Body):
    version: int = Field(ge=0, le=VERSION_LIMIT, strict=True)
