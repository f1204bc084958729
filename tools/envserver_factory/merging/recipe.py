"""The recipe of a merge: `base + alpha * (w1 * (plus1 - minus1) + w2 * (plus2 - minus2) + ...)`.

A reasoning vector is one such difference, `rl - sft`: what reinforcement learning added to its
start, given to another model of the same shape. Task arithmetic is several of them relative to the
base itself (Ilharco et al., "Editing Models with Task Arithmetic", 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envserver_records.errors import ConfigError


@dataclass(frozen=True)
class Vector:
    """A difference of two models and its weight.

    Args:
        minus: None stands for the base.
    """

    plus: Path
    minus: Path | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """A base and what is added to it, once for each alpha.

    Raises:
        ConfigError: nothing is added, or a number is invalid.
    """

    base: Path
    vectors: tuple[Vector, ...]
    alphas: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.vectors:
            raise ConfigError(
                "Nothing is to be added to the base.",
                hint="--rl DIR --sft DIR adds alpha * (rl - sft); --add DIR=0.3 adds a part of "
                "what DIR has beyond the base.",
            )
        if not self.alphas or len(set(self.alphas)) < len(self.alphas):
            raise ConfigError("--alpha needs numbers, each once.")
        for number in (*self.alphas, *(vector.weight for vector in self.vectors)):
            if not math.isfinite(number):
                raise ConfigError(f"{number} is not a weight: it must be finite.")

    def formula(self, alpha: str = "alpha") -> str:
        """Returns the formula as text, with the folders' names."""
        parts = [
            f"{'' if one.weight == 1 else f'{one.weight:g} * '}"
            f"({one.plus.name} - {(one.minus or self.base).name})"
            for one in self.vectors
        ]
        inside = parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"
        return f"{self.base.name} + {alpha} * {inside}"


def parse_parts(words: Sequence[str]) -> tuple[Vector, ...]:
    """Parses `DIR=0.3` as a difference from the base; `DIR` alone has the weight 1.

    Raises:
        ConfigError: the text after the last `=` is not a number.
    """
    vectors = []
    for word in words:
        folder, equals, weight = word.rpartition("=")
        if not equals:
            folder, weight = word, "1"
        try:
            vectors.append(Vector(Path(folder), None, float(weight)))
        except ValueError as error:
            raise ConfigError(
                f"--add {word}: {weight!r} is not a number.", hint="For example: --add DIR=0.3"
            ) from error
    return tuple(vectors)
