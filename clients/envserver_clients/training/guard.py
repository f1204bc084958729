"""Judges each step: did it learn, and from data that the engine and the trainer agree about?

A batch is acknowledged before it ends a run, so no batch can stop a trainer for good.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from envserver_records import EnvserverError

log = logging.getLogger(__name__)

SKIPPED: Final = "skipped"
"""The name of the number that says why a step did not change the weights: a key of `_REASONS`."""


_LEAST_MOVED: Final = 0.5
_RATIOS_OF_POLICIES: Final = (2 / 3, 1.5)
"""Mean ratios of policies: those of two policies have a mean of 1, see `disagree`."""


class NothingLearned(EnvserverError):
    """Several batches in a row could not be learned from; `detail["reason"]` is a key below."""

    kind = "nothing_learned"


class MismatchError(NothingLearned):
    """The delivered logprobs are not those of the policy."""

    kind = "mismatch"


_REASONS: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_WASTE: Final = ("equal", "dropped", "cut_off", "stale")
"""Reasons of batches that are right, but teach nothing; a few of them are usual."""


def disagree(numbers: Mapping[str, Any], most: float) -> bool:
    """Whether the delivered logprobs cannot be those of the policy, or of an earlier one.

    Those of the policy's own version differ by rounding only: their mean difference decides; `most`
    is in nats per token. An earlier version differs legitimately, by any amount. But whatever the
    two policies are, the ratios exp(own - delivered) of tokens that one sampled have a mean of 1
    (they are importance weights), and those of logprobs without a sample do not. So where tokens of
    earlier versions had to be compared, that mean must be off, too.
    """
    if numbers.get("mismatch_mean", 0.0) <= most:
        return False
    least, largest = _RATIOS_OF_POLICIES
    is_fresh = numbers.get("mismatch_fresh", 1.0) == 1.0
    return is_fresh or not least <= numbers.get("mismatch_ratio", 1.0) <= largest


@dataclass(frozen=True)
class GuardSettings:
    warn_mismatch: float = 0.1
    most_mismatch: float = 0.5
    patience: int = 3
    waste_patience: int = 12


class Guard:
    """Counts steps in a row that learned nothing: their data were refused, or taught nothing."""

    def __init__(self, rules: GuardSettings) -> None:
        self._rules = rules
        self._in_a_row = 0
        self._was_waste = False

    def judge(self, line: Mapping[str, Any]) -> None:
        """Judges the metrics of a step whose batch is acknowledged.

        Raises MismatchError or NothingLearned: it was so in the last `patience` batches.
        """
        reason = str(line.get(SKIPPED, ""))
        step = line.get("step", "")
        if not reason:
            self._in_a_row = 0
            if disagree(line, self._rules.warn_mismatch):
                log.warning(
                    "step %s: engine and trainer differ by %.3f nats per token",
                    step,
                    line["mismatch_mean"],
                )
            if line.get("weights_moved", 1.0) < _LEAST_MOVED:
                log.warning(
                    "step %s changed only %.0f %% of the weights: a learning rate of %g is lost in "
                    "the rounding of their type",
                    step,
                    100 * line["weights_moved"],
                    line["learning_rate"],
                )
            return
        what, hint = _REASONS[reason].values()
        message = what.format_map({**line, "most": self._rules.most_mismatch})
        log.warning("%slearned nothing: %s", f"step {step} " if step else "", message)
        is_waste = reason in _WASTE
        self._in_a_row = self._in_a_row + 1 if is_waste == self._was_waste else 1
        self._was_waste = is_waste
        if self._in_a_row >= (self._rules.waste_patience if is_waste else self._rules.patience):
            kind = MismatchError if reason == "mismatch" else NothingLearned
            setting = "--waste-patience" if is_waste else "--patience"
            raise kind(
                f"{message} This happened in {self._in_a_row} batches in a row ({setting}).",
                hint=hint,
                reason=reason,
            )
