"""The table of alarms. A rule is a pure function of the situation: it yields what is wrong now."""

from __future__ import annotations

from typing import Final

import structlog

from . import flow, rewards
from .situation import Finding, Rule, Situation

_log = structlog.get_logger("envserver.alarms")

RULES: Final = (
    Rule("no_trainer", "no trainer leases, while groups wait", flow.no_trainer),
    Rule("calls_paused", "a trainer paused model calls and does not resume", flow.calls_paused),
    Rule("rollouts_hang", "rollouts run, and none ends", flow.rollouts_hang),
    Rule("rollouts_lost", "rollouts are lost, not by the model's fault", flow.rollouts_lost),
    Rule("rollouts_cut", "rollouts end at a limit, or answers are cut", flow.rollouts_cut),
    Rule("conversations_split", "conversations become a row a call", flow.conversations_split),
    Rule("stale_groups", "groups are dropped as stale", flow.stale_groups),
    Rule("workers_die", "worker processes die", flow.workers_die),
    Rule("runners_silent", "runners on other machines are silent", flow.runners_silent),
    Rule("engine_down", "the engine or a replica does not answer", flow.engine_down),
    Rule("engines_unused", "engines get no calls", flow.engines_unused),
    Rule("old_weights", "the engine lost the published weights", flow.old_weights),
    Rule("disk_full", "the disk of the store is full, or soon", flow.disk_full),
    Rule("store_slow", "commits of the store take long", flow.store_slow),
    Rule("reward_fell", "the reward fell", rewards.reward_fell),
    Rule("longer_answers", "answers grow longer, the reward does not", rewards.longer_answers),
    Rule(
        "equal_rewards",
        "rewards in groups are equal (also reward_always_lowest, reward_always_highest), or "
        "rollouts say the same (same_answers)",
        rewards.alike_groups,
    ),
    Rule("untrained_tokens", "flags keep tokens from training", rewards.untrained_tokens),
    Rule("logprobs_differ", "the audit finds other logprobs", rewards.logprobs_differ),
)

NAMES: Final = (
    *(rule.name for rule in RULES),
    *("reward_always_lowest", "reward_always_highest", "same_answers"),
)

NEEDED: Final = frozenset(
    f"envserver_{name}"
    for name in (
        *("groups", "leases_total", "paused", "calls_waiting", "rollouts_running"),
        *("rollouts_total", "failed_attempts_total", "rollout_seconds_sum"),
        *("rollout_seconds_count", "worker_deaths_total", "flags_total", "groups_delivered_total"),
        *("groups_dropped_total", "groups_alike_total", "groups_equal_total", "store_events_total"),
        *("replica_breaker", "engines", "policy_version", "joined_environments", "store_waiting"),
        *("store_commit_seconds_sum", "store_commit_seconds_count", "reward_sum", "reward_count"),
        *("engine_seconds_count", "tokens_total", "untrained_share", "untrained_tokens_total"),
    )
)
"""Names of the samples that rules read."""


def findings(at: Situation, failed: set[str]) -> list[Finding]:
    """Returns everything that is wrong now, without the alarms that are off.

    Args:
        failed: names of rules that raised; one that does is logged once and keeps no other from
            speaking.
    """
    found: list[Finding] = []
    for rule in RULES:
        try:
            found += rule.find(at)
        except Exception as error:  # noqa: BLE001 (a bug of one rule)
            if rule.name not in failed:
                failed.add(rule.name)
                _log.error("alarm_rule_failed", rule=rule.name, error=repr(error))
    return [one for one in found if one.name not in at.config.off]
