"""Decides with math-verify whether an answer equals the gold, whatever the answer contains.

It may cost minutes and gigabytes (`9^{9^9}`). So each comparison runs in a process forked from the
warm scorer, with limits of memory and CPU time (wall time would fail right answers on a busy
machine). math-verify is not symmetric: the gold comes first, else an answer may repeat a condition
of the problem instead of solving it. Where it is wrong, the form decides first (see `forms`).
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import logging
import math
import os
import re
import resource
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from envserver_records.extras import install_command

from envserver import ConfigError

from .forms import (
    as_asked,
    forms_differ,
    same_family,
    same_in_base,
    same_logic,
    same_residues,
    same_words,
)
from .latex import quantity, readable, without_marks
from .literals import changes_number, lists_differ, plain_number
from .units import conversion, measure
from .values import value_of, values_differ

_MOST_DIGITS = 1_000_000
_MOST_CHOSEN = 20_000
"""A binomial coefficient is multiplied together in so many steps."""
_MOST_DIGITS_OF_ROOTS = 1000
_MOST_TERMS = 250
_DEEPEST = 50
_TOKEN = re.compile(r"\d[\d,]*(?:\.\d+)?|\*\*|\\[A-Za-z]+|!!?|[^\s\\]")
_OPENING = {"{": "}", "(": ")", "[": "]"}
_POWERS = ("^", "**")
_BINOMIALS = ("\\binom", "\\dbinom", "\\tbinom")
_ROOTS = ("\\sqrt", "\\ln", "\\log")
_FRACTIONS = ("/", "\\frac", "\\dfrac", "\\tfrac", "\\cfrac")
_OF_NUMBERS = (*_FRACTIONS, "\\cdot", "\\times", "\\div")


def is_huge(latex: str) -> bool:
    """Returns whether evaluating `latex` would take unreasonable time for its length."""
    tokens = [token for token in _TOKEN.findall(latex) if token not in ("\\left", "\\right")]
    return _Reader(tokens).largest() > _MOST_DIGITS


class _Size(NamedTuple):
    """The decimal logarithm of a formula's value, and its terms when multiplied out: 1 of a
    number."""

    digits: float = 0.0
    terms: int = 0
    names: frozenset[str] = frozenset()

    def times(self, other: _Size) -> _Size:
        """The size of the product; its terms are those of polynomials of one name."""
        terms = max(self.terms, other.terms, self.terms + other.terms - 1)
        return _Size(self.digits + other.digits, terms, self.names | other.names)


_ENDLESS = _Size(math.inf, 1)


class _Reader:
    """Reads tokens; every method returns upper bounds."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def largest(self) -> float:
        """Reads all tokens, also behind a bracket that nothing opened."""
        digits = 0.0
        while self._at < len(self._tokens):
            digits += self._sequence("", 0).digits
        return digits

    def _sequence(self, until: str, depth: int) -> _Size:
        """Reads up to the token `until`, a sum of products."""
        products = [_Size()]
        while (token := self._next()) not in ("", until):
            if token in ("+", "-"):
                products.append(_Size())
            else:
                products[-1] = products[-1].times(self._part(token, depth))
        named = sum(size.terms for size in products if size.names)
        numbers = any(size.terms for size in products if not size.names)
        digits = max(size.digits for size in products) + math.log10(len(products))
        names = frozenset[str]().union(*(size.names for size in products))
        return _Size(digits, named + numbers, names)

    def _part(self, token: str, depth: int) -> _Size:
        size = self._atom(token, depth)
        while (sign := self._peek()) in (*_POWERS, "!", "!!"):
            self._next()
            size = _factorial(size) if sign[0] == "!" else self._power(size, depth)
        return size

    def _power(self, base: _Size, depth: int) -> _Size:
        start = self._at
        exponent = self._argument(depth)
        if depth < _DEEPEST and self._peek() in _POWERS:
            self._next()
            exponent = self._power(exponent, depth + 1)
        is_root = any(token in _FRACTIONS for token in self._tokens[start : self._at])
        if exponent.digits > _MOST_DIGITS_OF_ROOTS or (is_root and _is_long(base)):
            return _ENDLESS
        times = _value(exponent.digits)
        if base.names and base.terms > 1 and not exponent.names:
            terms = _terms_of_power(base, int(times)) if times <= _MOST_TERMS else math.inf
            if terms > _MOST_TERMS:
                return _ENDLESS
            base = base._replace(terms=int(terms))
        return base._replace(digits=base.digits * times if base.digits else 0.0)

    def _argument(self, depth: int) -> _Size:
        """Reads what a power, an index or a binomial coefficient applies to: in TeX one token."""
        if depth >= _DEEPEST:
            return _Size()
        token = self._next()
        if token in ("+", "-"):
            token = self._next()
        return self._atom(token, depth + 1) if token else _Size()

    def _atom(self, token: str, depth: int) -> _Size:
        if token in _OPENING:
            return self._sequence(_OPENING[token], depth + 1) if depth < _DEEPEST else _Size()
        if token[0].isdecimal():
            whole, _, decimals = token.replace(",", "").partition(".")
            digits = whole.lstrip("0")
            first = float(f"{digits[:15] or 0}.{decimals[:15]}")
            return _Size(max(0, len(digits) - 15) + max(0.0, math.log10(first or 1)), 1)
        if token in _BINOMIALS:
            upper, lower = self._argument(depth), self._argument(depth)
            chosen = min(_value(upper.digits), _value(lower.digits))
            return _ENDLESS if chosen > _MOST_CHOSEN else upper
        if token in _ROOTS:
            if self._peek() in ("[", "_"):
                self._argument(depth)
            radicand = self._argument(depth)
            return (
                _ENDLESS
                if _is_long(radicand)
                else radicand._replace(terms=1, names=radicand.names | {token})
            )
        if token == "_":  # an index, or the limits of a sum
            limits = [self._argument(depth)]
            if self._peek() == "^":
                self._next()
                limits.append(self._argument(depth))
            return max(limits)
        is_name = token.isalpha() or (token[0] == "\\" and token not in _OF_NUMBERS)
        return _Size(terms=int(is_name), names=frozenset([token] if is_name else []))

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""


def _is_long(size: _Size) -> bool:
    return size.digits > _MOST_DIGITS_OF_ROOTS


def _terms_of_power(base: _Size, exponent: int) -> int:
    if len(base.names) == 1:
        return (base.terms - 1) * exponent + 1
    return math.comb(exponent + base.terms - 1, exponent)


def _factorial(size: _Size) -> _Size:
    value = _value(size.digits)
    digits = math.lgamma(value + 1) / math.log(10) if value < math.inf else math.inf
    return size._replace(digits=digits)


def _value(digits: float) -> float:
    return 10**digits if digits < 12 else math.inf


CPU_SECONDS = 0.8
"""Limit of one comparison; the slowest of 534 labelled pairs takes 0.17."""
_NO_TIMEOUT = None
"""math-verify's own limits are by the clock, so a busy machine would decide; those here are not."""
KILL_SECONDS = 100.0
"""Time by the clock after which the process is killed, whatever it does."""
MEMORY_BYTES = 1 << 30
"""Memory that one comparison may use beyond the scorer's."""

_ROUNDED = Fraction(1, 10_000)
"""Numbers that differ by more are never equal to math-verify, which rounds to six decimals."""
_SMALL, _NEAR = Fraction(1, 10), Fraction(5, 1_000_000)
"""Below _SMALL rounding makes different numbers equal; they may differ by the share _NEAR, which
math-verify allows for a number as large as _SMALL."""
_INTEGER = re.compile(r"-?[0-9]{1,100}")
_IN_PERCENT = re.compile(r"%|\bper\s?cent", re.IGNORECASE)
_EQUAL = re.compile(r"(?<![<>!])=|\\approx(?![A-Za-z])")
_OR = re.compile(r"\\lor(?![A-Za-z])")
_OPERATORS = tuple("+-*/^")
_SINE = re.compile(r"\\(?:sin|cos)\s*(?:\([^()]*\)|\\?[A-Za-z]+|\{[^{}]*\})")
_SIZE = re.compile(r"\|[^|]*\|")
_NOT_READ = re.compile(r"[{}]|\\(?:left|right)(?![A-Za-z])|(?<=\\)[dt](?=frac)|\\[,;! ]")
_NAMES = re.compile(r"\\?[A-Za-z]+(?:_\w)?")
_OPERATIONS = {*_OF_NUMBERS, "\\sqrt", "\\pi", "e"}
_REMAINDER = re.compile(r"(?<![\w.)}])(\d{1,18})\s*(?:\\b?mod|\bmod)\s*([1-9]\d{0,17})(?![\w.])")
_FUNCTION_OR_SIZE = re.compile(r"[A-Za-z]\s*\(|\|")
_PERCENT = re.compile(r"(.*[^\s\\])\s*\\?%", re.DOTALL)
_BLANK = re.compile(r"\s+(?!\w)|(?<!\w)\s+")
"""Blanks that do not hold two words or numbers apart."""

_WARM_UP = (
    ("12", "-7"),
    (r"\frac{1}{2}", "0.5"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("x^2+2x", "x(x+2)"),
    ("y=2x+1", "x=4"),
    (r"\{1,2\}", "(1,2]"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ("3+4i", r"2\pi"),
    ("x<2", "1<x<2"),
    (r"50\%", r"1{,}000\text{ cm}"),
)


class Verdict(enum.StrEnum):
    """The outcome of a comparison."""

    EQUAL = "equal"
    DIFFERENT = "different"
    KILLED = "killed"
    """Not decided within the limits, or not tried: see `is_huge`."""
    BAD_GOLD = "bad_gold"
    """The gold does not even equal itself."""


def compare(gold: str, answer: str, *, lenient: bool = False, question: str = "") -> Verdict:
    r"""Compares `answer` with `gold`, both LaTeX without `\boxed`.

    Args:
        lenient: also accept plain expressions, as math-verify does by default.
        question: if it asks for percents, `7\%` equals the gold `7`; if for `2x`, `2x=7` does.
    """
    decided = _decided(gold, answer)
    if decided is not None:
        return Verdict.EQUAL if decided else Verdict.DIFFERENT
    family = same_family(readable(gold), readable(answer))
    if family is None:
        return Verdict.DIFFERENT
    wanted, unit = quantity(family[0])
    given, own = quantity(family[1], letters=bool(unit) or plain_number(wanted) is not None)
    given = _spelled_once(wanted, given)
    wanted, given = _percents(wanted, given, in_percent=_IN_PERCENT.search(question) is not None)
    wanted, unit = _in_radians(wanted, unit, given, own)
    given, own = _in_radians(given, own, wanted, unit)
    ratio = conversion(own, unit)
    if ratio is None or changes_number(own) or wanted.count("'") != given.count("'"):
        return Verdict.DIFFERENT
    for compared in (same_residues, same_logic):
        if (alike := compared(wanted, given)) is not None:
            return Verdict.EQUAL if alike else Verdict.DIFFERENT
    pair = as_asked(wanted, given)
    if pair is None or forms_differ(*pair) or (result := _result(*pair, question)) is None:
        return Verdict.DIFFERENT
    wanted, given = pair[0], result
    gold_number, number = plain_number(wanted), plain_number(given)
    if gold_number is not None and number is not None:
        # Also what math-verify says. Between the two it rounds, and is asked.
        if gold_number == number * ratio:
            return Verdict.EQUAL
        if abs(gold_number - number * ratio) > _ROUNDED or not _near(gold_number, number * ratio):
            return Verdict.DIFFERENT
    if ratio != 1:
        given = f"\\frac{{{ratio.numerator}}}{{{ratio.denominator}}} \\cdot ({given})"
    if lists_differ(wanted, given) or values_differ(value_of(wanted), value_of(given)):
        return Verdict.DIFFERENT
    if is_huge(given) or is_huge(wanted):
        return Verdict.KILLED
    return _decide((wanted, given, lenient))


def _decided(gold: str, answer: str) -> bool | None:
    """Decides what needs no mathematics; None for all else."""
    if _words(answer) == _words(gold):
        return True
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        # Most answers by far, and what math-verify says of them: 25 times less work.
        return int(gold) == int(answer)
    gold, answer = without_marks(gold), without_marks(answer)
    alike = same_words(gold, answer)
    return same_in_base(gold, answer) if alike is None else alike


def _spelled_once(gold: str, answer: str) -> str:
    r"""Returns the side of `\frac34 \lor 75\%` nearest to the gold, if all are one number."""
    sides = [side.strip() for side in _OR.split(answer)]
    wanted, values = _number(gold), [_number(side) for side in sides]
    if wanted is None or None in values or any(values_differ(values[0], value) for value in values):
        return answer
    return min(sides, key=lambda side: abs((_number(side) or 0) - wanted))


def _number(side: str) -> complex | None:
    if _names_in(side):
        return None
    percent = _PERCENT.fullmatch(side)
    value = value_of(percent[1] if percent else side)
    return value / 100 if percent and value is not None else value


def _names_in(side: str) -> set[str]:
    return {*_NAMES.findall(side)} - _OPERATIONS


def _result(gold: str, answer: str, question: str) -> str | None:
    """Returns `answer`, or the side of it nearest to the gold if that is no equation. None if it is
    wrong or not solved, as `1+1=3` or `2x=3` for 3, unless the question asks for `2x`: to
    math-verify the last side of any equation is the answer."""
    *sides, last = map(str.strip, _EQUAL.split(answer))
    if not sides or _EQUAL.search(gold):
        return answer
    value, number = value_of(last), plain_number(last)
    # Half of the last decimal, and what floats lose.
    places = len(last.partition(".")[2])
    rounding = 0.51 / 10**places if places or "\\approx" in answer else 0
    numbers = [] if value is None else [(last, value)]
    for side in (_REMAINDER.sub(_remainder, side) for side in sides):
        names = _names_in(side)
        own = None if _FUNCTION_OR_SIZE.search(side) else value_of(side)
        if side[-1:] in _OPERATORS or (number is not None and _is_impossible(side, number)):
            return None
        if side in names or (own is None and not (names and side.endswith("!"))):
            continue
        if names or own is None:
            if len(sides) == len(names) == 1 and not _is_asked(side, question):
                return None
        elif value is not None and values_differ(own, value) and abs(own - value) > rounding:
            return None
        else:
            numbers.append((side, own))
    wanted = value_of(gold)
    if wanted is None or not numbers or "," in "".join(sides):
        return answer if number is None or "," in "".join(sides) else last
    return min(numbers, key=lambda known: abs(known[1] - wanted))[0]


def _remainder(found: re.Match[str]) -> str:
    return str(int(found[1]) % int(found[2]))


def _is_impossible(side: str, number: Fraction) -> bool:
    """Returns whether no real number has this sine, cosine or absolute value."""
    size = number < 0 and _SIZE.fullmatch(side)
    return bool(size or (abs(number) > 1 and _SINE.fullmatch(side)))


def _is_asked(side: str, question: str) -> bool:
    term, text = (_BLANK.sub("", _NOT_READ.sub("", part)) for part in (side, question))
    return re.search(rf"(?<![\w.+*/^-]){re.escape(term)}(?![-+*/^=\w(])", text) is not None


def _in_radians(value: str, unit: str, other: str, other_unit: str) -> tuple[str, str]:
    r"""Returns degrees as radians, without a unit, if the other angle has `\pi` and no degrees."""
    if measure(unit) == measure("°") and "\\pi" in other and measure(other_unit) != measure("°"):
        return f"\\frac{{\\pi}}{{180}} \\cdot ({value})", "rad"
    return value, unit


def _percents(gold: str, answer: str, *, in_percent: bool) -> tuple[str, str]:
    r"""Returns both with the same percent sign: `7\%` equals 7 if the gold or the question has
    percents, else 0.07."""
    wanted, given = _PERCENT.fullmatch(gold), _PERCENT.fullmatch(answer)
    bare = (wanted[1] if wanted else gold), (given[1] if given else answer)
    if bool(wanted) == bool(given):
        return bare
    numbers = [value_of(side) for side in bare]
    known = None not in numbers
    if (wanted or in_percent) and known and not values_differ(*numbers):
        return bare
    if wanted:
        gold = f"\\frac{{{wanted[1]}}}{{100}}"
    if given and (known or not in_percent):
        answer = f"\\frac{{{given[1]}}}{{100}}"
    return gold, answer


Case = tuple[str, str, bool]
"""A gold and an answer that math-verify compares, and whether it is lenient."""
_known: dict[Case, Verdict] = {}
_waiting: list[Case] | None = None


@contextmanager
def compared_together() -> Iterator[None]:
    """Within the block `compare` only notes what it is asked, which no model wrote. At the end one
    child compares all of it, each with its own limits; after a failure another child goes on."""
    global _waiting
    cases: list[Case] = []
    _waiting = cases
    _known.clear()
    try:
        yield
    finally:
        _waiting = None
    left = list(dict.fromkeys(cases))
    while left:
        verdicts = [*_in_child(left), Verdict.KILLED][: len(left)]
        _known.update(zip(left, verdicts, strict=False))
        left = left[len(verdicts) :]


def _decide(case: Case) -> Verdict:
    if _waiting is not None:
        _waiting.append(case)
    elif case not in _known:
        return next(_in_child([case]), Verdict.KILLED)
    return _known.get(case, Verdict.KILLED)


@dataclass(frozen=True)
class _Library:
    parse: Any
    verify: Any
    strict: list[Any]
    lenient: list[Any]

    def parsed(self, latex: str, *, lenient: bool = False) -> list[Any]:
        parsed: list[Any] = self.parse(
            f"\\boxed{{{latex}}}",
            self.lenient if lenient else self.strict,
            extraction_mode="any_match" if lenient else "first_match",
            parsing_timeout=_NO_TIMEOUT,
        )
        return parsed

    def same(self, wanted: Any, given: Any) -> bool:
        return bool(self.verify(wanted, given, timeout_seconds=_NO_TIMEOUT))


@functools.cache
def _library() -> _Library:
    """Loads math-verify when an answer first needs it: 0.8 s of CPU, which most runs can save."""
    try:
        math_verify = importlib.import_module("math_verify")
        latex = importlib.import_module("latex2sympy2_extended.latex2sympy2")
    except ImportError as error:
        raise ConfigError(
            f"Scoring mathematics needs math-verify, which cannot be imported: {error}.",
            hint=install_command("math"),
        ) from error
    # A timeout is an ordinary verdict here, not worth a line on stderr each.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # Else the names of a formula with a separate `i` are others than those of one with `2i`.
    math_verify.parser.should_treat_as_complex = lambda latex: False
    # By default R is r, and R^2-r^2 is 0.
    math_verify.parser.latex2sympy = functools.partial(
        latex.latex2sympy, conversion_config=latex.ConversionConfig(lowercase_symbols=False)
    )
    strict = math_verify.LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=latex.NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="all"
        ),
    )
    library = _Library(
        math_verify.parse,
        math_verify.verify,
        [strict],
        [math_verify.ExprExtractionConfig(), strict],
    )
    # Comparisons of every kind: children inherit what the parser and sympy have loaded.
    for gold, answer in _WARM_UP:
        first = library.parse(f"\\boxed{{{gold}}}", library.strict)
        library.verify(first, library.parse(f"\\boxed{{{answer}}}", library.strict))
    return library


@functools.lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> tuple[Any, ...]:
    return tuple(_library().parsed(gold))


def _words(latex: str) -> str:
    return _BLANK.sub("", without_marks(latex))


def _verdict(gold: tuple[Any, ...], answer: str, lenient: bool) -> Verdict:
    library = _library()
    parsed = library.parsed(answer, lenient=lenient)
    if library.same(list(gold), parsed):
        agreed = not (gold and parsed) or _agree(gold[0], parsed[0])
        return Verdict.EQUAL if agreed else Verdict.DIFFERENT
    # No gold is blamed for a wrong answer unless it fails its own comparison.
    fit = library.same(list(gold), list(gold))
    return Verdict.DIFFERENT if fit else Verdict.BAD_GOLD


def _near(wanted: Any, given: Any) -> bool:
    """Returns whether a small number, or zero, is near in proportion to its size."""
    return bool(abs(wanted) >= _SMALL or abs(wanted - given) <= _NEAR * abs(wanted))


def _agree(wanted: Any, given: Any) -> bool:
    """Returns whether values that math-verify calls equal have as many parts, each of them near: it
    compares sets without repetitions, and rounds to six decimals."""
    if _kind(wanted) == _kind(given) == "Equality" and wanted.lhs != given.lhs:
        return True
    if _kind(wanted) == _kind(given) == "Symbol":  # Delta is not delta
        return str(wanted) == str(given)
    wanted, given = (
        value.rhs if _kind(value) == "Equality" else value for value in (wanted, given)
    )
    wanted_parts, given_parts = _parts(wanted), _parts(given)
    if _kind(wanted) == _kind(given) == "FiniteSet":
        key = importlib.import_module("math_verify.grader").sort_key
        wanted_parts, given_parts = sorted(wanted_parts, key=key), sorted(given_parts, key=key)
    if [wanted_parts, given_parts] == [[wanted], [given]]:
        return _are_near(wanted, given)
    if len(wanted_parts) != len(given_parts):  # an interval may equal a union
        return not {_kind(wanted), _kind(given)} & {"FiniteSet", "Tuple"}
    same = _library().same
    return all(
        same(*pair) and _agree(*pair) for pair in zip(wanted_parts, given_parts, strict=True)
    )


def _kind(value: Any) -> str:
    return type(value).__name__


def _parts(value: Any) -> list[Any]:
    match _kind(value):
        case "FiniteSet":
            return list(getattr(value, "_unsorted_args", value.args))
        case "Interval":
            return [value.start, value.end]
        case "Tuple":
            return list(value.args)
    return list(value.flat()) if hasattr(value, "flat") else [value]


def _are_near(wanted: Any, given: Any) -> bool:
    """Compares the coefficients of two expressions, or their values if they have different ones."""
    if wanted == given or not all(
        hasattr(value, "as_coefficients_dict") for value in (wanted, given)
    ):
        return True
    wanted_terms, given_terms = (
        value.doit().expand().as_coefficients_dict() for value in (wanted, given)
    )
    if wanted_terms.keys() == given_terms.keys():
        return all(_near(wanted_terms[term], given_terms[term]) for term in wanted_terms)
    point = {
        name: Fraction(7, 10 + at)
        for at, name in enumerate(sorted(wanted.free_symbols | given.free_symbols, key=str))
    }
    values = [value.doit().subs(point).evalf() for value in (wanted, given)]
    return not all(value.is_number and value.is_finite for value in values) or all(
        map(_near, *(value.as_real_imag() for value in values))
    )


def _in_child(cases: Sequence[Case]) -> Iterator[Verdict]:
    """Yields the verdicts of a forked process that cannot harm this one, up to a failure."""
    # Parsed here and not in the child, so that the parser's caches help the next answer.
    parsed = [(_parsed_gold(gold), answer, lenient) for gold, answer, lenient in cases]
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(parsed, write_end)
    os.close(write_end)
    written = b""
    try:
        while select.select([read_end], [], [], KILL_SECONDS)[0] and (
            part := os.read(read_end, 4096)
        ):
            written += part
    finally:
        os.close(read_end)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return map(Verdict, written.decode().split())


def _be_the_child(cases: Sequence[tuple[tuple[Any, ...], str, bool]], write_end: int) -> NoReturn:
    """Writes the verdicts and ends, whatever is raised (a timeout is a BaseException)."""
    try:
        _limit_memory()
        for case in cases:
            # Not RLIMIT_CPU, which counts whole seconds. The signal's default action ends the
            # process, whatever C code of a library is running.
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            os.write(write_end, f"{_verdict(*case)}\n".encode())
    finally:
        os._exit(0)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
