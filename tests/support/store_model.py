"""What the store should do, in dictionaries: no transactions, no indexes, obviously right.

A method does to the model what the store's method of that name does, and returns what that should
return; it raises ConflictError or NotFoundError where that should, having changed nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from envserver_records.errors import ConflictError, NotFoundError

SHARED = "shared"
UNKNOWN = -1
MOVES = {"queued": {"buffered"}, "dropped": {"buffered", "queued"}}


@dataclass
class Group:
    body: bytes
    env: str
    size: int
    tokens: int
    version: int
    kept: bool = True


@dataclass
class Delivery:
    state: str
    lease_id: str | None = None
    settled_at: float | None = None


@dataclass
class Lease:
    run: str
    groups: list[str]
    expires_at: float
    state: str = "open"
    ack: int | None = None
    ended_at: float | None = None


@dataclass
class Run:
    queue: str
    environments: frozenset[str]
    is_open: bool = True
    gone_ack: int = 0
    checkpoints: dict[str, int] = field(default_factory=dict)


@dataclass
class Model:
    """All dictionaries are in the order in which their things came."""

    now: float = 0.0
    groups: dict[str, Group] = field(default_factory=dict)
    queues: dict[str, dict[str, Delivery]] = field(default_factory=lambda: {SHARED: {}})
    leases: dict[str, Lease] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    gone: dict[str, Counter[str]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    acks: int = 0
    conflicting_puts: int = 0

    # What is seen

    def named(self, *states: str, queue: str = SHARED) -> list[str]:
        """Groups in these states, oldest first."""
        there = self.queues[queue]
        return [name for name in self.groups if name in there and there[name].state in states]

    def counts(self) -> Counter[str]:
        there = Counter(delivery.state for delivery in self.queues[SHARED].values())
        return there + self.gone.get(SHARED, Counter())

    def depths(self) -> dict[str, int]:
        return {
            name: sum(
                self.groups[group].env in run.environments or not run.environments
                for group in self.named("queued", "leased", queue=run.queue)
            )
            for name, run in self.runs.items()
            if run.is_open
        }

    def holding(self, queue: str, names: list[str]) -> dict[str, Delivery]:
        there = self.queues[queue]
        if any(name not in there for name in names):
            raise NotFoundError("")
        return there

    # Groups

    def put(self, name: str, group: Group, state: str) -> bool:
        if name in self.groups:
            known = self.groups[name]
            self.conflicting_puts += known.kept and known.body != group.body
            return False
        self.groups[name] = group
        self.queues[SHARED][name] = Delivery(state)
        self.fan_out()
        return True

    def fan_out(self) -> None:
        """Everything that is queued or was delivered is in the queue of each open broadcast run."""
        for run in self.runs.values():
            if run.is_open and run.queue != SHARED:
                for name, delivery in self.queues[SHARED].items():
                    if delivery.state not in ("buffered", "dropped"):
                        self.queues[run.queue].setdefault(name, Delivery("queued"))

    def move(self, names: list[str], target: str) -> None:
        there = self.holding(SHARED, names)
        if any(there[name].state not in MOVES.get(target, ()) for name in names):
            raise ConflictError("")
        for name in names:
            self.set(SHARED, name, target, None)
        if target == "queued":
            self.fan_out()

    def set(self, queue: str, name: str, state: str, lease_id: str | None) -> None:
        settled_at = self.now if state in ("acked", "dropped") else None
        self.queues[queue][name] = Delivery(state, lease_id, settled_at)

    def drop_stale(self, below: int) -> int:
        dropped = 0
        for queue in self.queues:
            for name in self.named("queued", queue=queue):
                if UNKNOWN < self.groups[name].version < below:
                    self.set(queue, name, "dropped", None)
                    dropped += 1
        self.counters["stale_dropped"] += dropped
        return dropped

    def drop_damaged(self, names: list[str], undo: str | None) -> list[str]:
        for queue in self.queues:
            for name in self.named("buffered", "queued", "leased", queue=queue):
                if name in names:
                    lease_id = self.queues[queue][name].lease_id
                    if lease_id in self.leases:
                        self.leases[lease_id].groups.remove(name)
                    self.set(queue, name, "dropped", None)
        if undo in self.leases and self.leases[undo].state == "open":
            self.set_all(self.leases.pop(undo), "queued", None)
        new = [name for name in names if name in self.groups and name not in self.damaged]
        self.damaged += new
        self.counters["damaged"] += len(new)
        return new

    # Runs

    def create_run(self, name: str, delivery: str, environments: Collection[str]) -> None:
        queue = SHARED if delivery == "shared" else name
        known = self.runs.setdefault(name, Run(queue, frozenset(environments)))
        if (known.queue, known.environments) != (queue, frozenset(environments)):
            raise ConflictError("")
        known.is_open = True
        self.queues.setdefault(queue, {})
        self.fan_out()

    def close_run(self, name: str) -> None:
        if self.runs[name].is_open:
            self.revoke(name)
        self.runs[name].is_open = False

    def revoke(self, run: str) -> None:
        for lease in self.leases.values():
            if lease.run == run and lease.state in ("open", "expired"):
                if lease.state == "open":
                    self.set_all(lease, "queued", None)
                self.end(lease, "revoked")

    def rewind(self, name: str, checkpoint: str | None) -> list[str]:
        run = self.runs[name]
        after = 0
        if checkpoint is not None:
            if checkpoint not in run.checkpoints:
                raise NotFoundError("")
            after = run.checkpoints[checkpoint]
            if after < run.gone_ack:
                raise ConflictError("")
        self.revoke(name)
        taken_back: set[str] = set()
        for lease in self.leases.values():
            if lease.run == name and lease.ack is not None and lease.ack > after:
                kept = [group for group in lease.groups if self.groups[group].kept]
                for group in kept:
                    self.set(run.queue, group, "queued", None)
                taken_back |= set(kept)
                self.end(lease, "revoked")
        run.checkpoints = {key: ack for key, ack in run.checkpoints.items() if ack <= after}
        self.counters["rewound"] += len(taken_back)
        return [group for group in self.groups if group in taken_back]

    # Leases

    def choose(
        self,
        name: str,
        *,
        max_groups: int | None = None,
        max_sequences: int | None = None,
        max_tokens: int | None = None,
        min_groups: int = 1,
        environments: Collection[str] | None = None,
        min_version: int | None = None,
    ) -> list[str]:
        """What a lease should hold."""
        run = self.require_open(name)
        self.expire()
        fitting = []
        for group in self.named("queued", queue=run.queue):
            known = self.groups[group]
            is_of_run = not run.environments or known.env in run.environments
            is_wanted = environments is None or known.env in environments
            is_new = min_version is None or known.version in (UNKNOWN, *range(min_version, 100))
            if is_of_run and is_wanted and is_new:
                fitting.append(group)
        if len(fitting) < min_groups:
            return []
        chosen: list[str] = []
        for group in fitting:
            more = [self.groups[name] for name in [*chosen, group]]
            is_too_much = (
                (max_groups is not None and len(more) > max_groups)
                or (max_sequences is not None and sum(g.size for g in more) > max_sequences)
                or (max_tokens is not None and sum(g.tokens for g in more) > max_tokens)
            )
            if chosen and is_too_much:
                break
            chosen.append(group)
        return chosen

    def require_open(self, name: str) -> Run:
        if not self.runs[name].is_open:
            raise ConflictError("")
        return self.runs[name]

    def check_chosen(self, name: str, groups: list[str]) -> None:
        """Whether a lease may hold just these."""
        run = self.require_open(name)
        self.expire()
        there = self.holding(run.queue, groups)
        for group in groups:
            is_of_run = not run.environments or self.groups[group].env in run.environments
            if there[group].state != "queued" or not is_of_run:
                raise ConflictError("")

    def lease(self, lease_id: str, run: str, groups: list[str], seconds: float) -> None:
        self.leases[lease_id] = Lease(run, groups, self.now + seconds)
        self.set_all(self.leases[lease_id], "leased", lease_id)

    def set_all(self, lease: Lease, state: str, lease_id: str | None) -> None:
        for group in lease.groups:
            self.set(self.runs[lease.run].queue, group, state, lease_id)

    def end(self, lease: Lease, state: str, ack: int | None = None) -> None:
        lease.state, lease.ended_at, lease.ack = state, self.now, ack

    def resume(self, lease_id: str) -> Lease:
        """A lease that is open, or expired and still has its claim."""
        if lease_id not in self.leases:
            raise NotFoundError("")
        lease = self.leases[lease_id]
        if lease.state not in ("open", "expired"):
            raise ConflictError("")
        if lease.state == "expired":
            there = self.holding(self.runs[lease.run].queue, lease.groups)
            held = [there[group] for group in lease.groups]
            if any((one.state, one.lease_id) != ("queued", lease_id) for one in held):
                raise ConflictError("")
        return lease

    def ack(self, lease_id: str, checkpoint: str | None) -> None:
        if lease_id not in self.leases or self.leases[lease_id].state != "acked":
            lease = self.resume(lease_id)
            self.acks += 1
            self.set_all(lease, "acked", lease_id)
            self.end(lease, "acked", self.acks)
        lease = self.leases[lease_id]
        if checkpoint is not None:
            known = self.runs[lease.run].checkpoints
            known[checkpoint] = max(known.get(checkpoint, 0), lease.ack or 0)

    def nack(self, lease_id: str, reason: str) -> None:
        if lease_id in self.leases and self.leases[lease_id].state == "nacked":
            return
        lease = self.resume(lease_id)
        self.set_all(lease, "queued", None)
        self.end(lease, "nacked")
        self.counters[f"nacked: {reason}" if reason else "nacked"] += 1

    def set_aside(self, lease_id: str, names: list[str], reason: str) -> None:
        if lease_id not in self.leases:
            raise NotFoundError("")
        queue = self.runs[self.leases[lease_id].run].queue
        there = self.holding(queue, names)
        done = ("dropped", lease_id)
        wanted = [one for one in names if (there[one].state, there[one].lease_id) != done]
        if any(name not in self.leases[lease_id].groups for name in wanted):
            raise ConflictError("")
        if not wanted:
            return
        lease = self.resume(lease_id)
        lease.state, lease.ended_at = "open", None
        self.set_all(lease, "leased", lease_id)
        for name in wanted:
            self.set(queue, name, "dropped", lease_id)
        lease.groups = [name for name in lease.groups if name not in wanted]
        self.counters[f"set_aside: {reason}"] += len(wanted)

    def extend(self, lease_id: str, seconds: float) -> float:
        lease = self.resume(lease_id)
        lease.state, lease.ended_at, lease.expires_at = "open", None, self.now + seconds
        self.set_all(lease, "leased", lease_id)
        return lease.expires_at

    def expire(self) -> set[str]:
        overdue = {
            lease_id: lease
            for lease_id, lease in self.leases.items()
            if lease.state == "open" and lease.expires_at <= self.now
        }
        for lease_id, lease in overdue.items():
            self.set_all(lease, "queued", lease_id)
            self.end(lease, "expired")
        self.counters["expired"] += len(overdue)
        return set(overdue)

    # Retention

    def compact(self, seconds: float) -> int:
        """How many groups it removes."""
        before = self.now - seconds
        removed = [name for name in self.groups if self.may_go(name, before)]
        for name in removed:
            self.groups[name].kept = False
            for queue, there in self.queues.items():
                if name in there:
                    delivery = there.pop(name)
                    state = delivery.state if delivery.settled_at is not None else "dropped"
                    self.gone.setdefault(queue, Counter())[state] += 1
                    if delivery.state == "acked":
                        lease = self.leases[delivery.lease_id or ""]
                        run = self.runs[lease.run]
                        run.gone_ack = max(run.gone_ack, lease.ack or 0)
        ended = [
            lease_id
            for lease_id, lease in self.leases.items()
            if lease.ended_at is not None
            and lease.ended_at <= before
            and not (lease.state == "acked" and any(self.groups[g].kept for g in lease.groups))
        ]
        for lease_id in ended:
            del self.leases[lease_id]
        self.counters["removed"] += len(removed)
        return len(removed)

    def may_go(self, name: str, before: float) -> bool:
        there = {queue: found[name] for queue, found in self.queues.items() if name in found}
        return bool([one for one in there.values() if one.settled_at is not None]) and all(
            self.lets_go(queue, one, before) for queue, one in there.items()
        )

    def lets_go(self, queue: str, delivery: Delivery, before: float) -> bool:
        if delivery.settled_at is None:
            is_drawn_from = queue in {run.queue for run in self.runs.values() if run.is_open} or (
                queue == SHARED
                and (not self.runs or any(run.queue == SHARED for run in self.runs.values()))
            )
            return delivery.state == "queued" and not is_drawn_from
        if delivery.settled_at > before:
            return False
        if delivery.state == "acked":
            lease = self.leases[delivery.lease_id or ""]
            numbers = sorted(self.runs[lease.run].checkpoints.values())
            if numbers:
                return (lease.ack or 0) <= ([0, *numbers])[-2]
        return True
