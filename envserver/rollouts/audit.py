"""Compares recorded logprobs with the engine's current ones: one row, and sums over rows.

A row is compared, or counted under the reason why not (`NOT_COMPARED`), never left out silently.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

import msgspec
import numpy as np
import structlog
from envserver_records.errors import EngineError, EngineGarbage, EngineRefused
from envserver_records.images import RowImage, images_of
from envserver_records.records import Logprobs, Mask, Tokens, Trajectory
from envserver_records.records import Sequence as Row
from envserver_records.sampling import SamplingSpan
from numpy.typing import NDArray

from ..models.engine import Engine, EngineRequest
from ..proxy.gate import Aborted, Gate
from ..tokens.images import folded, url_from

_PATH: Final = "/v1/completions"
_GENERATE: Final = "/inference/v1/generate"
_PROBE_TEMPERATURE: Final = 2.0
_PROBE_CONTEXT: Final = 64
_PROBE_TOKENS: Final = 32
_PROBE_DIFFERENCE: Final = 0.2
"""Separates raw from processed logprobs. Rounding errors are far smaller, and at the highest
temperature that vLLM accepts the logprobs of 32 tokens differ by nats from the raw ones, even for a
model that was certain at first."""


_TIMEOUT_SECONDS: Final = 600.0


class Rescorer:
    """Asks `engine` for logprobs of given tokens.

    A row's token ids go to `/v1/completions` as the prompt, with `prompt_logprobs`; nothing of the
    row is rendered or tokenized again. In float32 on a CPU, with one request at a time, vLLM
    returns exactly the numbers that it gave when it sampled; on a GPU kernels and batches differ,
    and so do the last digits.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._context: int | None = None
        self._context_known = False
        self._raw: bool | None = None

    async def context(self) -> int | None:
        """Returns the maximum tokens of prompt and answer together; None: the engine has none."""
        async with self._lock:
            if not self._context_known:
                self._context = await self._ask_for_context()
                self._context_known = True
        return self._context

    async def score(self, tokens: Tokens, images: Sequence[RowImage] = ()) -> Logprobs:
        """Returns float32[T]: the logprob of each token given those before it; 0 for the first.
        `images`: those among `tokens`. Their tokens' own logprobs mean nothing."""
        if images:
            return await self._score_with(tokens, images)
        choice = await self._complete(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and echoed != tokens.tolist():
            raise EngineGarbage("The engine scored another prompt than it was sent.")
        return _prompt_logprobs(choice, tokens)

    async def _score_with(self, tokens: Tokens, images: Sequence[RowImage]) -> Logprobs:
        """`/v1/completions` would ignore images without an error."""
        ranges = [(image.offset, image.length) for image in images]
        token = _placeholder(tokens, images[0])
        urls = [url_from(image.data) for image in images]
        body = {
            "model": await self._engine.model_name(),
            "token_ids": folded(tokens.tolist(), ranges, token),
            "content_parts": [{"type": "image_url", "url": url} for url in urls],
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0},
            "return_token_ids": True,
        }
        answer = await self._engine.post(EngineRequest(_GENERATE, body, "", _TIMEOUT_SECONDS))
        if answer.get("prompt_token_ids") != tokens.tolist():
            raise EngineGarbage("The engine now makes other tokens of the row's images.")
        return _prompt_logprobs(answer, tokens)

    async def takes(self, length: int) -> bool:
        """Returns whether the engine accepts so long a prompt; if so, it refused a row because of
        its token ids."""
        try:
            await self.score(np.zeros(length, np.int32))
        except EngineRefused:
            return False
        return True

    async def is_raw(self, context: Tokens) -> bool:
        """Returns whether sampled logprobs are raw (before the temperature), as those of `score`;
        determined once, by sampling after `context`."""
        async with self._lock:
            if self._raw is None:
                self._raw = await self._probe(context)
        return self._raw

    async def _probe(self, context: Tokens) -> bool:
        context = context[:_PROBE_CONTEXT]
        choice = await self._complete(
            context, max_tokens=_PROBE_TOKENS, temperature=_PROBE_TEMPERATURE, logprobs=0, seed=0
        )
        try:
            sampled = np.array(choice["token_ids"], np.int32)
            said = np.array(choice["logprobs"]["token_logprobs"], np.float64)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EngineGarbage("The engine's sample has no ids or logprobs.") from error
        scored = (await self.score(np.concatenate([context, sampled])))[len(context) :]
        if said.shape != scored.shape:
            raise EngineGarbage("The engine's sample has different numbers of logprobs and ids.")
        return bool(np.abs(said - scored).max(initial=0.0) < _PROBE_DIFFERENCE)

    async def _complete(self, prompt: Tokens, **fields: Any) -> dict[str, Any]:
        body = {
            "model": await self._engine.model_name(),
            "prompt": prompt.tolist(),
            "return_token_ids": True,
            **fields,
        }
        answer = await self._engine.post(EngineRequest(_PATH, body, "", _TIMEOUT_SECONDS))
        try:
            choice = answer["choices"][0]
        except (KeyError, IndexError, TypeError):
            choice = None
        if not isinstance(choice, dict):
            raise EngineGarbage("The engine's answer has no choice.")
        return choice

    async def _ask_for_context(self) -> int | None:
        model = await self._engine.model_name()
        try:
            listed = (await self._engine.get("/v1/models")).get("data")
        except EngineRefused:
            return None  # an engine that lists no models may still answer
        for entry in listed if isinstance(listed, list) else []:
            if isinstance(entry, dict) and entry.get("id") == model:
                length = entry.get("max_model_len")
                return length if isinstance(length, int) else None
        return None


def _placeholder(tokens: Tokens, image: RowImage) -> int:
    """Returns the token that stands for an image: the most frequent one of its range."""
    shown = tokens[image.offset : image.offset + image.length]
    values, counts = np.unique(shown, return_counts=True)
    return int(values[counts.argmax()])


def _prompt_logprobs(choice: dict[str, Any], tokens: Tokens) -> Logprobs:
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(tokens):
        raise EngineGarbage("The engine returns no prompt_logprobs.", hint="vLLM returns them.")
    logprobs = np.zeros(len(tokens), np.float32)
    try:
        for place, token in enumerate(tokens.tolist()[1:], 1):
            logprobs[place] = entries[place][str(token)]["logprob"]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineGarbage(f"The engine returns no logprob for token {place} of a row.") from error
    if not np.isfinite(logprobs).all():
        raise EngineGarbage("The engine returned a logprob that is not a number.")
    return logprobs


NOT_COMPARED: Final = {
    "no_tokens": "only their text is known",
    "nothing_trained": "no token is trained",
    "no_logprobs": "no logprob was recorded",
    "not_sampled": "not among those that were chosen",
    "other_version": "sampled by another policy version, or by more than one",
    "weights_changed": "the engine's weights changed while it was scored",
    "structured_output_masked": "a grammar or bias masked the distribution",
    "unchecked_fields": "a field that the run passed on may have changed the distribution",
    "multimodal_unstitched": "the prompt has images at unknown positions",
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
        """The positions of the trained tokens that have a token before them."""
        places = np.flatnonzero(self.mask)
        return places[places > 0]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The largest difference of a row."""

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
        return self.again - self.recorded

    def worst(self) -> Difference:
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
        yield audited(
            sequence,
            images_of(sequence.images, held, len(sequence.tokens)),
            altered=is_altered(sequence.flags, {}) or not are_plain(sequence.sampling),
            group_id="",
            rollout_id=trajectory.rollout_id,
            number=number,
        )


def audited(sequence: Row, images: list[RowImage], **facts: Any) -> AuditedRow:
    return AuditedRow(
        tokens=sequence.tokens,
        mask=sequence.mask,
        logprobs=sequence.logprobs,
        versions=sequence.versions,
        flags=sequence.flags,
        images=images,
        **facts,
    )


def is_altered(flags: list[str], generation_params: Mapping[str, Any]) -> bool:
    params = [generation_params.get(name) for name in ("temperature", "top_p")]
    return any(flag in flags for flag in _ALTERING) or any(
        value not in (None, 1) for value in params
    )


def are_plain(spans: Iterable[SamplingSpan]) -> bool:
    return all(span.is_plain for span in spans)


def why_not_comparable(row: AuditedRow, version: int) -> str:
    """Returns the key of NOT_COMPARED that applies to `row` without asking the engine, or ""."""
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
    """Compares `row`, for which `why_not_comparable` returned ""."""
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
    """Returns a number in [0, 1), spread evenly, that depends only on `key` and `seed`."""
    digest = hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


_log = structlog.get_logger("envserver.audit")

_MOST_WAITING: Final = 64
_LAST_SECONDS: Final = 10.0
"""Seconds to finish the queue at an orderly shutdown."""


class Auditor:
    """Audits a share of the rollouts offered to it; an async context manager.

    `offer` never waits: rollouts that do not fit in the queue are dropped and counted. The engine
    gets one request at a time; differences are logged as `audit_mismatch` and counted in `report`.
    Whether a rollout is audited depends on its id alone.

    Args:
        tolerance: largest |difference| of a logprob that counts as rounding.
        version: returns the policy version that the engine serves, -1 if versions are not counted.
        gate: pauses calls during weight updates; audits wait there, too.
    """

    def __init__(
        self,
        engine: Engine,
        fraction: float,
        tolerance: float,
        *,
        version: Callable[[], int] = lambda: -1,
        gate: Gate | None = None,
        most_waiting: int = _MOST_WAITING,
    ) -> None:
        self.fraction = fraction
        self._rescorer = Rescorer(engine)
        self._version = version
        self._gate = gate or Gate()
        self._queue: asyncio.Queue[Trajectory] = asyncio.Queue(most_waiting)
        self._totals = Totals(tolerance)
        self._rollouts = 0
        self._dropped = 0
        self._not_compared: Counter[str] = Counter()
        self._refused = 0
        self._errors: Counter[str] = Counter()
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self.fraction > 0:
            self._work = asyncio.create_task(self._run(), name="audit")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._work is None:
            return
        if kind is None and not self._work.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._queue.join(), _LAST_SECONDS)
        self._work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._work

    def offer(self, trajectory: Trajectory) -> bool:
        """Queues `trajectory` if it is to be audited and there is room; returns whether it did."""
        if share_of(0, trajectory.rollout_id) >= self.fraction:
            return False
        try:
            self._queue.put_nowait(trajectory)
        except asyncio.QueueFull:
            self._dropped += 1
            return False
        return True

    def report(self) -> dict[str, Any]:
        return {
            "fraction": self.fraction,
            "rollouts": self._rollouts,
            **self._totals.facts(),
            "rows_refused": self._refused,
            "rows_not_compared": dict(self._not_compared),
            "engine_failures": dict(self._errors),
            "rollouts_waiting": self._queue.qsize(),
            "rollouts_dropped": self._dropped,
        }

    def summary(self) -> str:
        totals = self._totals
        words = [
            f"{totals.rows_over} of {totals.rows} rows differ",
            f"{totals.exact:,} of {totals.tokens:,} tokens are exactly equal",
            f"the largest difference is {totals.largest:.2g}",
        ]
        left_out = {
            "rows were not compared": self._not_compared.total(),
            "rows were refused": self._refused,
            "rows were sent to a failing engine": self._errors.total(),
            "rollouts were skipped: too many were waiting": self._dropped + self._queue.qsize(),
        }
        words += [f"{count} {what}" for what, count in left_out.items() if count]
        return f"Audit: {', '.join(words)}."

    async def _run(self) -> None:
        while True:
            trajectory = await self._queue.get()
            for row in rows_of(trajectory, trajectory.images):
                await self._audit(row)
            self._rollouts += 1
            self._queue.task_done()

    async def _audit(self, row: AuditedRow) -> None:
        try:
            async with self._gate.passing():
                outcome = await self._outcome(row)
        except Aborted:
            self._not_compared["weights_changed"] += 1
        except EngineError as error:
            self._errors[error.kind] += 1
            _log.warning("audit_failed", rollout_id=row.rollout_id, error=str(error))
        else:
            self._count(row, outcome)

    async def _outcome(self, row: AuditedRow) -> AuditResult:
        version = self._version()
        if reason := why_not_comparable(row, version):
            return AuditResult(not_compared=reason)
        outcome = await audit_row(self._rescorer, row)
        if self._gate.paused or self._version() != version:
            return AuditResult(not_compared="weights_changed")
        return outcome

    def _count(self, row: AuditedRow, outcome: AuditResult) -> None:
        if outcome.refused:
            self._refused += 1
            _log.warning("audit_refused", rollout_id=row.rollout_id, message=outcome.refused)
        elif outcome.comparison is None:
            self._not_compared[outcome.not_compared] += 1
        elif not self._totals.add(outcome.comparison):
            worst = msgspec.structs.asdict(outcome.comparison.worst())
            facts = {name: value for name, value in worst.items() if value not in (None, "")}
            _log.warning("audit_mismatch", **facts)
