"""The recipe of a merge: `base + alpha * (w1 * (plus1 - minus1) + w2 * (plus2 - minus2) + ...)`.

Task arithmetic (Ilharco et al., "Editing Models with Task Arithmetic", 2022): a reasoning vector is
one such difference, `rl - sft`, given to another model of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envserver_records.errors import ConfigError


@dataclass(frozen=True)
class Vector:
    """A difference of two models and its weight; `minus` None stands for the base.

    `plus` may also be the file of a task vector, which is the difference itself.
    """

    plus: Path
    minus: Path | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Recipe:
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
        for vector in self.vectors:
            if vector.minus is not None and (vector.plus.is_file() or vector.minus.is_file()):
                raise ConfigError(
                    "--rl and --sft take models; a task vector is a difference already.",
                    hint="Add it with --add FILE.",
                )
        for number in (*self.alphas, *(vector.weight for vector in self.vectors)):
            if not math.isfinite(number):
                raise ConfigError(f"{number} is not a weight: it must be finite.")

    def formula(self, alpha: str = "alpha") -> str:
        inside = self.difference()
        return f"{self.base.name} + {alpha} * {inside if len(self.vectors) == 1 else f'({inside})'}"

    def difference(self) -> str:
        return " + ".join(
            f"{'' if one.weight == 1 else f'{one.weight:g} * '}{self._difference(one)}"
            for one in self.vectors
        )

    def _difference(self, vector: Vector) -> str:
        if vector.plus.is_file():
            return vector.plus.name
        return f"({vector.plus.name} - {(vector.minus or self.base).name})"


def parse_parts(words: Sequence[str]) -> tuple[Vector, ...]:
    """Parses `DIR=0.3` as a difference from the base, `FILE=0.3` as a task vector; weight 1 without
    `=`.
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
