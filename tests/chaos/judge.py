"""Compares what producers were told, what the engine said and what trainers were given.

What has to hold: every group that was accepted is, at the end, acknowledged once in each queue;
none comes again after it was acknowledged (unless its trainer went back to an earlier checkpoint);
tokens are those that were posted, or that the engine sampled.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .digests import digest_of_tokens
from .relay import POSTS, Told

Line = dict[str, Any]
_CLOCKS_SECONDS = 0.25
"""By which the server's clock may differ from the trainers'."""


@dataclass
class Verdict:
    """Counts for people, and everything that should not have happened."""

    accepted: int = 0
    acknowledged: int = 0
    given: int = 0
    again_after_a_lease_ended: int = 0
    leases_lost: int = 0
    returns: int = 0
    sampled_runs: int = 0
    faults: list[str] = field(default_factory=list)

    def table(self) -> str:
        names = [name for name in self.__dataclass_fields__ if name != "faults"]
        return "\n".join(f"  {name.replace('_', ' '):28} {getattr(self, name):,}" for name in names)


def judge(
    accepted: Told,
    engine_said: Iterable[list[int]],
    journals: Mapping[str, list[Line]],
    deliveries: Mapping[str, str],
) -> Verdict:
    """What became of the groups.

    Args:
        engine_said: the tokens of each answer.
        journals: of each trainer; deliveries: shared or broadcast, of each.
    """
    verdict = Verdict(accepted=len(accepted.posted) + len(accepted.joined))
    said = {digest_of_tokens(tokens) for tokens in engine_said}
    digests: dict[str, str] = {}
    for run, lines in journals.items():
        _look_at_what_was_given(verdict, run, lines, digests, said, accepted)
    queues: dict[str, list[str]] = defaultdict(list)
    for run, delivery in deliveries.items():
        queues["shared" if delivery == "shared" else run].append(run)
    for queue, runs in queues.items():
        _look_at_queue(verdict, queue, [(run, journals[run]) for run in runs], accepted, digests)
    return verdict


def _look_at_what_was_given(
    verdict: Verdict,
    run: str,
    lines: list[Line],
    digests: dict[str, str],
    said: set[str],
    accepted: Told,
) -> None:
    for line in lines:
        if line["what"] == "lost":
            verdict.leases_lost += 1
        if line["what"] != "given":
            continue
        for group_id, (kind, digest, sampled) in line["groups"].items():
            verdict.given += 1
            known = accepted.sent.get(POSTS if kind == "atropos" else group_id, {digest})
            if digests.setdefault(group_id, digest) != digest or digest not in known:
                verdict.faults.append(f"{run}: {group_id} came with other tokens than were sent")
            verdict.sampled_runs += len(sampled)
            if unknown := [one for one in sampled if one not in said]:
                verdict.faults.append(
                    f"{run}: {group_id} has {len(unknown)} runs that nobody sampled"
                )


def _look_at_queue(
    verdict: Verdict,
    queue: str,
    journals: list[tuple[str, list[Line]]],
    accepted: Told,
    digests: dict[str, str],
) -> None:
    holders: Counter[str] = Counter()
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _, lines in journals:
        holders.update(_acknowledged(lines, spans))
        verdict.returns += sum(line["what"] == "going back" for line in lines)
    verdict.acknowledged += len(holders)
    for group_id, times in holders.items():
        if times > 1:
            verdict.faults.append(f"{queue}: {group_id} is acknowledged {times} times")
    there = Counter(digests[group_id] for group_id in holders)
    for name in (accepted.joined - set(holders)) | (accepted.posted - set(there)):
        verdict.faults.append(f"{queue}: an accepted group ({name}) was never acknowledged")
    for digest in accepted.posted:
        if there[digest] > 1:
            verdict.faults.append(f"{queue}: a post ({digest}) came as {there[digest]} groups")
    seen: set[str] = set()
    for run, lines in journals:
        for line in lines:
            if line["what"] != "given":
                continue
            for group_id in line["groups"]:
                verdict.again_after_a_lease_ended += group_id in seen
                seen.add(group_id)
                for start, end in spans[group_id]:
                    if start + _CLOCKS_SECONDS < line["granted"] < end - _CLOCKS_SECONDS:
                        verdict.faults.append(f"{run}: {group_id} came again after its ack")


def _acknowledged(lines: list[Line], spans: dict[str, list[tuple[float, float]]]) -> list[str]:
    """The groups that a trainer has at the end; adds from when to when it had each to `spans`."""
    given = {line["lease"]: list(line["groups"]) for line in lines if line["what"] == "given"}
    since: dict[str, tuple[int, float]] = {}
    for line in lines:
        if line["what"] == "acked":
            for group_id in given[line["lease"]]:
                since.setdefault(group_id, (line["checkpoint"], line["at"]))
        elif line["what"] in ("going back", "resumed"):
            for group_id, (checkpoint, at) in list(since.items()):
                if checkpoint > line["checkpoint"]:
                    del since[group_id]
                    spans[group_id].append((at, line["at"]))
    for group_id, (_, at) in since.items():
        spans[group_id].append((at, float("inf")))
    return list(since)
