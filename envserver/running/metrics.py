"""Prometheus metrics of `serve` and `run-api`; `docs/observing.md` lists their names.

Nothing is counted twice: what a part counts already is read from it when `/metrics` is requested.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import pstdev
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec
import structlog
from envserver_records.costs import Cost, added
from envserver_records.records import Group, Usage
from envserver_records.tasks import UNIT_RANGE, RewardRange, Score
from prometheus_client.core import Metric

from ..models.engine import ReplicaHealth
from ..models.routing import Standing
from ..proxy.gate import Gate
from ..rollouts.events import (
    Event,
    GroupDelivered,
    GroupDropped,
    Observer,
    RolloutFailed,
    RolloutScored,
)
from ..rollouts.policy import Untrained, alike, all_equal, summed
from ..store import Lease
from ..store.rows import GroupState, StoreStatistics
from ..telemetry.numbers import (
    OTHER,
    SECONDS,
    Counts,
    Distribution,
    Labelled,
    by_key,
    counter,
    gauge,
    histogram,
    level,
    of_each,
)

if TYPE_CHECKING:
    from ..models.engine import MeasuredEngine
    from ..rollouts.group import RolloutContext
    from ..rollouts.task_stream import TaskStream
    from ..store import Store


_REWARDS: Final = tuple(round(0.1 * tenth, 1) for tenth in range(11))
_TURNS: Final = (1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 32.0, 64.0, 128.0)
_VERSIONS: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
_MOST_RUNS: Final = 100
_MOST_REASONS: Final = 20
"""Trainers may send any text as a reason."""
_MOST_TALLIES: Final = 500
_BREAKER: Final = {"closed": 0.0, "half_open": 1.0, "open": 2.0}


_OF: Final = ("environment",)
_COUNTED: Final = {
    "rollouts": ("Finished rollouts by outcome", (*_OF, "end")),
    "failed_attempts": ("Failed attempts", (*_OF, "kind")),
    "reward_points": (
        "Sum of the positive, or of the negative, rewards in delivered groups",
        (*_OF, "agent", "sign"),
    ),
    "groups_equal": ("Groups, delivered or not, whose rewards are all equal", _OF),
    "tokens": ("Tokens of scored rollouts", (*_OF, "kind")),
    "tokens_cost": ("Cost of the tokens of scored rollouts", (*_OF, "currency")),
    "groups_delivered": ("Groups made durable", _OF),
    "groups_dropped": ("Groups not delivered", (*_OF, "reason")),
    "groups_alike": (
        "Groups whose rollouts all say the same, or whose rewards are all at a bound",
        (*_OF, "alike"),
    ),
    "flags": ("Rollouts by flag of their tokens", ("flag",)),
    "untrained_tokens": ("Sampled tokens that flags mask or drop", (*_OF, "flag")),
}
_SPREAD: Final = {
    "reward": ("Rewards in delivered groups", (*_OF, "agent"), _REWARDS),
    "group_deviation": (
        "Standard deviation of the rewards of a delivered group",
        _OF,
        tuple(round(0.1 * tenth, 1) for tenth in range(6)),
    ),
    "rollout_seconds": ("From start to result", _OF, SECONDS),
    "rollout_turns": ("Turns of a scored rollout", _OF, _TURNS),
}


class RolloutNumbers:
    """Counts over the events of rollouts, by environment."""

    def __init__(self) -> None:
        self._counts = {name: Counts() for name in _COUNTED}
        self._spread = {name: Labelled(bounds) for name, (*_, bounds) in _SPREAD.items()}

    def observer(self, environment: str) -> Observer:
        self._add("groups_delivered", environment, count=0)
        return partial(self._observe, environment)

    def _add(self, name: str, *labels: str, count: float = 1) -> None:
        self._counts[name].add(labels, count)

    def _observe(self, environment: str, event: Event) -> None:
        if isinstance(event, RolloutScored):
            self._scored(environment, event)
        elif isinstance(event, RolloutFailed):
            kind = event.failure.kind
            self._add("failed_attempts", environment, kind)
            if event.final:
                self._add("rollouts", environment, "stale" if kind == "stale" else "lost")
        elif isinstance(event, GroupDelivered):
            self._add("groups_delivered", environment)
            trajectories = event.group.trajectories
            self._add_alike(environment, alike(event.group))
            for trajectory in trajectories:
                self._rewarded(environment, trajectory.score)
            rewards = [one.score.reward for one in trajectories if one.score.reward is not None]
            if len(rewards) > 1:
                self._spread["group_deviation"].add((environment,), pstdev(rewards))
                self._add("groups_equal", environment, count=all_equal(trajectories))
        elif isinstance(event, GroupDropped):
            self._add("groups_dropped", environment, event.reason)
            self._add("groups_equal", environment, count=event.reason == "zero_variance")
            self._add_alike(environment, event.alike)

    def _add_alike(self, environment: str, found: Sequence[str]) -> None:
        for what in found:
            self._add("groups_alike", environment, what)

    def _scored(self, environment: str, event: RolloutScored) -> None:
        end = f"limit_{event.limit}" if event.limit else "scored"
        self._add("rollouts", environment, end if event.scorable else "unscorable")
        self._add("tokens", environment, "prompt", count=event.prompt_tokens)
        self._add("tokens", environment, "completion", count=event.completion_tokens)
        self._spread["rollout_seconds"].add((environment,), event.seconds)
        self._spread["rollout_turns"].add((environment,), event.turns)
        cost = event.usage.cost if event.usage is not None else None
        if cost is not None and cost.models:
            total = sum(cost.models.values())
            self._add("tokens_cost", environment, cost.currency, count=total)
        for flag in event.flags:
            self._add("flags", flag)
        for flag, count in event.untrained.by_flag.items():
            self._add("untrained_tokens", environment, flag, count=count)

    def _rewarded(self, environment: str, score: Score) -> None:
        """A score can name declared agents only."""
        if score.reward is None:
            return
        for agent, reward in (score.rewards or {"": score.reward}).items():
            self._spread["reward"].add((environment, agent), reward)
            self._add("reward_points", environment, agent, "positive", count=max(reward, 0.0))
            self._add("reward_points", environment, agent, "negative", count=max(-reward, 0.0))

    async def families(self) -> Iterable[Metric]:
        counts = [
            counter(f"envserver_{name}", words, labels, self._counts[name])
            for name, (words, labels) in _COUNTED.items()
        ]
        spread = [
            histogram(f"envserver_{name}", words, labels, self._spread[name])
            for name, (words, labels, _) in _SPREAD.items()
        ]
        return [*counts, *spread]


class CurriculumNumbers:
    def __init__(self, curricula: Mapping[str, TaskStream]) -> None:
        self._curricula = curricula

    async def families(self) -> Iterable[Metric]:
        each = sorted(self._curricula.items())
        known = [(name, share) for name, one in each if (share := one.solved_share()) is not None]
        of = "environment"
        return [
            of_each(counter, "envserver_groups_again",
                    "Groups of tasks re-sampled by the curriculum", of, each,
                    lambda one: one.came_again),
            of_each(counter, "envserver_tasks_passed_over",
                    "Tasks skipped as solved too often or never", of, each,
                    lambda one: one.passed_over),
            of_each(gauge, "envserver_tasks_remembered",
                    "Tasks that the curriculum may re-sample", of, each,
                    lambda one: one.remembered),
            of_each(gauge, "envserver_tasks_solved_share",
                    "Share of recently scored tasks solved more often than not", of, known, float),
        ]  # fmt: skip


class EngineNumbers:
    """Metrics of the engine that all rollouts use, and of its gate."""

    def __init__(self, engine: MeasuredEngine, gate: Gate, version: Callable[[], int]) -> None:
        self._engine = engine
        self._gate = gate
        self._version = version

    async def families(self) -> Iterable[Metric]:
        engine, gate = self._engine, self._gate
        replicas = [(one.base_url, one) for one in engine.replicas()]
        standings = Counter(one.standing for _, one in replicas)

        def each(name: str, words: str, value: Callable[[ReplicaHealth], float]) -> Metric:
            return of_each(gauge, f"envserver_replica_{name}", words, "replica", replicas, value)

        return [
            histogram(
                "envserver_engine_seconds", "Duration of answered calls", ("path",), engine.seconds
            ),
            counter("envserver_engine_errors", "Calls that failed", ("kind",), engine.errors),
            level("envserver_engine_calls", "Calls not answered yet", engine.in_flight),
            level("envserver_calls_at_engine", "Agents' calls in flight", gate.in_flight),
            level("envserver_calls_waiting", "Calls held by a pause", gate.waiting),
            level("envserver_paused", "1 while calls are paused", gate.paused),
            level(
                "envserver_policy_version", "Last published version, -1 before any", self._version()
            ),
            each("calls", "Calls in flight at this replica", lambda one: one.in_flight),
            each("limit", "Maximum number of calls in flight at this replica",
                 lambda one: one.limit),
            each("waiting", "Calls waiting for this replica", lambda one: one.waiting),
            each("breaker", "0: used, 1: on trial, 2: set aside", lambda one: _BREAKER[one.state]),
            each("version", "Policy version of its weights, -1 if not known", self._version_of),
            gauge(
                "envserver_replica_standing", "1 for how this replica is used",
                ("replica", "standing"), [((url, one.standing), 1.0) for url, one in replicas],
            ),
            gauge(
                "envserver_engines", "Replicas by how they are used", ("standing",),
                [((name,), float(standings[name])) for name in get_args(Standing)],
            ),
        ]  # fmt: skip

    def _version_of(self, replica: ReplicaHealth) -> int:
        version = self._version() if replica.follows else replica.version
        return -1 if version is None else version


class PartsNumbers:
    """Metrics of each environment's proxy, workers, sandboxes and services."""

    def __init__(self, parts: Sequence[RolloutContext]) -> None:
        self._parts = parts

    async def families(self) -> Iterable[Metric]:
        of = "environment"
        parts = [(one.environment.name, one) for one in self._parts]
        pools = [(name, one.pool.snapshot()) for name, one in parts]
        outside = [(name, out) for name, one in parts if (out := one.proxy.egress) is not None]
        services: Counter[str] = Counter()
        for _, one in parts:
            services.update(one.proxy.services.counts())

        def kinds(
            name: str, words: str, label: str, counts: Iterable[tuple[str, Mapping[Any, int]]]
        ) -> Metric:
            values = [
                ((environment, kind), float(count))
                for environment, by_kind in counts
                for kind, count in sorted(by_kind.items())
            ]
            return counter(f"envserver_{name}", words, (of, label), values)

        return [
            histogram(
                "envserver_proxy_added_seconds",
                "Proxy time of answered calls, without the engine's (no streams)", (of,),
                [((name,), one.proxy.added_seconds) for name, one in parts],
            ),
            of_each(gauge, "envserver_proxy_connections", "Open connections of agents", of, parts,
                    lambda one: one.proxy.totals.connections),
            kinds("proxy_refused", "What was refused to agents over a bound of one rollout",
                  "bound", ((name, one.proxy.totals.refused) for name, one in parts)),
            kinds("egress_requests", "Requests of agents to hosts outside by how they ended",
                  "end", ((name, out.counts) for name, out in outside)),
            of_each(counter, "envserver_egress_bytes", "Bytes to and from hosts outside", of,
                    outside, lambda out: out.bytes),
            of_each(gauge, "envserver_untrained_share",
                    "Share of the sampled tokens of the latest groups that flags mask or drop",
                    of, parts, lambda one: one.ceiling.window.share),
            of_each(gauge, "envserver_workers", "Worker processes alive", of, pools,
                    lambda pool: pool["processes"]),
            of_each(gauge, "envserver_rollouts_running", "Rollouts in workers", of, pools,
                    lambda pool: pool["running"]),
            of_each(counter, "envserver_worker_restarts", "Workers replaced", of, pools,
                    lambda pool: pool["restarts"]),
            kinds("worker_deaths", "Worker deaths by kind", "kind",
                  ((name, pool["deaths"]) for name, pool in pools)),
            of_each(gauge, "envserver_sandboxes", "Open sandboxes of agents", of, parts,
                    lambda one: one.proxy.open_sandboxes),
            counter(
                "envserver_services", "Counters of the environments' services", ("count",),
                by_key(services),
            ),
        ]  # fmt: skip


class Deliveries:
    """Metrics of the store. `version`: the current policy version, -1 if unknown."""

    def __init__(self, store: Store, version: Callable[[], int]) -> None:
        self._store = store
        self._version = version
        self._staleness = Distribution(_VERSIONS)
        store.statistics.on_lease = self._leased

    def _leased(self, lease: Lease) -> None:
        version = self._version()
        for row in lease.groups:
            if version >= 0 and row.policy_version >= 0:
                self._staleness.add(max(0, version - row.policy_version))

    async def families(self) -> Iterable[Metric]:
        store, seen = self._store, self._store.statistics
        counters = dict(await store.counters())
        nacks, set_aside = (_by_reason(counters, event) for event in ("nacked", "set_aside"))
        leases = {**seen.leases, "expired": counters.get("expired", 0)}
        return [
            *_arrived(seen),
            gauge(
                "envserver_deliveries", "Groups by queue, environment and state",
                ("queue", "environment", "state"), _tallies(store.tallies),
            ),
            gauge(
                "envserver_groups", "Groups of the shared queue by state", ("state",),
                by_key({str(state): n for state, n in (await store.counts()).items()}),
            ),
            gauge(
                "envserver_queue_depth", "Groups queued or leased for each open run", ("run",),
                by_key(most(await store.depths())),
            ),
            counter(
                "envserver_leases", "Leases by outcome (expired: since the store was created)",
                ("end",), by_key(leases),
            ),
            counter(
                "envserver_nacks", "Leases given back, by reason", ("reason",),
                by_key(most(nacks, _MOST_REASONS)),
            ),
            counter(
                "envserver_groups_set_aside", "Groups that trainers set aside, by reason",
                ("reason",), by_key(most(set_aside, _MOST_REASONS)),
            ),
            counter(
                "envserver_store_events", "Events counted since the store was created", ("event",),
                by_key(counters),
            ),
            histogram(
                "envserver_staleness_versions", "Versions behind the policy, per leased group",
                (), [((), self._staleness)],
            ),
            histogram(
                "envserver_store_commit_seconds", "From the first statement until durable", (),
                [((), seen.commit_seconds)],
            ),
            histogram(
                "envserver_store_commit_operations", "Operations in one commit", (),
                [((), seen.commit_sizes)],
            ),
            level(
                "envserver_store_waiting", "Operations waiting for a commit",
                store.waiting_operations,
            ),
        ]  # fmt: skip


def _arrived(seen: StoreStatistics) -> Iterator[Metric]:
    of = ("environment",)
    each = [((name,), one) for name, one in sorted(seen.arrived.items())]
    for what, words, values in (
        ("groups", "Groups stored, of this server's rollouts and others'", "groups"),
        ("equal_groups", "Stored groups whose rewards are all equal", "equal"),
        ("tokens", "Sampled tokens in stored groups", "tokens"),
    ):
        counts = [(labels, float(getattr(one, values))) for labels, one in each]
        yield counter(f"envserver_stored_{what}", words, of, counts)
    rewards = [(labels, one.rewards) for labels, one in each]
    yield histogram("envserver_stored_reward", "Rewards in stored groups", of, rewards)


def _by_reason(counters: dict[str, int], event: str) -> dict[str, int]:
    names = [name for name in counters if name.startswith(f"{event}: ")]
    return {name.partition(": ")[2]: counters.pop(name) for name in names}


def _tallies(
    tallies: Mapping[tuple[str, str, GroupState], int],
) -> list[tuple[tuple[str, ...], float]]:
    ranked = sorted(tallies.items(), key=lambda one: (-one[1], one[0]))
    shown: dict[tuple[str, ...], float] = {}
    for number, (labels, count) in enumerate(ranked):
        place = labels if number < _MOST_TALLIES else (OTHER, OTHER, labels[2])
        shown[place] = shown.get(place, 0.0) + count
    return sorted(shown.items())


def most(counts: Mapping[str, int], limit: int = _MOST_RUNS) -> dict[str, float]:
    """Returns the `limit` largest of `counts`, and the sum of the rest as `other`."""
    ranked = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    shown = {name: float(count) for name, count in ranked[:limit]}
    if len(ranked) > limit:
        shown[OTHER] = float(sum(count for _, count in ranked[limit:]))
    return shown


GROUPS_SHOWN = 12
"""First groups that a tally keeps whole, to show them."""
_ALL = 0.999
"""Shares of the range of rewards from here on are shown as full rewards (floats)."""


class Rewards:
    """Statistics of the rewards of delivered groups, in constant memory.

    `none`, `full`: number of rollouts with the lowest reward and of those that solved their task.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.none = 0
        self.full = 0
        self.agents: dict[str, Rewards] = {}
        self._unit = True

    def add_group(self, group: Group) -> None:
        self._unit &= group.reward_range == UNIT_RANGE
        for trajectory in group.trajectories:
            if trajectory.score.reward is not None:
                self._add(trajectory.score.reward, group.reward_range)
            for agent, reward in trajectory.score.rewards.items():
                self.agents.setdefault(agent, Rewards())._add(reward, group.reward_range)

    def _add(self, reward: float, bounds: RewardRange) -> None:
        self.count += 1
        self.total += reward
        full = is_full(reward, bounds)
        self.none += not full and bounds.share(reward) <= 0
        self.full += full

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def __str__(self) -> str:
        between = self.count - self.none - self.full
        least, most = ("0", "1") if self._unit else ("lowest", "solved")
        counts = f"{least}: {self.none}  between: {between}  {most}: {self.full}"
        agents = [f"{agent} {mean_text(own.mean)}" for agent, own in self.agents.items()]
        return "\n".join([counts, *agents])


def is_full(reward: float, bounds: RewardRange) -> bool:
    return bounds.is_solved(reward) or bounds.share(reward) >= _ALL


_MOST_FAILED_GROUPS: Final = 1024


class Tally:
    """Counts over the events of a run; an Observer. Rewards are those of delivered groups."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.groups = 0
        self.rollouts = 0
        self.rewards = Rewards()
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.failures: Counter[str] = Counter()
        self.last_words: dict[str, str] = {}
        """The latest message of each kind of failure, and of each reason to drop a group."""
        self.latest_failure = ""
        self._failed_groups: dict[str, str] = {}
        self.lost = 0
        self.drops: Counter[str] = Counter()
        self.flags: Counter[str] = Counter()
        self.untrained = Untrained()
        """Tokens of all scored rollouts that flags mask or drop."""
        self.first_groups: list[Group] = []
        self.latest_group: Group | None = None
        self.cost: Cost | None = None
        """Cost of all scored rollouts, without the judge; None without known prices."""
        self.sandbox_seconds = 0.0
        self.scoring_seconds = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RolloutScored):
            self.rollouts += 1
            self.completion_tokens += event.completion_tokens
            self.flags.update(event.flags)
            self.untrained = summed((self.untrained, event.untrained))
            if event.usage is not None:
                self._add_usage(event.usage)
        elif isinstance(event, RolloutFailed):
            self.failures[event.failure.kind] += 1
            self.last_words[event.failure.kind] = event.failure.message
            self.latest_failure = event.failure.message
            self._failed_groups[event.group_id] = event.failure.message
            if len(self._failed_groups) > _MOST_FAILED_GROUPS:
                del self._failed_groups[next(iter(self._failed_groups))]
            self.lost += event.final
        elif isinstance(event, GroupDropped):
            self.drops[event.reason] += 1
            if not event.failed:  # else its failed attempts say why
                self.last_words[event.reason] = event.message
        elif isinstance(event, GroupDelivered):
            self._add_group(event.group)

    def failure_of(self, group_id: str) -> str:
        return self._failed_groups.get(group_id, "")

    def _add_usage(self, usage: Usage) -> None:
        if usage.cost is not None and usage.cost.models:
            cost = msgspec.structs.replace(usage.cost, judge=None)
            self.cost = cost if self.cost is None else added((self.cost, cost))
        self.prompt_tokens += usage.prompt_tokens
        self.scoring_seconds += usage.scoring_seconds
        self.sandbox_seconds += usage.sandbox.wall_seconds if usage.sandbox is not None else 0.0

    def costs_line(self) -> str:
        parts = [f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens"]
        if self.sandbox_seconds:
            parts.append(f"{self.sandbox_seconds:.1f} s in sandboxes")
        parts.append(f"{self.scoring_seconds:.1f} s of scoring")
        if self.cost is not None:
            parts.append(f"{self.cost.total:.4f} {self.cost.currency}")
        return f"Took: {', '.join(parts)}"

    def _add_group(self, group: Group) -> None:
        self.groups += 1
        self.latest_group = group
        self.rewards.add_group(group)
        if len(self.first_groups) < GROUPS_SHOWN:
            self.first_groups.append(group)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def line(self) -> str:
        mean = mean_text(self.rewards.mean)
        rate = self.completion_tokens / max(self.seconds, 1e-9)
        parts = [f"reward {mean}", f"{rate:,.0f} tok/s"]
        parts += [f"{kind} {count}" for kind, count in self.failures.most_common(2)]
        parts += [f"{reason} {count}" for reason, count in self.drops.most_common(2)]
        return " · ".join(parts)


def mean_text(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.2f}"


def all_of(*observers: Observer | None) -> Observer:
    """Passes events on to each of the observers, in order."""
    known = [one for one in observers if one is not None]

    def observe(event: Event) -> None:
        for one in known:
            one(event)

    return observe


def warn_of_dropped(tally: Tally, log: structlog.stdlib.BoundLogger) -> Observer:
    def warn(event: Event) -> None:
        if isinstance(event, GroupDropped) and event.failed:
            log.warning(
                "group_dropped",
                group_id=event.group_id,
                reason=event.reason,
                message=event.message,
                latest_failure=tally.failure_of(event.group_id),
            )

    return warn
