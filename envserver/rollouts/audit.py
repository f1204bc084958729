"""Compares recorded logprobs with the engine's current ones: one row, and sums over rows.

In: an `AuditedRow` (a training sequence with its place) and a `Rescorer`. Out: an `AuditResult`: a
comparison of every trained token, or the reason why there is none (`NOT_COMPARED`), or the engine's
refusal. What always holds: a row is compared or counted under a reason, never left out silently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import numpy as np
from envserver_records.errors import EngineRefused
from envserver_records.images import RowImage, images_of
from envserver_records.records import Logprobs, Mask, Tokens, Trajectory
from envserver_records.sampling import SamplingSpan
from numpy.typing import NDArray

from .rescoring import Rescorer

NOT_COMPARED: Final = {
    "no_tokens": "only their text is known",
    "nothing_trained": "no token is trained",
    "no_logprobs": "no logprob was recorded",
    "not_sampled": "not among those that were chosen",
    "other_version": "sampled by another policy version, or by more than one",
    "weights_changed": "the engine's weights changed while it was scored",
    "structured_output_masked": "a grammar or bias masked the distribution",
    "unchecked_fields": "a field that the run passed on may have bent the distribution",
    "multimodal_unstitched": "images are in the prompt, and where is not known",
    "processed_logprobs": "recorded after temperature and top_p were applied",
    "own_model": "sampled by another model than the policy",
    "too_long": "longer than the engine's context",
}
"""Why a row is not compared."""

_INCOMPARABLE: Final = (
    "own_model",
    "structured_output_masked",
    "unchecked_fields",
    "multimodal_unstitched",
)
_ALTERING: Final = ("temperature_not_one", "top_p_active")
_LARGEST_EXPONENT: Final = 80.0


class AuditedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A delivered sequence and its place. The arrays have length T, as in `records.Sequence`.

    Args:
        versions: int32[T], -1 for context or unknown; the group's if tokens have none.
        flags: of the sequence, or of its trajectory if only those are known.
        altered: it was sampled with a temperature other than 1 or with top_p.
        number: index of the row in its group, from 0.
        line: line of its file, from 1.
        images: those among the tokens, with their bytes.
    """

    tokens: Tokens
    mask: Mask
    logprobs: Logprobs
    versions: Tokens
    flags: list[str]
    altered: bool
    group_id: str
    rollout_id: str
    number: int
    line: int | None = None
    images: list[RowImage] = []

    @property
    def trained(self) -> NDArray[np.intp]:
        """Returns the positions of the trained tokens that have a token before them."""
        places = np.flatnonzero(self.mask)
        return places[places > 0]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The largest difference of a row: its `position` and `token`."""

    group_id: str
    rollout_id: str
    row: int
    line: int | None
    position: int
    token: int
    recorded: float
    again: float
    difference: float


class Comparison(msgspec.Struct, frozen=True):
    """Two logprobs for each of N trained tokens; float64[N], from float32."""

    row: AuditedRow
    recorded: NDArray[np.float64]
    again: NDArray[np.float64]

    @property
    def differences(self) -> NDArray[np.float64]:
        """Returns the engine's current logprobs minus the recorded ones."""
        return self.again - self.recorded

    def worst(self) -> Difference:
        """Returns the token whose logprobs differ most."""
        at = int(np.abs(self.differences).argmax())
        position = int(self.row.trained[at])
        return Difference(
            group_id=self.row.group_id,
            rollout_id=self.row.rollout_id,
            row=self.row.number,
            line=self.row.line,
            position=position,
            token=int(self.row.tokens[position]),
            recorded=float(self.recorded[at]),
            again=float(self.again[at]),
            difference=float(self.differences[at]),
        )


class Totals(msgspec.Struct):
    """Sums over compared rows. Differences are of logprobs, current minus recorded, in nats.

    Args:
        exact: tokens whose two float32 are equal.
        over: tokens whose |difference| is over the tolerance; `rows_over`: rows that have any.
        sum_k1, sum_k3: of the two usual estimators of KL(recorded policy || engine now) from
            samples of the former: -d, and exp(d) - 1 - d.
    """

    tolerance: float
    rows: int = 0
    rows_over: int = 0
    tokens: int = 0
    exact: int = 0
    over: int = 0
    largest: float = 0.0
    sum_absolute: float = 0.0
    sum_k1: float = 0.0
    sum_k3: float = 0.0

    def add(self, comparison: Comparison) -> bool:
        """Adds `comparison`; returns whether all of it is within the tolerance."""
        differences = comparison.differences
        absolute = np.abs(differences)
        over = int((absolute > self.tolerance).sum())
        self.rows += 1
        self.rows_over += over > 0
        self.tokens += len(differences)
        self.exact += int((differences == 0).sum())
        self.over += over
        self.largest = max(self.largest, float(absolute.max(initial=0.0)))
        self.sum_absolute += float(absolute.sum())
        self.sum_k1 -= float(differences.sum())
        # A nearly impossible token would make the sum infinite, which JSON cannot express.
        bounded = np.minimum(differences, _LARGEST_EXPONENT)
        self.sum_k3 += float((np.expm1(bounded) - differences).sum())
        return over == 0

    def facts(self) -> dict[str, Any]:
        """Returns counts and means; a mean over no token is None."""
        count = self.tokens
        return {
            "rows": self.rows,
            "rows_over_tolerance": self.rows_over,
            "tokens": count,
            "tokens_exactly_equal": self.exact,
            "tokens_over_tolerance": self.over,
            "tolerance": self.tolerance,
            "largest_difference": self.largest,
            "mean_difference": self.sum_absolute / count if count else None,
            "kl_k1": self.sum_k1 / count if count else None,
            "kl_k3": self.sum_k3 / count if count else None,
        }


class AuditResult(msgspec.Struct, frozen=True):
    """The result of one row: a comparison, or a key of NOT_COMPARED, or the engine's refusal."""

    comparison: Comparison | None = None
    not_compared: str = ""
    refused: str = ""


def rows_of(trajectory: Trajectory, held: dict[str, bytes]) -> Iterator[AuditedRow]:
    """Yields the rows of `trajectory`, numbered within it; `held`: images by their SHA-256."""
    for number, sequence in enumerate(trajectory.sequences):
        yield AuditedRow(
            tokens=sequence.tokens,
            mask=sequence.mask,
            logprobs=sequence.logprobs,
            versions=sequence.versions,
            flags=sequence.flags,
            altered=is_altered(sequence.flags, {}) or not are_plain(sequence.sampling),
            group_id="",
            rollout_id=trajectory.rollout_id,
            number=number,
            images=images_of(sequence.images, held, len(sequence.tokens)),
        )


def is_altered(flags: list[str], generation_params: Mapping[str, Any]) -> bool:
    """Whether flags or settings say that temperature or top_p changed the sampled distribution."""
    params = [generation_params.get(name) for name in ("temperature", "top_p")]
    return any(flag in flags for flag in _ALTERING) or any(one not in (None, 1) for one in params)


def are_plain(spans: Iterable[SamplingSpan]) -> bool:
    """Whether all tokens were sampled from the model's own distribution."""
    return all(span.is_plain for span in spans)


def why_not_comparable(row: AuditedRow, version: int) -> str:
    """Returns the key of NOT_COMPARED that applies to `row` without asking the engine, or "".

    Args:
        version: the policy version that the engine serves, -1 if versions are not counted.
    """
    if not len(row.tokens):
        return "no_tokens"
    if not len(row.trained):
        return "nothing_trained"
    for flag in _INCOMPARABLE:
        if flag in row.flags:
            return flag
    if "mixed_versions" in row.flags or np.any(row.versions[row.trained] != version):
        return "other_version"
    return ""


async def audit_row(rescorer: Rescorer, row: AuditedRow) -> AuditResult:
    """Compares `row`, for which `why_not_comparable` returned "".
    Raises EngineError: the engine failed.
    """
    context = await rescorer.context()
    if context is not None and len(row.tokens) >= context:
        return AuditResult(
            not_compared="too_long"
        )  # the engine must have room to sample one token after it
    if row.altered and not await rescorer.is_raw(row.tokens[: row.trained[0]]):
        return AuditResult(not_compared="processed_logprobs")
    try:
        again = await rescorer.score(row.tokens, row.images)
    except EngineRefused as error:
        if not await rescorer.takes(len(row.tokens)):
            return AuditResult(not_compared="too_long")
        return AuditResult(refused=error.message)
    places = row.trained
    return AuditResult(
        Comparison(row, row.logprobs[places].astype(np.float64), again[places].astype(np.float64))
    )


def share_of(seed: int, key: str) -> float:
    """Returns a number in [0, 1) that depends only on `key` and `seed`, spread evenly.

    A fraction f of all keys has a number below f.
    """
    digest = hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
