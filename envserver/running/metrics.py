"""Prometheus metrics of `serve` and `run-api`; `docs/observing.md` lists their names.

Nothing is counted twice: what a part counts already is read from it when `/metrics` is requested.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import pstdev
from typing import TYPE_CHECKING, Final, get_args

import msgspec
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
    single,
)

if TYPE_CHECKING:
    from ..models.engine import MeasuredEngine
    from ..rollouts.group import RolloutContext
    from ..rollouts.task_stream import TaskStream
    from ..store import Store


_REWARDS: Final = tuple(round(0.1 * tenth, 1) for tenth in range(11))
_DEVIATIONS: Final = tuple(round(0.1 * tenth, 1) for tenth in range(6))
_TURNS: Final = (1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 32.0, 64.0, 128.0)
_VERSIONS: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
_MOST_RUNS: Final = 100
_MOST_REASONS: Final = 20
"""Trainers may send any text as a reason."""
_MOST_TALLIES: Final = 500
_BREAKER: Final = {"closed": 0.0, "half_open": 1.0, "open": 2.0}


class RolloutNumbers:
    def __init__(self) -> None:
        self._ends = Counts()
        self._failures = Counts()
        self._rewards = Labelled(_REWARDS)
        self._points = Counts()
        self._deviations = Labelled(_DEVIATIONS)
        self._seconds = Labelled(SECONDS)
        self._turns = Labelled(_TURNS)
        self._tokens = Counts()
        self._costs = Counts()
        self._delivered = Counts()
        self._dropped = Counts()
        self._equal = Counts()
        self._alike = Counts()
        self._flags = Counts()
        self._untrained = Counts()

    def observer(self, environment: str) -> Observer:
        self._delivered.add((environment,), 0)
        return partial(self._observe, environment)

    def _observe(self, environment: str, event: Event) -> None:
        if isinstance(event, RolloutScored):
            self._scored(environment, event)
        elif isinstance(event, RolloutFailed):
            kind = event.failure.kind
            self._failures.add((environment, kind))
            if event.final:
                self._ends.add((environment, "stale" if kind == "stale" else "lost"))
        elif isinstance(event, GroupDelivered):
            self._delivered.add((environment,))
            trajectories = event.group.trajectories
            self._add_alike(environment, alike(event.group))
            for trajectory in trajectories:
                self._rewarded(environment, trajectory.score)
            rewards = [one.score.reward for one in trajectories if one.score.reward is not None]
            if len(rewards) > 1:
                self._deviations.add((environment,), pstdev(rewards))
                self._equal.add((environment,), all_equal(trajectories))
        elif isinstance(event, GroupDropped):
            self._dropped.add((environment, event.reason))
            self._equal.add((environment,), event.reason == "zero_variance")
            self._add_alike(environment, event.alike)

    def _add_alike(self, environment: str, found: Sequence[str]) -> None:
        for what in found:
            self._alike.add((environment, what))

    def _scored(self, environment: str, event: RolloutScored) -> None:
        end = f"limit_{event.limit}" if event.limit else "scored"
        self._ends.add((environment, end if event.scorable else "unscorable"))
        self._tokens.add((environment, "prompt"), event.prompt_tokens)
        self._tokens.add((environment, "completion"), event.completion_tokens)
        self._seconds.add((environment,), event.seconds)
        self._turns.add((environment,), event.turns)
        cost = event.usage.cost if event.usage is not None else None
        if cost is not None and cost.models:
            self._costs.add((environment, cost.currency), sum(cost.models.values()))
        for flag in event.flags:
            self._flags.add((flag,))
        for flag, count in event.untrained.by_flag.items():
            self._untrained.add((environment, flag), count)

    def _rewarded(self, environment: str, score: Score) -> None:
        """A score can name declared agents only."""
        if score.reward is None:
            return
        for agent, reward in (score.rewards or {"": score.reward}).items():
            self._rewards.add((environment, agent), reward)
            self._points.add((environment, agent, "positive"), max(reward, 0.0))
            self._points.add((environment, agent, "negative"), max(-reward, 0.0))

    async def families(self) -> Iterable[Metric]:
        of = ("environment",)
        return [
            counter("envserver_rollouts", "Finished rollouts by outcome", (*of, "end"), self._ends),
            counter(
                "envserver_failed_attempts", "Failed attempts", (*of, "kind"), self._failures
            ),
            histogram(
                "envserver_reward", "Rewards in delivered groups", (*of, "agent"), self._rewards
            ),
            counter(
                "envserver_reward_points", "Sum of the positive, or of the negative, rewards in "
                "delivered groups", (*of, "agent", "sign"), self._points,
            ),
            histogram(
                "envserver_group_deviation", "Standard deviation of the rewards of a delivered "
                "group", of, self._deviations,
            ),
            counter(
                "envserver_groups_equal", "Groups, delivered or not, whose rewards are all equal",
                of, self._equal,
            ),
            histogram("envserver_rollout_seconds", "From start to result", of, self._seconds),
            histogram("envserver_rollout_turns", "Turns of a scored rollout", of, self._turns),
            counter("envserver_tokens", "Tokens of scored rollouts", (*of, "kind"), self._tokens),
            counter(
                "envserver_tokens_cost", "Cost of the tokens of scored rollouts",
                (*of, "currency"), self._costs,
            ),
            counter("envserver_groups_delivered", "Groups made durable", of, self._delivered),
            counter(
                "envserver_groups_dropped", "Groups not delivered", (*of, "reason"), self._dropped
            ),
            counter(
                "envserver_groups_alike",
                "Groups whose rollouts all say the same, or whose rewards are all at a bound",
                (*of, "alike"), self._alike,
            ),
            counter(
                "envserver_flags", "Rollouts by flag of their tokens", ("flag",),
                self._flags,
            ),
            counter(
                "envserver_untrained_tokens", "Sampled tokens that flags mask or drop",
                (*of, "flag"), self._untrained,
            ),
        ]  # fmt: skip


class CurriculumNumbers:
    def __init__(self, curricula: Mapping[str, TaskStream]) -> None:
        self._curricula = curricula

    async def families(self) -> Iterable[Metric]:
        of, each = ("environment",), sorted(self._curricula.items())
        shares = [(name, one.solved_share()) for name, one in each]
        return [
            counter(
                "envserver_groups_again", "Groups of tasks re-sampled by the curriculum", of,
                [((name,), float(one.came_again)) for name, one in each],
            ),
            counter(
                "envserver_tasks_passed_over", "Tasks skipped as solved too often or never", of,
                [((name,), float(one.passed_over)) for name, one in each],
            ),
            gauge(
                "envserver_tasks_remembered", "Tasks that the curriculum may re-sample", of,
                [((name,), float(one.remembered)) for name, one in each],
            ),
            gauge(
                "envserver_tasks_solved_share",
                "Share of recently scored tasks solved more often than not", of,
                [((name,), share) for name, share in shares if share is not None],
            ),
        ]  # fmt: skip


class EngineNumbers:
    def __init__(self, engine: MeasuredEngine, gate: Gate, version: Callable[[], int]) -> None:
        self._engine = engine
        self._gate = gate
        self._version = version

    async def families(self) -> Iterable[Metric]:
        engine, gate = self._engine, self._gate
        replicas = engine.replicas()
        standings = Counter(one.standing for one in replicas)
        of = ("replica",)
        return [
            histogram(
                "envserver_engine_seconds", "Duration of answered calls", ("path",),
                engine.seconds,
            ),
            counter("envserver_engine_errors", "Calls that failed", ("kind",), engine.errors),
            gauge("envserver_engine_calls", "Calls not answered yet", (), single(engine.in_flight)),
            gauge(
                "envserver_calls_at_engine", "Agents' calls in flight", (), single(gate.in_flight)
            ),
            gauge("envserver_calls_waiting", "Calls held by a pause", (), single(gate.waiting)),
            gauge("envserver_paused", "1 while calls are paused", (), single(gate.paused)),
            gauge(
                "envserver_policy_version", "Last published version, -1 before any", (),
                single(self._version()),
            ),
            gauge(
                "envserver_replica_calls", "Calls in flight at this replica", of,
                [((one.base_url,), float(one.in_flight)) for one in replicas],
            ),
            gauge(
                "envserver_replica_limit", "Maximum number of calls in flight at this replica", of,
                [((one.base_url,), float(one.limit)) for one in replicas],
            ),
            gauge(
                "envserver_replica_waiting", "Calls waiting for this replica", of,
                [((one.base_url,), float(one.waiting)) for one in replicas],
            ),
            gauge(
                "envserver_replica_breaker", "0: used, 1: on trial, 2: set aside", of,
                [((one.base_url,), _BREAKER[one.state]) for one in replicas],
            ),
            gauge(
                "envserver_replica_standing", "1 for how this replica is used",
                (*of, "standing"),
                [((one.base_url, one.standing), 1.0) for one in replicas],
            ),
            gauge(
                "envserver_replica_version", "Policy version of its weights, -1 if not known", of,
                [((one.base_url,), float(self._version_of(one))) for one in replicas],
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
    def __init__(self, parts: Sequence[RolloutContext]) -> None:
        self._parts = parts

    async def families(self) -> Iterable[Metric]:
        services: Counter[str] = Counter()
        added, alive, running, restarts, deaths, sandboxes = [], [], [], [], [], []
        connections, refused, untrained = [], [], []
        egress, egress_bytes = [], []
        for one in self._parts:
            name, seen = one.environment.name, one.pool.snapshot()
            services.update(one.proxy.services.counts())
            added.append(((name,), one.proxy.added_seconds))
            alive.append(((name,), float(seen["processes"])))
            running.append(((name,), float(seen["running"])))
            restarts.append(((name,), float(seen["restarts"])))
            deaths += [((name, kind), float(n)) for kind, n in sorted(seen["deaths"].items())]
            sandboxes.append(((name,), float(one.proxy.open_sandboxes)))
            untrained.append(((name,), one.ceiling.window.share))
            totals = one.proxy.totals
            connections.append(((name,), float(totals.connections)))
            refused += [((name, bound), float(n)) for bound, n in sorted(totals.refused.items())]
            if (out := one.proxy.egress) is not None:
                egress += [((name, end), float(n)) for end, n in sorted(out.counts.items())]
                egress_bytes.append(((name,), float(out.bytes)))
        of = ("environment",)
        return [
            histogram(
                "envserver_proxy_added_seconds",
                "Proxy time of answered calls, without the engine's (no streams)", of, added,
            ),
            gauge("envserver_proxy_connections", "Open connections of agents", of, connections),
            counter(
                "envserver_proxy_refused",
                "What was refused to agents over a bound of one rollout", (*of, "bound"), refused,
            ),
            counter(
                "envserver_egress_requests",
                "Requests of agents to hosts outside by how they ended", (*of, "end"), egress,
            ),
            counter(
                "envserver_egress_bytes", "Bytes to and from hosts outside", of, egress_bytes
            ),
            gauge(
                "envserver_untrained_share",
                "Share of the sampled tokens of the latest groups that flags mask or drop",
                of, untrained,
            ),
            gauge("envserver_workers", "Worker processes alive", of, alive),
            gauge("envserver_rollouts_running", "Rollouts in workers", of, running),
            counter("envserver_worker_restarts", "Workers replaced", of, restarts),
            counter("envserver_worker_deaths", "Worker deaths by kind", (*of, "kind"), deaths),
            gauge("envserver_sandboxes", "Open sandboxes of agents", of, sandboxes),
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
            gauge(
                "envserver_store_waiting", "Operations waiting for a commit", (),
                single(store.waiting_operations),
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
