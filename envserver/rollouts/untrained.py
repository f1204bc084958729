"""How many of the sampled tokens flags keep from training, and a ceiling on their share.

In: the calls and rows of finished rollouts. Out: counts by flag, and why a group is not offered.
What holds: a run whose flags mask or drop more than the declared share of a window's tokens says
so, and offers no further group that is itself over that share.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import structlog
from envserver_records.records import Call
from envserver_records.records import Sequence as Row

from ..tokens.flags import FLAGS, Actions
from ..tokens.versions import flags_of

_log = structlog.get_logger("envserver.untrained")

_REMEDIES: Final = {
    "structured_output_masked": "let agents ask without response_format and a forced tool_choice, "
    "with --tokens.strict_tools drop",
    "undelivered_completion": "raise the agents' timeouts",
    "finish_abort": "pause the engine by drain or keep, not by abort",
    "mixed_versions": "publish less often, or pause by drain",
}
"""Advice for the flags that most often mask tokens."""


class Untrained(msgspec.Struct, frozen=True):
    """Counts of sampled tokens.

    Args:
        sampled: tokens of trained agents, as far as the engine counts them.
        by_flag: those among them that are not trained, by the flag that masks or drops them.
    """

    sampled: int = 0
    by_flag: dict[str, int] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens that are not trained."""
        return sum(self.by_flag.values())

    @property
    def share(self) -> float:
        """Their share of the sampled tokens; 0 if none was sampled."""
        return self.tokens / self.sampled if self.sampled else 0.0


def untrained_of(
    calls: Iterable[Call],
    rows: Iterable[Row],
    flags: Sequence[str],
    actions: Actions,
    *,
    need_exact: bool,
) -> Untrained:
    """Counts the tokens of one rollout.

    Args:
        calls: of its trained agents. Text without token ids does not count, unless it drops the
            rollout.
        flags: of the rollout.
        need_exact: whether a flag can drop the rollout.
    """
    calls = list(calls)
    if need_exact and actions.worst(flags) == "drop":
        sampled = sum(len(call.completion_ids) or call.told_tokens[1] for call in calls)
        dropping = next(flag for flag in flags if actions.of(flag) == "drop")
        return Untrained(sampled, {dropping: sampled} if sampled else {})
    exact = [call for call in calls if call.exact]
    sampled = sum(len(call.completion_ids) for call in exact)
    masked: Counter[str] = Counter()
    for call in exact:
        worst = actions.worst(flags_of(call))
        if worst != "train":
            flag = next(flag for flag in flags_of(call) if actions.of(flag) == worst)
            masked[flag] += len(call.completion_ids)
    left = sampled - sum(int(np.count_nonzero(row.mask)) for row in rows) - masked.total()
    if left > 0:  # `build` masks the older tokens of a row
        masked["mixed_versions"] += left
    return Untrained(sampled, {flag: count for flag, count in masked.items() if count})


def summed(counts: Iterable[Untrained]) -> Untrained:
    """Returns the sum of several counts."""
    sampled, by_flag = 0, Counter[str]()
    for one in counts:
        sampled += one.sampled
        by_flag.update(one.by_flag)
    return Untrained(sampled, dict(by_flag.most_common()))


class UntrainedCeiling:
    """The ceiling of one environment of a run.

    Args:
        most: largest share of untrained tokens; 1: no ceiling.
        groups: number of the latest groups in the window; nothing is judged before there are as
            many.
    """

    def __init__(self, most: float, groups: int) -> None:
        self.most = most
        self._window: deque[Untrained] = deque(maxlen=groups)
        self._was_over = False

    @property
    def window(self) -> Untrained:
        """The counts of the latest groups."""
        return summed(self._window)

    @property
    def is_over(self) -> bool:
        """Whether the window is full and its untrained share exceeds `most`."""
        return len(self._window) == self._window.maxlen and self.window.share > self.most

    def judge(self, group: Untrained) -> str | None:
        """Adds a finished group; returns why it is not offered, or None."""
        self._window.append(group)
        if self.is_over != self._was_over:
            self._was_over = self.is_over
            tell = _log.warning if self._was_over else _log.info
            tell("untrained_over_ceiling" if self._was_over else "untrained_under_ceiling",
                 message=self.message(), hint=self.hint())  # fmt: skip
        return self.message() if self._was_over and group.share > self.most else None

    def message(self) -> str:
        """Says what share is not trained, and by which flags."""
        window = self.window
        flags = ", ".join(
            f"{flag} {count / window.sampled:.0%} ({FLAGS[flag].meaning})"
            for flag, count in window.by_flag.items()
        )
        return (
            f"{window.share:.0%} of the tokens sampled in the last {len(self._window)} groups are "
            f"not trained{f': {flags}' if flags else ''}. The ceiling is {self.most:.0%}."
        )

    def hint(self) -> str:
        """Says what to do."""
        by_flag = self.window.by_flag
        advice = [f"For {flag}: {_REMEDIES[flag]}." for flag in by_flag if flag in _REMEDIES]
        flags = ",".join(by_flag)
        return " ".join(
            [
                *advice,
                f"--tokens.train {flags} trains them, --tokens.max_untrained_share raises the "
                "ceiling.",
            ]
        )

    def report(self) -> dict[str, Any]:
        """Returns the state for `/v1/status`."""
        window = self.window
        return {
            "share": window.share,
            "ceiling": self.most,
            "groups": len(self._window),
            "tokens": window.by_flag,
            "over": self.is_over,
            "message": f"{self.message()} {self.hint()}" if self.is_over else "",
        }
