"""Problems that reasoning-gym generates without end, and its scorers made safe.

Only generators whose scorer cannot be fooled are allowed (several of the library give full credit
to a constant or to any text, or evaluate the answer as Python). The library comes with the extra
`procedural`.
"""

from __future__ import annotations

import functools
import importlib
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from envserver import ConfigError, InputError, Split

from .polynomials import equal_polynomials

ALLOWED = (
    "chain_sum", "basic_arithmetic", "decimal_arithmetic", "decimal_chain_sum",
    "fraction_simplification", "gcd", "lcm", "prime_factorization", "base_conversion",
    "simple_equations", "polynomial_multiplication", "products", "number_sequence",
    "time_intervals", "calendar_arithmetic", "leg_counting", "gsm_symbolic", "count_primes",
)  # fmt: skip

BLOCK = 1000
"""Problems of one generator instance; some of the library's cost memory per problem in advance."""

_SPLIT_SEEDS: dict[Split, int] = {"train": 0, "validation": 10**15, "test": 2 * 10**15}

Entry = dict[str, Any]
"""`question`, `answer`, `metadata`, as the library makes them."""


def entries(names: Sequence[str], split: Split, seed: int) -> Iterator[tuple[str, Entry]]:
    """(id, entry), without end, the same for the same names, split and seed.

    Raises:
        ConfigError: a name is not allowed, or the library is missing.
    """
    for name in names:
        _check_allowed(name)
    rng = random.Random(f"procedural-{split}-{seed}")
    drawn = dict.fromkeys(names, 0)
    while True:
        name = rng.choice(list(names))
        index = drawn[name]
        drawn[name] += 1
        block, place = divmod(index, BLOCK)
        first_seed = _SPLIT_SEEDS[split] + seed * 10**9 + block * BLOCK
        entry = _block(name, first_seed)[place]
        if isinstance(entry["answer"], str) and entry["answer"].strip():
            # Metadata may hold fractions and dates, which a task cannot; no scorer here reads them.
            yield f"{name}-{index}", json.loads(json.dumps(entry, default=str))


def entry_from_row(row: Entry) -> tuple[str, Entry]:
    """The generator's name and the entry that a row with `metadata.source_dataset` is.

    Raises:
        InputError: it is no such row.
    """
    name = row["metadata"].get("source_dataset")
    if name not in ALLOWED:
        raise InputError(f"{name!r} is none of the generators allowed here.")
    if not isinstance(row.get("question"), str) or not isinstance(row.get("answer"), str):
        raise InputError("A generated row must have question and answer, both texts.")
    return name, {key: row[key] for key in ("question", "answer", "metadata")}


def is_entry(row: dict[str, Any]) -> bool:
    """Whether a row is one that reasoning-gym made."""
    metadata = row.get("metadata")
    return isinstance(metadata, dict) and "source_dataset" in metadata


def score_entry(name: str, entry: Entry, answer: str, *, partial_credit: bool) -> float:
    """What the library's scorer gives, in [0, 1]; 0 where it raises.

    Args:
        partial_credit: pass scores between 0 and 1 on; otherwise only a full score counts, since
            several scorers pay for a matching prefix or for garbage.

    Raises:
        ConfigError: the library is missing.
    """
    answer = _plain(answer)
    if name == "polynomial_multiplication":
        # Its own scorer hands the answer to Python's `eval`.
        return float(equal_polynomials(answer, entry["answer"]))
    scorer = _library().get_score_answer_fn(name)
    try:
        score = float(scorer(answer, entry))
    except Exception:  # noqa: BLE001 - its scorers raise anything at unexpected answers
        return 0.0
    if not score > 0:
        return 0.0
    score = min(score, 1.0)
    return score if partial_credit or score == 1.0 else 0.0


def _check_allowed(name: str) -> None:
    if name not in ALLOWED:
        raise ConfigError(
            f"The generator {name!r} is not allowed.", hint=f"Allowed: {', '.join(ALLOWED)}."
        )


def _plain(answer: str) -> str:
    return answer.replace("\\times", "×").replace("\\cdot", "*").strip().strip("$").strip()


@functools.lru_cache(maxsize=64)
def _block(name: str, seed: int) -> Any:
    return _library().create_dataset(name, size=BLOCK, seed=seed)


@functools.cache
def _library() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"The data set `procedural` needs reasoning-gym, which cannot be imported: {error}.",
            hint="pip install 'envserver[procedural]'",
        ) from error
