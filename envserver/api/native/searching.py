"""The parameters of GET /v1/groups and /v1/rewards."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from ...store.listing import GroupQuery, Order
from ...store.states import GroupState
from .models import MOST_GROUPS, TaskId

_LIMIT: Final = 2**63 - 1
_Name = Annotated[str, Field(max_length=1024, pattern=r"^[^\x00]*$")]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=_LIMIT)]
_Version = Annotated[int, Field(ge=-1, le=_LIMIT)]


class GroupFilter(BaseModel):
    """Which groups; see `store.listing.GroupQuery`."""

    model_config = ConfigDict(extra="forbid")

    after: _Count = 0
    """`seq`: only groups that arrived later"""
    environment: _Name = ""
    task: TaskId = ""
    """the task's id"""
    split: _Name = ""
    model: _Name = ""
    state: GroupState | None = None
    min_reward: _Number | None = None
    """of the group's mean reward"""
    max_reward: _Number | None = None
    spread_above: _Number | None = None
    """its largest reward less its smallest is above this"""
    version_from: _Version | None = None
    version_to: _Version | None = None
    min_length: _Count | None = None
    """tokens of its longest row"""
    max_length: _Count | None = None
    flag: _Name = ""
    """a rollout of it has this flag"""
    end: _Name = ""
    """a rollout of it ended so: agent (by itself), or the name of a limit"""
    text: TaskId = ""
    """part of its id or of its task's"""

    def query(self) -> GroupQuery:
        """Returns the parameters as a query."""
        return GroupQuery(**self._values())

    def _values(self) -> dict[str, Any]:
        return self.model_dump()


class GroupSearch(GroupFilter):
    """Which groups, in which order, and which page of them."""

    order: Order = "oldest"
    """best, worst: by mean reward; widest: by the difference of rewards; longest: by tokens"""
    words: _Name = ""
    """words in its conversations or outputs; a page searches 256 groups at most, and may have none
    and still a cursor"""
    cursor: _Name = ""
    """of the page before; empty: the first page"""
    limit: int = Field(100, ge=1, le=MOST_GROUPS)

    def _values(self) -> dict[str, Any]:
        return self.model_dump(exclude={"words", "cursor", "limit"})
