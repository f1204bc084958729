"""Selects what to learn from a batch: examples, and statistics of the whole batch.

Invariant: the weights of all trained tokens are computed from the whole batch in advance, so the
sums over any parts of it add up to the same loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from envserver_records.experts import Table
from envserver_records.images import RowImage
from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING
from numpy.typing import NDArray

from envserver_clients.records import ClientGroup, Row

from .advantages import AdvantageSettings, RowAdvantage, group_advantages, rewards_of, whitened
from .guard import SKIPPED

Denominator = Literal["trajectory", "token", "constant"]
"""The denominator of the sum over tokens.

trajectory: each trajectory weighs the same, however long (GRPO, arXiv 2402.03300, equation 3).
token: each token has the same weight (DAPO, arXiv 2503.14476, equation 8).
constant: trajectories times a constant, so that tokens of long wrong answers count as much
(Dr. GRPO, arXiv 2503.20783, section 3.2).

Trajectories and tokens of the whole batch count, including groups whose rewards are all equal. A
trajectory has the tokens of all its rows; the rows of each of several agents count as one by
themselves. Only trained tokens count."""


@dataclass(frozen=True)
class Example:
    """One row to learn from; arrays have length T.

    Args:
        tokens: int32[T].
        mask: uint8[T], 1 where the token is trained; 0 for the first token, which has no context.
        logprobs: float32[T], those of the sampling policy where mask is 1.
        advantage: its trajectory's.
        weight: weight of each of its trained tokens in the loss.
        fresh: uint8[T], 1 where the learning policy's own version sampled it; None: unknown.
        token_advantages: float32[T], where the turns of the row have advantages of their own.
        temperatures: float32[T], at which it was sampled; None: 1.
        raw: uint8[T], 1 where the logprob is from before the temperature was applied; None: 0.
        experts: see `Row`; None: the model routes by itself.
        images: those among its tokens, in order.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    advantage: float
    weight: float
    fresh: NDArray[np.uint8] | None = None
    token_advantages: NDArray[np.float32] | None = None
    temperatures: NDArray[np.float32] | None = None
    raw: NDArray[np.uint8] | None = None
    experts: Table | None = None
    images: Sequence[RowImage] = ()


@dataclass(frozen=True)
class ExampleSettings:
    """How rows become examples; see the settings.

    Args:
        skip_equal: groups whose rewards are all equal do not count in the denominators either.
        keep_zero: keep rows of advantage 0, which a reference policy or an entropy bonus needs.
        vocabulary: number of tokens that the model knows; None: unknown.
        sees: whether the model's processor makes the row's tokens of its images; None: the model
            sees no images.
    """

    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    denominator: Denominator = "trajectory"
    constant_tokens: int = 512
    max_staleness: int | None = None
    learn_truncated: bool = False
    skip_equal: bool = False
    keep_zero: bool = False
    vocabulary: int | None = None
    replay_experts: bool = False
    sees: Callable[[Row], bool] | None = None


@dataclass(frozen=True)
class BatchExamples:
    """The examples of a batch, with statistics of the batch.

    `numbers`: rewards, sizes and staleness for the metrics; `skipped` says why there are no
    examples. `group_ids`: of all groups, in order.
    """

    examples: list[Example]
    numbers: dict[str, float | str]
    group_ids: list[str] = field(default_factory=list)


def examples_of(
    groups: Sequence[ClientGroup],
    version: int,
    rules: ExampleSettings,
    *,
    shuffle: np.random.Generator | None = None,
) -> BatchExamples:
    """Returns the examples of a batch for the learning policy's `version`.

    Rows with advantage 0 are left out, because they do not change the gradient, unless `keep_zero`;
    their trajectories and tokens count in the denominators. Left out and counted are also groups
    older than `max_staleness` or newer than the policy, and rows that cannot be learned from
    rightly (see `refusal`). Their rewards count. `shuffle` shuffles the rewards of each agent
    within each group. Raises ConfigError: a row lacks a reward that the settings name.
    """
    own_or_older = [group for group in groups if _newest(group.rows) <= version]
    newer = len(groups) - len(own_or_older)
    fresh = [
        group for group in own_or_older if not _is_stale(group.rows, version, rules.max_staleness)
    ]
    rewards = [reward for group in fresh for reward in rewards_of(group.rows).values()]
    rows = [row for group in fresh for row in group.rows]
    refused = Counter(why for row in rows if (why := refusal(row, version, rules)))
    equal = 0
    counted: list[tuple[Row, RowAdvantage]] = []
    for group in fresh:
        found = group_advantages(group.rows, rules.advantages, shuffle)
        teaches_nothing = _is_equal(group.rows, found, rules.advantages)
        equal += teaches_nothing
        if not (teaches_nothing and rules.skip_equal):
            counted += zip(group.rows, found, strict=True)
    if rules.advantages.whiten:
        counted = _whitened(counted)
    examples = _weighed(counted, version, rules)
    numbers: dict[str, float | str] = {
        **_spread("reward", rewards),
        "groups": len(groups),
        "groups_stale": len(own_or_older) - len(fresh),
        "groups_newer": newer,
        "groups_equal": equal,
        "trajectories": len(rewards),
        "rows": len(rows),
        "rows_learned": len(examples),
        "rows_refused": refused.total(),
        **{f"rows_{why}": count for why, count in refused.items()},
        "tokens": sum(len(row.tokens) for row in rows),
        "tokens_trained": sum(int(row.mask.sum()) for row in rows),
        "truncated": _share([not row.learn for row in rows]),
        **_staleness(rows, version),
    }
    if not examples:
        is_equal = bool(rewards) and equal == len(fresh)
        why = "newer" if newer else "stale" if not fresh else "equal" if is_equal else "cut_off"
        numbers[SKIPPED] = refused.most_common(1)[0][0] if refused else why
    return BatchExamples(examples, numbers, [group.group_id for group in groups])


def refusal(row: Row, version: int, rules: ExampleSettings) -> str:
    """Returns why nothing can be learned rightly from the trained tokens of a row, or "".

    `images`: the model sees none, and tokens mean something else without their images.
    `bad_images`: its processor makes other tokens of them, or cannot read one. `bad_tokens`: the
    model does not know some ids. `no_logprobs`: there are none. `bad_logprobs`: some are not
    finite, positive, or below LEAST_LOGPROB. `altered`: sampled with top_p or another setting, so
    that the distribution is unknown. `greedy`: at temperature 0. `raw`: from before the temperature
    was applied, by an older policy, whose distribution cannot be computed any more. `no_experts`:
    those to replay were not recorded.
    """
    trained = row.mask == 1
    if not trained.any():
        return ""
    if rules.replay_experts and row.experts is None:
        return "no_experts"
    if row.images and rules.sees is None:
        return "images"
    if row.tokens.min() < 0 or (
        rules.vocabulary is not None and row.tokens.max() >= rules.vocabulary
    ):
        return "bad_tokens"
    if rules.sees is not None and not rules.sees(row):
        return "bad_images"
    if row.logprobs is None:
        return "no_logprobs"
    logprobs = row.logprobs[trained]
    usable = (logprobs >= LEAST_LOGPROB) & (logprobs <= LOGPROB_ROUNDING)  # False for NaN
    if not usable.all():
        return "bad_logprobs"
    if any(span.altered for span in row.sampling):
        return "altered"
    if not all(0 < span.temperature < np.inf for span in row.sampling):
        return "greedy"
    older = trained & (row.versions != version) & (_raw(row) == 1)
    return "raw" if older.any() else ""


def _raw(row: Row) -> NDArray[np.uint8]:
    """uint8[T], 1 where the logprob is from before the temperature was applied."""
    found = np.zeros(len(row.tokens), np.uint8)
    for span in row.sampling:
        found[span.start : span.end] = span.is_raw
    return found


def _temperatures(row: Row) -> NDArray[np.float32]:
    """float32[T], 1 where nothing is trained."""
    found = np.ones(len(row.tokens), np.float32)
    for span in row.sampling:
        found[span.start : span.end] = span.temperature
    return found


def _newest(rows: Sequence[Row]) -> int:
    """The newest version of any trained token, -1 if unknown."""
    return max((int(row.versions[row.mask == 1].max(initial=-1)) for row in rows), default=-1)


def _is_stale(rows: Sequence[Row], version: int, most: int | None) -> bool:
    """Whether a trained token is more than `most` versions behind (-1: unknown, no)."""
    if most is None:
        return False
    known = (row.versions[(row.mask == 1) & (row.versions >= 0)] for row in rows)
    return any(bool((version - versions > most).any()) for versions in known)


def _is_equal(rows: Sequence[Row], found: Sequence[RowAdvantage], rules: AdvantageSettings) -> bool:
    """Whether comparing the rows of a group with each other teaches nothing."""
    if rules.baseline == "none":
        found = group_advantages(rows, replace(rules, baseline="group"))
    return not any(advantage.teaches for advantage in found)


def _whitened(rows: Sequence[tuple[Row, RowAdvantage]]) -> list[tuple[Row, RowAdvantage]]:
    own, found = [row for row, _ in rows], [advantage for _, advantage in rows]
    return list(zip(own, whitened(own, found), strict=True))


def _weighed(
    rows: list[tuple[Row, RowAdvantage]], version: int, rules: ExampleSettings
) -> list[Example]:
    """Each agent of a trajectory counts as a trajectory by itself."""
    sizes: dict[tuple[str, str | None, int], int] = {}
    for row, _ in rows:
        key = (row.group_id, row.agent, row.trajectory)
        sizes[key] = sizes.get(key, 0) + int(row.mask.sum())
    trajectories = len(sizes)
    all_tokens = sum(sizes.values())
    examples = []
    for row, advantage in rows:
        own = sizes[row.group_id, row.agent, row.trajectory]
        if not (advantage.teaches or rules.keep_zero) or not (row.learn or rules.learn_truncated):
            continue
        if not row.mask[1:].any() or row.logprobs is None or refusal(row, version, rules):
            continue
        match rules.denominator:
            case "trajectory":
                weight = 1 / (trajectories * own)
            case "token":
                weight = 1 / all_tokens
            case "constant":
                weight = 1 / (trajectories * rules.constant_tokens)
        mask = row.mask.copy()
        mask[0] = 0  # the first token has no context to be predicted from
        fresh = (row.versions == version).astype(np.uint8)
        examples.append(
            Example(
                *(row.tokens, mask, row.logprobs, advantage.value, weight, fresh),
                token_advantages=advantage.tokens,
                temperatures=_temperatures(row),
                raw=_raw(row),
                experts=row.experts if rules.replay_experts else None,
                images=row.images,
            )
        )
    return examples


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": float(np.mean(values)), f"{name}_std": float(np.std(values))}


def _share(values: Sequence[bool]) -> float:
    return float(np.mean(values)) if values else 0.0


def _staleness(rows: Sequence[Row], version: int) -> dict[str, float]:
    parts = [version - row.versions[(row.mask == 1) & (row.versions >= 0)] for row in rows]
    behind = np.concatenate(parts) if parts else np.zeros(0)
    if not behind.size:
        return {}
    return {"staleness_mean": float(behind.mean()), "staleness_max": float(behind.max())}


@dataclass(frozen=True)
class Padded:
    """B rows, padded on the right to the longest, T; targets are tokens 1..T.

    Args:
        tokens: int64[B, T].
        attention: int64[B, T], 0 in the padding.
        mask: float32[B, T-1], 1 where the target is trained.
        logprobs: float32[B, T-1], those of the targets where mask is 1, else 0.
        fresh: uint8[B, T-1], 1 where the learning policy's own version sampled the target.
        temperatures: float32[B, T-1], at which the target was sampled, else 1.
        raw: uint8[B, T-1], 1 where the target's logprob is from before the temperature.
        weights: float32[B].
        advantages: float32[B], or float32[B, T-1] if turns have their own.
        first: index of the first trained target in any row; earlier ones need no logits.
        places: int64[B, 2], the line that each row is computed in and where it starts there, if
            several short rows share a line; None: each row has its own.
        images: those of each row, in the order of their tokens.
        filler: nothing is learned from it, and it is not counted.
        experts: int16[B, T, layers, experts per token], -1: unknown; None: no row has any.
    """

    tokens: NDArray[np.int64]
    attention: NDArray[np.int64]
    mask: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    fresh: NDArray[np.uint8]
    temperatures: NDArray[np.float32]
    raw: NDArray[np.uint8]
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    first: int
    places: NDArray[np.int64] | None = None
    images: Sequence[Sequence[RowImage]] = ()
    filler: bool = False
    experts: NDArray[np.int16] | None = None


def micro_batches(
    examples: Sequence[Example],
    most_tokens: int,
    *,
    packed: bool = False,
    blank: Example | None = None,
) -> Iterator[Padded]:
    """Yields the examples, longest first, in parts of at most `most_tokens` tokens with padding.

    A longer example is alone. With the longest first, a lack of memory shows at once. `packed`:
    short examples share lines that are as long as the longest example of the part. `blank` is added
    to parts without an image, so that every part has one.
    """
    part: list[Example] = []
    places: list[tuple[int, int]] = []
    used: list[int] = []  # tokens in each line
    for example in longest_first(examples):
        own, longest = len(example.tokens), len(part[0].tokens) if part else 0
        fitting = (at for at, tokens in enumerate(used) if tokens + own <= longest)
        line = next(fitting, None) if packed else None
        if line is None:
            if part and longest * (len(used) + 1) > most_tokens:
                yield padded(_with(blank, part), places if packed else None)
                part, places, used = [], [], []
            line = len(used)
            used.append(0)
        part.append(example)
        places.append((line, used[line]))
        used[line] += own
    if part:
        yield padded(_with(blank, part), places if packed else None)


def _with(blank: Example | None, part: list[Example]) -> list[Example]:
    return part if blank is None or any(example.images for example in part) else [*part, blank]


def longest_first(examples: Sequence[Example]) -> list[Example]:
    return sorted(examples, key=lambda example: -len(example.tokens))


def filler(blank: Example | None = None) -> Padded:
    """A micro-batch of weight 0, for a rank that has fewer of them than others."""
    logprobs, mask = np.zeros(2, np.float32), np.array([0, 1], np.uint8)
    row = Example(np.zeros(2, np.int32), mask, logprobs, advantage=0.0, weight=0.0)
    return replace(padded(_with(blank, [row])), filler=True)


def padded(examples: Sequence[Example], places: Sequence[tuple[int, int]] | None = None) -> Padded:
    """These examples (at least one) as one micro-batch; see `Padded.places`."""
    shape = (len(examples), max(len(example.tokens) for example in examples))
    mask = _rows([example.mask for example in examples], shape, np.float32)
    logprobs = [np.where(example.mask, example.logprobs, 0.0) for example in examples]
    attention = [np.ones(len(example.tokens)) for example in examples]
    temperatures = [example.temperatures for example in examples]
    trained = np.flatnonzero(mask[:, 1:].any(axis=0))
    return Padded(
        tokens=_rows([example.tokens for example in examples], shape, np.int64),
        attention=_rows(attention, shape, np.int64),
        mask=mask[:, 1:],
        logprobs=_rows(logprobs, shape, np.float32)[:, 1:],
        fresh=_rows([example.fresh for example in examples], shape, np.uint8)[:, 1:],
        temperatures=_rows(temperatures, shape, np.float32, 1)[:, 1:],
        raw=_rows([example.raw for example in examples], shape, np.uint8)[:, 1:],
        advantages=_advantages(examples, shape),
        weights=np.array([example.weight for example in examples], np.float32),
        first=int(trained[0]) if trained.size else 0,
        places=None if places is None else np.array(places, np.int64),
        experts=_experts(examples, shape),
        images=[example.images for example in examples],
    )


def _rows(
    arrays: Sequence[np.ndarray[Any, Any] | None],
    shape: tuple[int, ...],
    kind: type[Any],
    padding: int = 0,
) -> NDArray[Any]:
    found = np.full(shape, padding, kind)
    for row, array in zip(found, arrays, strict=True):
        if array is not None:
            row[: len(array)] = array
    return found


def _experts(examples: Sequence[Example], shape: tuple[int, int]) -> NDArray[np.int16] | None:
    tables = [example.experts for example in examples]
    if (known := next((table for table in tables if table is not None), None)) is None:
        return None
    return _rows(tables, (*shape, *known.shape[1:]), np.int16, -1)


def _advantages(examples: Sequence[Example], shape: tuple[int, int]) -> NDArray[np.float32]:
    if all(example.token_advantages is None for example in examples):
        return np.array([example.advantage for example in examples], np.float32)
    found = np.zeros(shape, np.float32)
    for row, example in enumerate(examples):
        own = example.token_advantages
        found[row, : len(example.tokens)] = example.advantage if own is None else own
    return found[:, 1:]
