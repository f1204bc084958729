"""Measures a judge's accuracy on pairs of answers with a known winner.

In: cases, each with a better and a worse answer. Out: how often it is right, and whether the place
or the length of an answer decides. Measure a new judge, prompt or policy before training on its
word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..judge_interface import Judge
from .pairwise import pairwise_comparison
from .rubric import rubric_marks


class JudgeCase(msgspec.Struct, frozen=True, kw_only=True):
    """Two answers to a question, of which people know the better one."""

    question: str
    better: str
    worse: str
    reference: str | None = None


class JudgeBias(msgspec.Struct, frozen=True, kw_only=True):
    """Shares over the cases; None where no case tells.

    Args:
        right: cases in which the better answer wins in both orders.
        agreement: cases in which both orders say the same.
        first: share of single comparisons that decide for the first place; without a preference
            0.5.
        right_if_longer, right_if_shorter: `right`, of the cases whose better answer is the longer
            or the shorter one. A judge that likes length is right in the first and wrong in the
            second.
    """

    cases: int
    right: float | None
    agreement: float | None
    first: float | None
    right_if_longer: float | None
    right_if_shorter: float | None


async def judge_bias(judge: Judge, cases: Sequence[JudgeCase], **sampling: Any) -> JudgeBias:
    """Returns how `judge` does on `cases`, with two calls for each; raises JudgeError."""

    async def both(case: JudgeCase) -> tuple[float, float]:
        return await asyncio.gather(
            pairwise_comparison(
                judge, case.question, case.better, case.worse, reference=case.reference, **sampling
            ),
            pairwise_comparison(
                judge, case.question, case.worse, case.better, reference=case.reference, **sampling
            ),
        )

    said = await asyncio.gather(*map(both, cases))
    decided = [one for pair in said for one in pair if one != 0.5]
    return _bias(
        cases,
        [forward == 1.0 and backward == 0.0 for forward, backward in said],
        agreement=_mean([forward + backward == 1.0 for forward, backward in said]),
        first=_mean(decided),
    )


async def rubric_bias(
    judge: Judge, cases: Sequence[JudgeCase], criteria: Mapping[str, str], **sampling: Any
) -> JudgeBias:
    """Returns how the marks of `rubric_marks`, summed, tell the better answers of `cases`.

    Each answer is marked alone, so `agreement` and `first` are None. Raises JudgeError.
    """

    async def mark(case: JudgeCase, answer: str) -> float:
        marks = await rubric_marks(
            judge,
            question=case.question,
            answer=answer,
            criteria=criteria,
            reference=case.reference,
            **sampling,
        )
        return sum(marks.values())

    async def is_right(case: JudgeCase) -> bool:
        better, worse = await asyncio.gather(mark(case, case.better), mark(case, case.worse))
        return better > worse

    return _bias(cases, await asyncio.gather(*map(is_right, cases)))


def _bias(
    cases: Sequence[JudgeCase],
    right: Sequence[bool],
    *,
    agreement: float | None = None,
    first: float | None = None,
) -> JudgeBias:
    ahead = [len(case.better) - len(case.worse) for case in cases]
    return JudgeBias(
        cases=len(cases),
        right=_mean(right),
        agreement=agreement,
        first=first,
        right_if_longer=_mean([ok for ok, n in zip(right, ahead, strict=True) if n > 0]),
        right_if_shorter=_mean([ok for ok, n in zip(right, ahead, strict=True) if n < 0]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
