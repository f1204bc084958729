r"""Reads LaTeX as TeX does, and finds answers whose form the gold excludes. Pure.

In: a gold or an answer without `\boxed`. Out: the same mathematics in a form that math-verify
understands: braces around the arguments of `\frac` and `\sqrt`, plain numbers out of `\text{12}`
and `\pounds 12`, and `12 \times 10^{6}` for `12\text{ million}`.
"""

from __future__ import annotations

import re
from functools import lru_cache

_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|fbox)\s*"
_TOKEN = re.compile(r"\\sqrt\s*\[[^\[\]]*\]|\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)
_TWO_ARGUMENTS = ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac")
_CURRENCY = r"(?:\\pounds(?![A-Za-z])|\\euro(?![A-Za-z])|[£€¥])"
_NUMBER_IN_TEXT = re.compile(
    rf"{_TEXT}\{{(\s*(?:\\?\$|{_CURRENCY})?\s*[-+−]?\s*(?:\d[\d,.]*|\.\d+)\s*(?:\\?%)?\s*)\}}"
)
_SCALE = re.compile(
    rf"(?<=\d)(?:\\[,;:!> ]|~|\s)*+{_TEXT}\{{\s*(hundred|thousand|million|billion|trillion)\b"
    r"([^{}]*)\}$"
)
_IN_WORDS = re.compile(rf"\A(\d+)\s*{_TEXT}\{{\s*\(([a-z]+)\)\s*\}}\Z")
_WORDS = (  # noqa: SIM905 - read as a line
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen twenty"
).split()
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

_PRICE = re.compile(rf"([-+−]?)\s*(?:{_CURRENCY}|{_TEXT}\{{\s*{_CURRENCY}\s*\}})\s*(?=[\d.])")
_IN_BRACES = re.compile(r"\{([^{}]*)\}")
_POINT_AT_THE_END = re.compile(r"(?<=\d)\.$")
_REPEATING = re.compile(r"(?<!\d)(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s*\{\s*(\d{1,20})\s*\}")
_SPELLINGS = (
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\degree(?![A-Za-z])|(?<=\d)\s*°"), r"^\\circ"),
    (re.compile(rf"{_TEXT}\{{\s*(?:or|and)\s*\}}"), ", "),
    (re.compile(r"_\{\s*(\w)\s*\}"), r"_\1"),
    (re.compile(r"(?<!\\)~"), " "),
    (re.compile(r"(?<=\d)(?:\\[,;:!> ]|\\thinspace|[\u00a0\u2009\u202f])\s*(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\A\s*(?:\\(?:approx|simeq|thickapprox)(?![A-Za-z])|≈)\s*"), ""),
    (re.compile(r"\A([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,4})\Z"), r"\1 \\times 10^{\2}"),
    (re.compile(r"√\s*(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(?=[({])"), r"\\sqrt"),
    (re.compile(r"(?<=\S)[,;]\s*\Z"), ""),
    (re.compile(rf"\A{_TEXT}\{{\s*([-+]?\d[\d,.]*)(\s[^{{}}\d]*)\}}\Z"), r"\1\\text{\2}"),
)
"""Patterns that math-verify cannot read, with equivalents that it can."""

_EQUAL = re.compile(r"(?<![<>!:])=")
_ORDER = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt|leqslant|geqslant)(?![A-Za-z])")
_INTERVAL = re.compile(r"[\[(]|\\(?:in|cup|mathbb)(?![A-Za-z])")
_NAME = re.compile(
    r"\s*(?:[A-Za-z]|\\[A-Za-z]+(?:\{[^{}]*\})?)(?:_(?:\w|\{[^{}]*\}))?'*\s*(?:\([^()]*\))?\s*"
)
_NUMBER = re.compile(r"\s*-?[\d.,]+\s*")
_UNKNOWN = re.compile(r"\s*[A-Za-df-hj-z]\s*")
_SET = re.compile(r"\s*(?:\\left)?\\\{(?:(?!\\mid|[|:()]).)*\\\}\s*", re.DOTALL)
_TUPLE = re.compile(r"\s*(?:\\left)?\([^()]*,[^()]*\)\s*")
_BOUNDED = re.compile(
    r"(?P<name>\s*[A-Za-z]\s*\\in\s*)?(?:\\left)?[\[(][^,()\[\]]*,[^,()\[\]]*[\])]\s*"
)
_DIRECTIONS = {"<": "<", "\\lt": "<", ">": ">", "\\gt": ">"}
_BASE = re.compile(r".*\d_(?:(?=\d\s*$)|\{\s*)(\d+)\s*\}?\s*", re.DOTALL)


@lru_cache(maxsize=4096)
def readable(latex: str) -> str:
    """Returns `latex` in a form that math-verify reads as TeX does."""
    plain = latex.strip()
    if number := _NUMBER_IN_TEXT.fullmatch(plain) or _IN_BRACES.fullmatch(plain):
        plain = number[1].strip()
    if (said := _IN_WORDS.match(plain)) and said[2] in _WORDS[int(said[1]) : int(said[1]) + 1]:
        return said[1]
    plain = _POINT_AT_THE_END.sub("", _PRICE.sub(r"\1", plain, count=1))
    for pattern, replacement in _SPELLINGS:
        plain = pattern.sub(replacement, plain)
    return _SCALE.sub(_power_of_ten, with_braces(_REPEATING.sub(_fraction, plain)))


def with_braces(latex: str) -> str:
    r"""Puts braces around arguments without them: `\frac{\sqrt3}2` is `\frac{\sqrt{3}}{2}`.

    As in TeX an argument without braces is one token: `\frac123` is one half, then 3.
    """
    parts: list[str] = []
    missing = 0
    outer: list[int] = []  # arguments that are missing after each open brace
    for token in _TOKEN.findall(latex):
        part = token
        if token == "{":
            outer.append(max(0, missing - 1))
            missing = 0
        elif token == "}":
            missing = outer.pop() if outer else 0
        elif token in _TWO_ARGUMENTS:
            missing = 2
        elif token.startswith("\\sqrt"):
            missing = 1
        elif missing and not token.isspace():
            part, missing = f"{{{token}}}", missing - 1
        parts.append(part)
    return "".join(parts)


def as_asked(gold: str, answer: str) -> tuple[str, str]:
    """Returns both as intervals if one is an interval and the other an inequality.

    A gold such as `(0,3)` may be a point: it stays one, but with an infinite end.
    """
    interval = _BOUNDED.fullmatch(gold)
    if interval and (interval["name"] or re.search(r"[\[\]]|\\infty", gold)):
        return gold, _interval_of(answer) or answer
    if _BOUNDED.fullmatch(answer) and (as_interval := _interval_of(gold)):
        return as_interval, answer
    return gold, answer


def forms_differ(gold: str, answer: str) -> bool:
    """Returns whether `answer` has a form that cannot equal `gold`, though math-verify says so.

    It takes the right side of any equation, and the ends of an interval, for the whole; it drops
    the base of a number, and takes pairs for sets.
    """
    bases = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return True
    if _ORDER.search(gold):
        return not (_ORDER.search(answer) or _INTERVAL.search(answer))
    equation = _EQUAL.search(gold)
    if equation:
        left, right = gold[: equation.start()], gold[equation.end() :]
        relation = _UNKNOWN.fullmatch(left) and left.strip() != "y" and _UNKNOWN.fullmatch(right)
        solved = _NAME.fullmatch(left) and not relation
        return not solved and not _EQUAL.search(answer)
    kinds = [
        pattern for text in (gold, answer) for pattern in (_SET, _TUPLE) if pattern.fullmatch(text)
    ]
    if len(set(kinds)) == 2:
        return True
    sides = _EQUAL.split(answer)
    return len(sides) == 2 and all(map(_NUMBER.fullmatch, sides)) and sides[0] != sides[1]


def _power_of_ten(found: re.Match[str]) -> str:
    unit = f"\\text{{{found[2]}}}" if found[2].strip() else ""
    return f" \\times 10^{{{_POWERS[found[1]]}}}{unit}"


def _fraction(found: re.Match[str]) -> str:
    """Returns the fraction that a repeating decimal is."""
    whole, fixed, repeated = found.groups()
    before = int(f"0{whole}{fixed}")
    after = int(f"{before}{repeated}")
    return f"\\frac{{{after - before}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _interval_of(inequality: str) -> str | None:
    r"""Returns `[a,b)` for `a \le x < b`, `(-\infty,b]` for `x \le b`; None for anything else."""
    parts = _ORDER.split(inequality)
    signs = [_DIRECTIONS.get(sign, sign) for sign in _ORDER.findall(inequality)]
    strict = [sign in ("<", ">") for sign in signs]
    rising = [sign == "<" or sign.startswith("\\l") for sign in signs]
    if len(set(rising)) != 1:
        return None
    if not rising[0]:
        parts.reverse()
        strict.reverse()
    named = [bool(_UNKNOWN.fullmatch(part)) for part in parts]
    match named:
        case [False, True, False]:
            low, high = parts[0], parts[2]
        case [True, False]:
            low, high, strict = "-\\infty", parts[1], [True, *strict]
        case [False, True]:
            low, high, strict = parts[0], "\\infty", [*strict, True]
        case _:
            return None
    return f"{'(' if strict[0] else '['}{low.strip()},{high.strip()}{')' if strict[1] else ']'}"
