"""Checks that a trainer divides by the temperature that its rows were sampled at.

In: rows with their spans of sampling, and the trainer's one temperature. Out: nothing, or an error
that says what to set. A trainer with another temperature learns from wrong ratios and shows
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from envserver_records import InputError, Trajectory
from envserver_records.sampling import SamplingSpan


def check_spans(spans: Iterable[SamplingSpan], temperature: float | None, setting: str) -> None:
    """Checks how rows were sampled; rows of older servers do not say it, and have no spans.

    Args:
        temperature: the trainer's; None: it takes that of each token.
        setting: the trainer's name for it, for the error.

    Raises:
        InputError: the trainer would compute another distribution than the sampled one.
    """
    for span in spans:
        if span.altered:
            raise InputError(
                f"Rows were sampled with {', '.join(span.altered)}: the trainer does not know what "
                "was cut off.",
                hint="Start the server with --sampling.top_p 1; the temperature is free.",
                place="sampling",
            )
        if temperature is not None and span.temperature != temperature:
            raise InputError(
                f"Rows were sampled at temperature {span.temperature:g}, the trainer divides by "
                f"{temperature:g}.",
                hint=f"Set {setting} and the server's --sampling.temperature to the same number.",
                place="sampling",
            )
        if span.is_raw:
            raise InputError(
                f"Rows were sampled at temperature {span.temperature:g}, but the engine's logprobs "
                "are from before it.",
                hint="Start the engine with --logprobs-mode processed_logprobs, or set the "
                "temperature to 1.",
                place="sampling",
            )


def check_trajectories(
    trajectories: Iterable[Trajectory | None], temperature: float | None, setting: str
) -> None:
    """Checks the rows of trajectories; see `check_spans`."""
    for one in trajectories:
        for row in one.sequences if one is not None else ():
            check_spans(row.sampling, temperature, setting)
