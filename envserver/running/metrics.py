"""Prometheus metrics of `serve` and `run-api`; `docs/observing.md` lists their names.

Nothing is counted twice: what a part counts already is read from it when `/metrics` is requested.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import pstdev
from typing import TYPE_CHECKING, Final, TypeVar, get_args

import msgspec
import structlog
from envserver_records.costs import Cost, added
from envserver_records.records import Group
from envserver_records.tasks import UNIT_RANGE, RewardRange, Score

from ..models.engine import ReplicaHealth
from ..models.routing import Standing
from ..proxy.gate import Gate
from ..rollouts.events import (
    Event,
    GroupDropped,
    Observer,
    RolloutFailed,
    RolloutScored,
)
from ..rollouts.policy import Untrained, alike, all_equal, summed
from ..store import Lease
from ..store.rows import GroupState
from ..telemetry.measures import Meter, Reading, of_each
from ..telemetry.numbers import OTHER, Distribution

if TYPE_CHECKING:
    from ..models.engine import MeasuredEngine
    from ..rollouts.group import RolloutContext
    from ..rollouts.task_stream import TaskStream
    from ..store import Store


_Key = TypeVar("_Key", str, tuple[str, str, GroupState])
_VERSIONS: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
_MOST_RUNS: Final = 100
_MOST_REASONS: Final = 20
"""Trainers may send any text as a reason."""
_MOST_TALLIES: Final = 500
_BREAKER: Final = {"closed": 0.0, "half_open": 1.0, "open": 2.0}


async def curriculum_numbers(curricula: Mapping[str, TaskStream]) -> Reading:
    solved = {name: curriculum.solved_share() for name, curriculum in curricula.items()}
    return {
        **of_each(
            curricula,
            groups_again=lambda curriculum: curriculum.came_again,
            tasks_passed_over=lambda curriculum: curriculum.passed_over,
            tasks_remembered=lambda curriculum: curriculum.remembered,
        ),
        "tasks_solved_share": {name: share for name, share in solved.items() if share is not None},
    }


async def engine_numbers(engine: MeasuredEngine, gate: Gate, version: Callable[[], int]) -> Reading:
    """Returns the numbers of the engine that all rollouts use, and of its gate."""
    replicas = {replica.base_url: replica for replica in engine.replicas()}
    standings = Counter(replica.standing for replica in replicas.values())

    def version_of(replica: ReplicaHealth) -> int:
        serves = version() if replica.follows else replica.version
        return -1 if serves is None else serves

    return {
        "engine_seconds": engine.seconds,
        "engine_errors": engine.errors,
        "engine_calls": engine.in_flight,
        "calls_at_engine": gate.in_flight,
        "calls_waiting": gate.waiting,
        "paused": gate.paused,
        "policy_version": version(),
        **of_each(
            replicas,
            replica_calls=lambda replica: replica.in_flight,
            replica_limit=lambda replica: replica.limit,
            replica_waiting=lambda replica: replica.waiting,
            replica_breaker=lambda replica: _BREAKER[replica.state],
            replica_version=version_of,
        ),
        "replica_standing": {(url, replica.standing): 1.0 for url, replica in replicas.items()},
        "engines": {standing: standings[standing] for standing in get_args(Standing)},
    }


async def parts_numbers(parts: Sequence[RolloutContext]) -> Reading:
    """Returns the numbers of each environment's proxy, workers, sandboxes and services."""
    proxies = {part.environment.name: part.proxy for part in parts}
    pools = {part.environment.name: part.pool.snapshot() for part in parts}
    services: Counter[str] = Counter()
    for proxy in proxies.values():
        services.update(proxy.services.counts())
    by_kind = of_each(
        proxies,
        proxy_refused=lambda proxy: proxy.totals.refused,
        egress_requests=lambda proxy: {} if proxy.egress is None else proxy.egress.counts,
    ) | of_each(pools, worker_deaths=lambda pool: pool["deaths"])
    return {
        **of_each(
            proxies,
            proxy_added_seconds=lambda proxy: proxy.added_seconds,
            proxy_connections=lambda proxy: proxy.totals.connections,
            sandboxes=lambda proxy: proxy.open_sandboxes,
        ),
        **of_each(
            pools,
            workers=lambda pool: pool["processes"],
            rollouts_running=lambda pool: pool["running"],
            worker_restarts=lambda pool: pool["restarts"],
        ),
        "egress_bytes": {
            name: proxy.egress.bytes for name, proxy in proxies.items() if proxy.egress is not None
        },
        "untrained_share": {part.environment.name: part.ceiling.window.share for part in parts},
        "services": services,
        **{
            name: {(label, kind): n for label, kinds in counts.items() for kind, n in kinds.items()}
            for name, counts in by_kind.items()
        },
    }


class Deliveries:
    """Numbers of the store. `version`: the current policy version, -1 if unknown."""

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

    async def read(self) -> Reading:
        store, seen = self._store, self._store.statistics
        counters = dict(await store.counters())
        nacks, set_aside = (_by_reason(counters, event) for event in ("nacked", "set_aside"))
        return {
            **of_each(
                seen.arrived,
                stored_groups=lambda stored: stored.groups,
                stored_equal_groups=lambda stored: stored.equal,
                stored_tokens=lambda stored: stored.tokens,
                stored_reward=lambda stored: stored.rewards,
            ),
            "deliveries": _tallies(store.tallies),
            "groups": await store.counts(),
            "queue_depth": most(await store.depths()),
            "leases": {**seen.leases, "expired": counters.get("expired", 0)},
            "nacks": most(nacks, _MOST_REASONS),
            "groups_set_aside": most(set_aside, _MOST_REASONS),
            "store_events": counters,
            "staleness_versions": self._staleness,
            "store_commit_seconds": seen.commit_seconds,
            "store_commit_operations": seen.commit_sizes,
            "store_waiting": store.waiting_operations,
        }


def _by_reason(counters: dict[str, int], event: str) -> dict[str, int]:
    names = [name for name in counters if name.startswith(f"{event}: ")]
    return {name.partition(": ")[2]: counters.pop(name) for name in names}


def _tallies(tallies: Mapping[tuple[str, str, GroupState], int]) -> Counter[tuple[str, str, str]]:
    shown: Counter[tuple[str, str, str]] = Counter()
    for number, (labels, count) in enumerate(_ranked(tallies)):
        shown[labels if number < _MOST_TALLIES else (OTHER, OTHER, labels[2])] += count
    return shown


def most(counts: Mapping[str, int], limit: int = _MOST_RUNS) -> Counter[str]:
    """Returns the `limit` largest of `counts`, and the sum of the rest as `other`."""
    shown: Counter[str] = Counter()
    for number, (name, count) in enumerate(_ranked(counts)):
        shown[name if number < limit else OTHER] += count
    return shown


def _ranked(counts: Mapping[_Key, int]) -> list[tuple[_Key, int]]:
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


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


class Tally(Meter):
    """Counts over the events of a run, by environment; an Observer where there is only one. Rewards
    are those of delivered groups."""

    def __init__(self) -> None:
        super().__init__(
            *("rollouts", "failed_attempts", "reward_points", "groups_equal", "groups_alike"),
            *("tokens", "tokens_cost", "groups_delivered", "groups_dropped", "flags"),
            *("untrained_tokens", "reward", "group_deviation", "rollout_seconds", "rollout_turns"),
            "tool_errors",
        )
        self.started = time.monotonic()
        self.rewards = Rewards()
        self.row_lengths = array("Q")
        """Tokens of each delivered row."""
        self.last_words: dict[str, str] = {}
        """The latest message of each kind of failure, and of each reason to drop a group."""
        self.latest_failure = ""
        self._failed_groups: dict[str, str] = {}
        self.untrained = Untrained()
        """Tokens of all scored rollouts that flags mask or drop."""
        self.first_groups: list[Group] = []
        self.latest_group: Group | None = None
        self.cost: Cost | None = None
        """Cost of all scored rollouts, without the judge; None without known prices."""
        self.sandbox_seconds = 0.0
        self.scoring_seconds = 0.0

    def observer(self, environment: str) -> Observer:
        self.add("groups_delivered", environment, value=0)
        return partial(self._observe, environment)

    def __call__(self, event: Event) -> None:
        self._observe("", event)

    def _observe(self, environment: str, event: Event) -> None:
        if isinstance(event, RolloutScored):
            self._scored(environment, event)
        elif isinstance(event, RolloutFailed):
            self._failed(environment, event)
        elif isinstance(event, GroupDropped):
            self.add("groups_dropped", environment, event.reason)
            self.add("groups_equal", environment, value=event.reason == "zero_variance")
            for what in event.alike:
                self.add("groups_alike", environment, what)
            if not event.failed:  # else its failed attempts say why
                self.last_words[event.reason] = event.message
        else:
            self._delivered(environment, event.group)

    def _scored(self, environment: str, event: RolloutScored) -> None:
        end = f"limit_{event.limit}" if event.limit else "scored"
        self.add("rollouts", environment, end if event.scorable else "unscorable")
        self.add("tokens", environment, "prompt", value=event.prompt_tokens)
        self.add("tokens", environment, "completion", value=event.completion_tokens)
        self.add("rollout_seconds", environment, value=event.seconds)
        self.add("rollout_turns", environment, value=event.turns)
        for flag in event.flags:
            self.add("flags", flag)
        for flag, count in event.untrained.by_flag.items():
            self.add("untrained_tokens", environment, flag, value=count)
        self.untrained = summed((self.untrained, event.untrained))
        if (usage := event.usage) is None:
            return
        if usage.cost is not None and usage.cost.models:
            cost = msgspec.structs.replace(usage.cost, judge=None)
            self.add("tokens_cost", environment, cost.currency, value=sum(cost.models.values()))
            self.cost = cost if self.cost is None else added((self.cost, cost))
        self.scoring_seconds += usage.scoring_seconds
        self.sandbox_seconds += usage.sandbox.wall_seconds if usage.sandbox is not None else 0.0

    def _failed(self, environment: str, event: RolloutFailed) -> None:
        failure, kind = event.failure, event.failure.kind
        message = f"{failure.message} {failure.detail.get('place', '')}".strip()
        self.add("failed_attempts", environment, kind)
        if event.final:
            self.add("rollouts", environment, "stale" if kind == "stale" else "lost")
        self.last_words[kind] = self.latest_failure = message
        self._failed_groups[event.group_id] = message
        if len(self._failed_groups) > _MOST_FAILED_GROUPS:
            del self._failed_groups[next(iter(self._failed_groups))]

    def _delivered(self, environment: str, group: Group) -> None:
        self.add("groups_delivered", environment)
        for what in alike(group):
            self.add("groups_alike", environment, what)
        for trajectory in group.trajectories:
            self._rewarded(environment, trajectory.score)
            errors = trajectory.metrics.get("tool_errors", -1.0)
            if errors >= 0:  # an environment may have another metric of that name
                self.add("tool_errors", environment, value=errors)
            self.row_lengths.extend(len(row.tokens) for row in trajectory.sequences)
        rewards = [
            trajectory.score.reward
            for trajectory in group.trajectories
            if trajectory.score.reward is not None
        ]
        if len(rewards) > 1:
            self.add("group_deviation", environment, value=pstdev(rewards))
            self.add("groups_equal", environment, value=all_equal(group.trajectories))
        self.latest_group = group
        self.rewards.add_group(group)
        if len(self.first_groups) < GROUPS_SHOWN:
            self.first_groups.append(group)

    def _rewarded(self, environment: str, score: Score) -> None:
        """A score can name declared agents only."""
        if score.reward is None:
            return
        for agent, reward in (score.rewards or {"": score.reward}).items():
            self.add("reward", environment, agent, value=reward)
            self.add("reward_points", environment, agent, "positive", value=max(reward, 0.0))
            self.add("reward_points", environment, agent, "negative", value=max(-reward, 0.0))

    def _counted(self, name: str) -> Counter[str]:
        """Returns the counts of all environments by the last label."""
        counts: Counter[str] = Counter()
        for labels, count in self.counts(name).items():
            counts[labels[-1]] += int(count)
        return counts

    @property
    def groups(self) -> int:
        return self._counted("groups_delivered").total()

    @property
    def rollouts(self) -> int:
        return self._counted("rollouts").total() - self.lost

    @property
    def lost(self) -> int:
        ends = self._counted("rollouts")
        return ends["lost"] + ends["stale"]

    @property
    def completion_tokens(self) -> int:
        return self._counted("tokens")["completion"]

    @property
    def failures(self) -> Counter[str]:
        return self._counted("failed_attempts")

    @property
    def drops(self) -> Counter[str]:
        return self._counted("groups_dropped")

    @property
    def flags(self) -> Counter[str]:
        return self._counted("flags")

    def failure_of(self, group_id: str) -> str:
        return self._failed_groups.get(group_id, "")

    def costs_line(self) -> str:
        prompt_tokens = self._counted("tokens")["prompt"]
        parts = [f"{prompt_tokens:,} prompt + {self.completion_tokens:,} completion tokens"]
        if self.sandbox_seconds:
            parts.append(f"{self.sandbox_seconds:.1f} s in sandboxes")
        parts.append(f"{self.scoring_seconds:.1f} s of scoring")
        if self.cost is not None:
            parts.append(f"{self.cost.total:.4f} {self.cost.currency}")
        return f"Used: {', '.join(parts)}"

    def lengths_line(self) -> str:
        """Returns how long rows are and how many rollouts ended at limits; "" if it is unknown."""
        lengths, parts = sorted(self.row_lengths), []
        if lengths:
            ranks = {
                share: lengths[math.ceil(share / 100 * len(lengths)) - 1] for share in (50, 90, 99)
            }
            upper = ", ".join(f"{share} % up to {length:,}" for share, length in ranks.items())
            parts.append(f"Tokens per row: {upper}, longest {lengths[-1]:,}")
        ends = self._counted("rollouts").most_common()
        limits = [f"{end[6:]} {n:,}" for end, n in ends if end.startswith("limit_")]
        if limits:
            parts.append(f"ended at a limit: {', '.join(limits)}")
        return "; ".join(parts)

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
    known = [observer for observer in observers if observer is not None]

    def observe(event: Event) -> None:
        for observer in known:
            observer(event)

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
