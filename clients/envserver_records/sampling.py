"""How tokens were sampled, and what the logprobs delivered with them mean.

Engines return either the model's own logprobs (raw) or those of the distribution that they sampled
from, after temperature and filters (processed: vLLM's `--logprobs-mode processed_logprobs`). At
temperature 1 without filters the two are the same. Each row says which it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

LEAST_LOGPROB: Final = -1000.0
"""No token is sampled with a lower logprob: engines write such numbers (vLLM: -9999) for minus
infinity."""

LOGPROB_ROUNDING: Final = 1e-6
"""A sampled token's logprob may be this much above 0."""

LogprobsKind = Literal["raw", "processed", "unknown"]

_OFF: Final[dict[str, tuple[Any, ...]]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}
"""Settings that change what can be sampled, with the values that switch them off."""


class SamplingSpan(msgspec.Struct, frozen=True, array_like=True):
    """How the trained tokens from `start` up to `end` of a row were sampled.

    Temperature 0: the most likely token. `altered`: other settings that changed the distribution,
    such as top_p: a trainer cannot compute it.
    """

    start: int
    end: int
    temperature: float = 1.0
    logprobs: LogprobsKind = "unknown"
    altered: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the tokens were sampled from the model's own distribution."""
        return self.temperature == 1 and not self.altered

    @property
    def is_raw(self) -> bool:
        """Whether the logprobs are not those of the distribution that was sampled from."""
        return self.temperature != 1 and self.logprobs != "processed"


def span_of(
    sampling: Mapping[str, Any], logprobs: LogprobsKind, start: int, end: int
) -> SamplingSpan:
    temperature = sampling.get("temperature")
    altered = (name for name, off in _OFF.items() if sampling.get(name) not in (None, *off))
    return SamplingSpan(
        start, end, 1.0 if temperature is None else float(temperature), logprobs, tuple(altered)
    )


def merged(spans: Iterable[SamplingSpan]) -> list[SamplingSpan]:
    """Returns the spans in order, those that differ only in their place as one."""
    found: list[SamplingSpan] = []
    for span in spans:
        if found and msgspec.structs.replace(found[-1], end=span.end) == msgspec.structs.replace(
            span, start=found[-1].start
        ):
            found[-1] = msgspec.structs.replace(found[-1], end=span.end)
        else:
            found.append(span)
    return found
