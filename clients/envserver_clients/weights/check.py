"""Compares one prompt's logprobs between trainer and engine, to prove that new weights arrived.

In: token ids and the trainer's logprobs for them. Out: the largest difference from the engine's. It
finds faults that the engine does not report: a layer that kept its old weights, a wrong scale of an
adapter, a file of another model. Errors of a transfer of weights:

    EnvserverError
    ├── EngineError              an engine failed; detail: engines (which ones), phase
    │   ├── EngineUnavailable    it does not answer, or was restarted meanwhile: publish again
    │   ├── EngineTimeout        a phase exceeded its time limit
    │   ├── EngineRefused        it was started without a required option; the hint says which
    │   ├── EngineGarbage        its answer cannot be read
    │   └── WeightsMismatch      its logprobs differ from the trainer's
    ├── WeightsNotSaved          the files could not be written; no engine was changed
    └── ConflictError            the server is already at a higher version
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from envserver_records import EngineError, EnvserverError, InputError

_MOST_TOKENS: Final = 512
"""More tokens prove nothing more, and the agents wait for the forward pass."""


class WeightsMismatch(EngineError):
    """`detail`: version, old_version, engines, difference, tolerance, token (the worst one)."""

    kind = "weights_mismatch"


class WeightsNotSaved(EnvserverError):
    """`detail`: folder, full (whether the disk is full)."""

    kind, status = "weights_not_saved", 507


@dataclass(frozen=True)
class PromptCheck:
    """The logprobs that the engine must compute.

    Args:
        prompt_ids, completion_ids: any text that both can score, such as a row just trained on.
        logprobs: the trainer's logprob of each completion token at temperature 1, with the
            published weights.
        tolerance: maximum difference of one token's logprob. In float32 1e-3 is far above rounding;
            in bfloat16 rounding alone causes about 0.1.

    Raises:
        InputError: there is nothing to compare, or not one logprob per token.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if not (self.prompt_ids and self.completion_ids):
            raise InputError("A check needs a prompt and at least one completion token.")
        if len(self.completion_ids) != len(self.logprobs):
            raise InputError(
                f"A check has {len(self.completion_ids)} tokens and {len(self.logprobs)} logprobs."
            )

    @property
    def size(self) -> int:
        """The number of compared tokens, without the last of several: the engine samples one more
        token, and the text may already fill its context."""
        return min(_MOST_TOKENS, max(1, len(self.completion_ids) - 1))

    @property
    def ids(self) -> list[int]:
        """The tokens that the engine scores."""
        return [*self.prompt_ids, *self.completion_ids[: self.size]]

    def widest(self, found: Sequence[float]) -> tuple[float, int]:
        """Returns the largest difference from the engine's logprobs of the completion, and its
        token's index; NaN counts as infinitely far."""
        pairs = zip(self.logprobs[: self.size], found, strict=True)
        far = [abs(own - engines) for own, engines in pairs]
        sized = [math.inf if math.isnan(one) else one for one in far]
        worst = max(sized)
        return worst, sized.index(worst)
