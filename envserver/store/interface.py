"""The interface of a store, in four parts: put groups, lease them, manage runs, look things up.

`sql.py` implements it for SQLite and PostgreSQL. The server and its API use a store only through
these methods, so a class that has them is a store.

What always holds:
    - When a method that changes something returns, the change is durable.
    - When it raises a `UsageError` (InputError, NotFoundError, ConflictError) or `StoreFull`,
      nothing changed.
    - Any method may raise `StoreError`: the change was made completely or not at all, and calling
      it again is safe. After `StoreLost` the store cannot be used any more.
    - Groups are in order of arrival; `GroupRow.seq` is that order.
    - All methods are called from one event loop, by any number of tasks at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from envserver_records.records import Split

    from ..rollouts.estimates import Estimate, Scored
    from .deliveries import Backlog
    from .groups import EncodedPut, EstimateRow
    from .listing import GroupQuery, Page, TaskOrder, TasksPage
    from .lookups import LeasedGroup, LeaseFacts, RewardCounts
    from .rows import Checkpoint, Compacted, DamagedGroup, Delivery, GroupPut, GroupRow, Lease, Run
    from .sql import Store
    from .states import GroupState, RunState
    from .statistics import StoreStatistics
    from .transaction import KnownRun


class PutGroups(Protocol):
    """Puts groups into the store and changes their state in the shared queue."""

    discount: float
    """Discount of task estimates per policy version; see `rollouts.estimates`."""

    async def put(self, groups: Sequence[GroupPut]) -> list[bool]:
        """Stores all of these groups, or none.

        Returns:
            For each group: True if it was stored, False if its id already exists (nothing changes).

        Raises:
            InputError: a group has no id, or a state that it cannot be put in.
            StoreFull: there is no space.
        """

    async def put_encoded(self, groups: Sequence[EncodedPut]) -> list[bool]:
        """Like `put`, for groups whose bodies are already compressed."""

    async def count_dropped(self, news: Sequence[Scored]) -> int:
        """Counts scored groups that are not stored in the estimates of their tasks, each id once;
        `put` counts those that it stores.

        Returns:
            How many were not counted before.
        """

    async def move(self, group_ids: Sequence[str], to: GroupState) -> None:
        """Moves groups of the shared queue from buffered to queued, or from either to dropped; all
        or none. Broadcast runs get the queued ones as well.

        Raises:
            NotFoundError: a group does not exist.
            ConflictError: the state of a group does not allow it.
        """

    async def drop_damaged(
        self, reasons: Mapping[str, str], *, undo: str | None = None
    ) -> list[str]:
        """Drops groups whose bodies cannot be read from every queue where they are waiting or
        leased. Each is counted once, and its reason is kept.

        Args:
            reasons: reason by group id.
            undo: id of an open lease that nobody has received yet: its other groups are queued
                again, and the id can be used again.

        Returns:
            The ids of groups that were not known to be damaged.
        """

    async def drop_stale(self, below_version: int) -> int:
        """Drops queued groups of policy versions below this one; returns how many deliveries.

        Leased groups and groups of an unknown version stay.
        """

    async def compact(self, *, acked_hours: float = 24.0, max_gb: float | None = None) -> Compacted:
        """Removes groups that every run acked, or that were dropped, at least `acked_hours` ago.

        The ids stay, so that a removed group is not stored again, and counts still include it.
        Groups that a run acked after its last checkpoint but one stay as well.

        Args:
            max_gb: limit for all bodies, in GB (1e9 bytes): above it the oldest groups are removed
                earlier. None: no limit.
        """


class LeaseGroups(Protocol):
    """Leases groups to runs, and ends leases."""

    oldest_version: int
    """Groups of an older policy version are leased only by id; -1: no limit."""

    async def lease(
        self,
        run: str,
        *,
        max_groups: int | None = None,
        max_sequences: int | None = None,
        max_tokens: int | None = None,
        min_groups: int = 1,
        environments: Collection[str] | None = None,
        min_version: int | None = None,
        group_ids: Sequence[str] | None = None,
        seconds: float,
        lease_id: str | None = None,
    ) -> Lease | None:
        """Leases the oldest queued groups to `run` for `seconds`; expired leases are taken back
        first.

        Args:
            max_groups, max_sequences, max_tokens: upper limits (None: no limit); at least one group
                is leased even if it is larger.
            min_groups: lease nothing if fewer groups match.
            environments: only groups of these environments, as far as the run takes them; None: all
                that the run takes.
            min_version: only groups of this policy version or a later one, or of an unknown one;
                never of one before `oldest_version`.
            group_ids: lease exactly these groups, in this order; no limit or filter may be given.
            lease_id: id of the new lease; if it is an open lease of this run, that lease is
                returned.

        Returns:
            None when nothing, or too little, is queued.

        Raises:
            InputError: an argument is out of range, or `group_ids` is combined with a limit or
                filter.
            NotFoundError: the run or a group does not exist.
            ConflictError: the run is closed, a group is not queued or not of the run's
                environments, or `lease_id` belongs to another lease or to one that has ended.
        """

    async def ack(self, lease_id: str, *, checkpoint: str | None = None) -> None:
        """Acknowledges a lease: its groups are delivered. Repeating it has no effect. A late ack
        counts as long as none of the groups was leased again.

        Args:
            checkpoint: name of the checkpoint that holds this and all earlier acks of the run, to
                which the run can `rewind`. A name that is used again moves.

        Raises:
            NotFoundError: the lease does not exist.
            ConflictError: the lease was given back, its run was closed or rewound, or it expired
                and one of its groups was leased again.
        """

    async def nack(self, lease_id: str, *, reason: str = "") -> None:
        """Gives a lease back: its groups are queued again in their old places. Repeating it has no
        effect. `reason` is counted in `counters` as `nacked:REASON`. Raises as `ack`.
        """

    async def set_aside(self, lease_id: str, group_ids: Sequence[str], *, reason: str) -> None:
        """Drops some groups of a lease from the queue of its run: they are never delivered there
        again. The lease keeps the others. Repeating it has no effect. `reason` is counted in
        `counters` as `set_aside: REASON`.

        Raises:
            NotFoundError: the lease or a group does not exist.
            ConflictError: as for `ack`, or the lease does not hold a group.
        """

    async def extend(self, lease_id: str, seconds: float) -> float:
        """Lets a lease expire `seconds` from now; returns that time. Raises as `ack`, and
        ConflictError if the lease was acked.
        """

    async def expire(self, now: float | None = None) -> list[str]:
        """Queues the groups of leases that are due at `now` (None: the current time) again; returns
        the ids of these leases.
        """


class ManageRuns(Protocol):
    """Creates, changes and rewinds runs; keeps small values."""

    async def create_run(
        self,
        name: str,
        *,
        batch_size: int,
        settings: dict[str, Any] | None = None,
        delivery: Delivery = "shared",
        environments: Collection[str] = (),
    ) -> Run:
        """Creates a run and opens it, or opens the run of this name if its arguments are the same.

        Args:
            delivery: shared: each group goes to one of the shared runs. broadcast: this run gets
                all groups, from the oldest that is kept and was not dropped.
            environments: only groups of these environments; empty: of all.

        Raises:
            ConflictError: a run of this name has other arguments.
        """

    async def set_run(
        self,
        name: str,
        *,
        batch_size: int | None = None,
        settings: dict[str, Any] | None = None,
        policy_version: int | None = None,
        environments: Collection[str] | None = None,
        state: RunState | None = None,
    ) -> Run:
        """Changes what is not None; `state` acts like `close_run` and `create_run`. Raises
        NotFoundError if the run does not exist.
        """

    async def close_run(self, name: str) -> Run:
        """Closes a run and gives its leases back. `create_run` opens it again; a broadcast run then
        gets what arrived meanwhile and is still kept. Raises NotFoundError if it does not exist.
        """

    async def rewind(self, run: str, checkpoint: str | None) -> list[str]:
        """Takes a run back to a checkpoint (None: its start) and queues again what it acked since.

        Its open leases are given back, and its earlier leases can no longer be acked.

        Returns:
            The ids of the groups whose acks were undone, oldest first.

        Raises:
            NotFoundError: the run or the checkpoint does not exist.
            ConflictError: groups that were acked after it are no longer kept; nothing changed.
        """

    async def checkpoints(self, run: str) -> list[Checkpoint]:
        """Returns a run's checkpoints, oldest first. Raises NotFoundError if the run does not
        exist.
        """

    async def get_run(self, name: str) -> Run:
        """Returns a run. Raises NotFoundError if it does not exist."""

    async def list_runs(self) -> list[Run]:
        """Returns all runs, oldest first."""

    async def get_value(self, key: str) -> Any:
        """Returns the JSON-like value of `key`, or None if it was never set."""

    async def put_minute(self, minute: int, numbers: str, keep_from: int) -> None:
        """Stores the server's numbers of a minute (since 1970), as JSON text; removes those before
        the minute `keep_from`."""

    async def values_with_prefix(self, prefix: str) -> dict[str, Any]:
        """Returns the values of all keys that begin with `prefix`."""

    async def set_value(self, key: str, json_value: Any) -> None:
        """Sets the value of `key`. Raises InputError if it is not JSON-like."""

    async def set_values(self, json_values: Mapping[str, Any]) -> None:
        """Sets several values in one transaction; None removes a value. Raises InputError as
        `set_value`.
        """

    async def touch(self) -> None:
        """Writes the store's time. Raises StoreError if the store cannot be written."""


class ReadGroups(Protocol):
    """Reads groups: all that the routes for inspection need, also of files (`viewing`)."""

    async def bodies(self, group_ids: Sequence[str]) -> list[bytes]:
        """Returns the bodies of these groups, in order.

        Raises:
            NotFoundError: a group does not exist or is no longer kept.
            DamagedBodies: some bodies cannot be read; see `drop_damaged`.
        """

    async def stored_bodies(self, group_ids: Sequence[str]) -> list[tuple[int, bytes]]:
        """Like `bodies`, but returns each body's encoding and encoded bytes (`compression.py`)."""

    async def rows(self, group_ids: Sequence[str]) -> list[GroupRow]:
        """Returns these groups without their bodies, in order, each once.

        Raises:
            NotFoundError: a group does not exist or is no longer kept.
        """

    async def list_groups(self, query: GroupQuery, cursor: str, limit: int) -> Page:
        """Returns a page of kept groups; see `listing.page_of`. Raises InputError: the cursor does
        not belong to this order.
        """

    async def seen_tasks(
        self, order: TaskOrder, cursor: str, limit: int, *, environment: str = "", text: str = ""
    ) -> TasksPage:
        """Returns a page of tasks, as their kept groups show them; see `SeenTask`. Raises as
        `list_groups`.
        """

    async def reward_counts(self, query: GroupQuery) -> RewardCounts:
        """Counts the kept groups that `query` matches, by mean reward."""


class LookUp(ReadGroups, Protocol):
    """Reads groups, leases, estimates and counts, and waits for changes. Changes nothing."""

    name: str
    """The store's location, without its password."""

    async def pending(self) -> list[GroupRow]:
        """Returns the queued and buffered groups of the shared queue, oldest first."""

    async def damaged(self, limit: int) -> list[DamagedGroup]:
        """Returns up to `limit` groups whose bodies are damaged, latest found first."""

    async def existing(self, group_ids: Sequence[str]) -> set[str]:
        """Returns those of these ids that were ever stored, delivered or not."""

    async def made(self, group_ids: Sequence[str]) -> set[str]:
        """Returns those of these ids that were ever stored or counted as dropped."""

    async def count_with_prefix(self, prefix: str) -> int:
        """Counts the groups ever stored whose id begins with `prefix`."""

    async def count_made(self, prefix: str) -> int:
        """Counts the groups that were stored or counted as dropped, by the prefix of their ids."""

    async def minutes_between(self, start: int, end: int, step: int) -> list[tuple[int, str]]:
        """Returns every `step`-th minute from `start` to `end`, in order, with its numbers."""

    async def find_lease(self, lease_id: str) -> LeaseFacts:
        """Returns a lease. Raises NotFoundError if it does not exist."""

    async def open_leases(self, run: str) -> list[LeaseFacts]:
        """Returns a run's open leases, soonest due first."""

    async def leased_groups(self, run: str, limit: int) -> tuple[list[LeasedGroup], int]:
        """Returns up to `limit` groups in a run's open leases, oldest lease first, and how many
        there are. Raises NotFoundError if the run does not exist.
        """

    async def task_estimates(
        self, after: int, limit: int, *, env: str | None = None, split: Split | None = None
    ) -> list[EstimateRow]:
        """Returns up to `limit` task estimates after number `after`, in the order in which the
        tasks were first scored.
        """

    async def estimates_of(
        self, env: str, split: Split, task_ids: Sequence[str]
    ) -> dict[str, Estimate]:
        """Returns the estimates by task id, for those of these tasks that were ever scored."""

    @property
    def stored_bytes(self) -> int:
        """Size of the bodies of all groups that are kept, as stored."""

    def most_waiting(self) -> int:
        """Returns the number of groups that wait, or are leased, in the longest queue from which a
        run draws.
        """

    async def most_waiting_bytes(self) -> int:
        """Like `most_waiting`, for the size of the bodies in the largest queue."""

    async def counts(self) -> dict[GroupState, int]:
        """Returns the number of groups in each state in the shared queue, also removed ones."""

    async def depths(self) -> dict[str, int]:
        """Returns for each open run how many groups are queued or leased for it."""

    async def backlogs(self) -> dict[str, Backlog]:
        """Returns for each open run what waits for it, for how long, and what it has leased."""

    async def counters(self) -> dict[str, int]:
        """Returns totals since the store was created: `expired` (leases), `nacked` and `nacked:
        REASON` (leases), `set_aside: REASON`, `rewound`, `stale_dropped` (deliveries), `removed`,
        `damaged` (groups); and since it was opened `conflicting_puts`: puts whose id existed with
        another body (the first body stays). Zero counters are missing.
        """

    @property
    def last_seq(self) -> int:
        """`seq` of the group that arrived last, as of the last commit; numbers have no gaps."""

    @property
    def tallies(self) -> Mapping[tuple[str, str, GroupState], int]:
        """Number of deliveries by (queue, environment, state), as of the last commit."""

    @property
    def open_runs(self) -> Mapping[str, KnownRun]:
        """The open runs by name, as of the last commit."""

    @property
    def statistics(self) -> StoreStatistics:
        """Counts of commits and leases since the store was opened."""

    @property
    def waiting_operations(self) -> int:
        """Number of changes that wait for the next commit."""

    @property
    def disk_problem(self) -> str:
        """Why new groups may be refused for lack of disk space; "" if there is space."""

    def may_hold_older(self, version: int) -> bool:
        """Returns whether groups older than this policy version may be queued."""

    def hungry_for(self, run: str) -> int:
        """Returns the `min_groups` of the run's latest lease if too little was queued, otherwise
        0.
        """

    @property
    def changes(self) -> int:
        """A number that grows whenever a group is queued (put, moved, given back, expired, rewound)
        or a run is closed.
        """

    async def wait_for_change(
        self, timeout: float | None = None, *, since: int | None = None
    ) -> int:
        """Waits at most `timeout` seconds until `changes` differs from `since` (None: from its
        value now); returns `changes`. Closing the store wakes everybody as well.

        To miss nothing, read `changes` before looking at the store, and pass that value as `since`.
        """

    @property
    def activity(self) -> int:
        """A number that grows with every change of a delivery or a run."""

    async def wait_for_activity(self, timeout: float | None, *, since: int) -> int:
        """Like `wait_for_change`, for `activity`."""


class GroupStore(PutGroups, LeaseGroups, ManageRuns, LookUp, Protocol):
    """A complete store: what the server, the API and the runners need."""


if TYPE_CHECKING:

    def _is_a_store(store: Store) -> GroupStore:
        """Lets mypy check that `Store` implements the interface."""
        return store
