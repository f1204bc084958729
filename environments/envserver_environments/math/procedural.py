"""Endless problems: sums, sorting, and those of reasoning-gym (extra `procedural`), of which only
generators are allowed whose scorer cannot be fooled."""

from __future__ import annotations

import functools
import importlib
import json
import math
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from envserver_records.extras import install_command

from envserver import ConfigError, InputError, Split

from .data_sets import Problem

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


def entries(names: Sequence[str], split: Split, seed: int) -> Iterator[tuple[str, Entry]]:
    """(id, entry), without end, the same for the same names, split and seed."""
    if refused := [name for name in names if name not in ALLOWED]:
        raise ConfigError(
            f"The generator {refused[0]!r} is not allowed.", hint=f"Allowed: {', '.join(ALLOWED)}."
        )
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
    """Returns the generator's name and the entry in a row with `metadata.source_dataset`."""
    name = row["metadata"].get("source_dataset")
    if name not in ALLOWED:
        raise InputError(f"{name!r} is not one of the generators allowed here.")
    if not isinstance(row.get("question"), str) or not isinstance(row.get("answer"), str):
        raise InputError("A generated row must have question and answer, both texts.")
    return name, {key: row[key] for key in ("question", "answer", "metadata")}


def is_entry(row: dict[str, Any]) -> bool:
    metadata = row.get("metadata")
    return isinstance(metadata, dict) and "source_dataset" in metadata


def score_entry(name: str, entry: Entry, answer: str, *, partial_credit: bool) -> float:
    """Returns the library's score in [0, 1]; 0 if its scorer raises. Without `partial_credit` only
    a full score counts: several scorers pay for a matching prefix or for garbage."""
    answer = answer.replace("\\times", "×").replace("\\cdot", "*").strip().strip("$").strip()
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
            hint=install_command("procedural"),
        ) from error


Monomial = tuple[tuple[str, int], ...]
"""Variables with their exponents, sorted; () is the constant."""

_FACTOR = r"(?:[0-9]+|[A-Za-z_]+(?:\*\*[0-9]+)?)"
_TERM = re.compile(rf"([+-])({_FACTOR}(?:\*{_FACTOR})*)")
_SUM = re.compile(rf"(?:{_TERM.pattern})+")


def equal_polynomials(left: str, right: str) -> bool:
    """Returns whether both are sums of products (`3*x**2*y - 4`, no parentheses) of equal value."""
    coefficients = _coefficients(left)
    return coefficients is not None and coefficients == _coefficients(right)


def _coefficients(text: str) -> dict[Monomial, int] | None:
    """Returns the coefficients by monomial, without zeros; None if the text is not such a sum."""
    source = re.sub(r"\s*(\*\*|[-+*])\s*", r"\1", text.strip().replace("^", "**"))
    if not source.startswith(("+", "-")):
        source = f"+{source}"
    if not _SUM.fullmatch(source):
        return None
    sums: Counter[Monomial] = Counter()
    for sign, product in _TERM.findall(source):
        coefficient, exponents = int(f"{sign}1"), Counter[str]()
        for factor in product.replace("**", "^").split("*"):
            base, _, exponent = factor.partition("^")
            if base.isdigit():
                coefficient *= int(base)
            else:
                exponents[base] += int(exponent or 1)
        sums[tuple(sorted((x, n) for x, n in exponents.items() if n))] += coefficient
    return {monomial: value for monomial, value in sums.items() if value}


# Every problem `A+B` and `A-B` whose answer is not negative, with operands up to a bound, comes
# once, in an order that depends on the seed only. Lazy: nothing is kept, however large the bound.
# So does each of the 9**5 numbers of five digits from 1 to 9, to be sorted. A problem belongs to
# one split, whatever the seed and the bound: about 80 % train, 10 % each of the others.

_TRAIN: list[Split] = ["train"] * 8
_SPLITS: list[Split] = [*_TRAIN, "validation", "test"]
DIGITS = 5
_WORDS = {"+": "plus", "-": "minus"}


def arithmetic_problems(max_operand: int, split: Split, seed: int) -> Iterator[tuple[str, Problem]]:
    """Yields (id, problem), each problem of the split once; ids look like `arithmetic-7-plus-5`."""
    size = max_operand + 1
    for place in _shuffled(2 * size * size, f"arithmetic-{split}-{seed}"):
        sign, (left, right) = "+-"[place % 2], divmod(place // 2, size)
        if sign == "-" and left < right:
            continue
        task_id = f"arithmetic-{left}-{_WORDS[sign]}-{right}"
        if _split_of(task_id) == split:
            yield task_id, _problem(left, sign, right)


def sorting_problems(split: Split, seed: int) -> Iterator[tuple[str, Problem]]:
    for place in _shuffled(9**DIGITS, f"sorting-{split}-{seed}"):
        number = "".join(str(place // 9**digit % 9 + 1) for digit in range(DIGITS))
        if _split_of(task_id := f"sort-{number}") == split:
            answer = "".join(sorted(number))
            yield task_id, Problem(f"Sort {number}", answer, "number", "sorting")


def _split_of(task_id: str) -> Split:
    return _SPLITS[zlib.crc32(task_id.encode()) % len(_SPLITS)]


def _problem(left: int, sign: str, right: int) -> Problem:
    return Problem(
        question=f"What is {left}{sign}{right}?",
        answer=str(left + right if sign == "+" else left - right),
        kind="number",
        data_set="arithmetic",
        expression=f"{left}{sign}{right}",
    )


def _shuffled(count: int, seed: str) -> Iterator[int]:
    """Every number below `count` once, without keeping any: steps of one length around a circle."""
    rng = random.Random(seed)
    start = rng.randrange(count)
    step = next(n for n in iter(lambda: rng.randrange(1, count + 1), 0) if math.gcd(n, count) == 1)
    return ((start + step * number) % count for number in range(count))
