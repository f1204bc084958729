"""One prompt's logprobs, the trainer's own beside the engine's: the proof that a push arrived.

In: ids and what the trainer's forward pass gives for them. Out: how far the engine is from it. It
finds what no answer of the engine tells: a layer that kept its old weights, a wrong scale of an
adapter, a file of another model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from envserver_records import InputError

_MOST_TOKENS: Final = 512
"""More tell nothing more, and cost a longer forward pass while the agents wait."""


@dataclass(frozen=True)
class PromptCheck:
    """What the engine has to compute.

    Args:
        prompt_ids, completion_ids: any text that both can score, such as a row just trained on.
        logprobs: the trainer's, of each token of the completion, at temperature 1, with the weights
            that are published.
        tolerance: the greatest difference of one token's logprob. In float32 1e-3 is far above
            rounding; in bfloat16 rounding alone gives about 0.1.

    Raises:
        InputError: there is nothing to compare, or not one logprob per token.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if not (self.prompt_ids and self.completion_ids):
            raise InputError("A check needs a prompt and a completion of one token at least.")
        if len(self.completion_ids) != len(self.logprobs):
            raise InputError(
                f"A check has {len(self.completion_ids)} tokens and {len(self.logprobs)} logprobs."
            )

    @property
    def size(self) -> int:
        """How many tokens are compared. Not the last of several: the engine samples one more
        token, and a text may fill its context already."""
        return min(_MOST_TOKENS, max(1, len(self.completion_ids) - 1))

    @property
    def ids(self) -> list[int]:
        """What the engine scores."""
        return [*self.prompt_ids, *self.completion_ids[: self.size]]

    def widest(self, found: Sequence[float]) -> tuple[float, int]:
        """The greatest difference from the engine's logprobs of `ids` behind the prompt, and at
        which token of the completion it is; what is no number is infinitely far."""
        pairs = zip(self.logprobs[: self.size], found, strict=True)
        far = [abs(own - engines) for own, engines in pairs]
        sized = [math.inf if math.isnan(one) else one for one in far]
        worst = max(sized)
        return worst, sized.index(worst)
