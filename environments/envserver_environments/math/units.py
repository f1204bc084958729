"""Units of measure, such as `cm`, `m/s^2`, `square feet` or `dollars`: size and dimensions, if each
word is known. Pure."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple


class Measure(NamedTuple):
    """A unit: 1 km/h is 5/18 of {m: 1, s: -1}."""

    size: Fraction
    dimensions: Counter[str]


_TABLE = """
m meter metre; s sec second; g gm gram; A amp ampere; K kelvin; mol mole; month; dollar $ USD
€ euro EUR; ¥ yen; am AM; pm PM; ° deg degree; rad radian; °C C° celsius; °F F° fahrenheit
in inch inche = 0.0254 m; ft foot feet = 0.3048 m; yd yard = 0.9144 m; mi mile = 1609.344 m
min minute = 60 s; h hr hour = 3600 s; d day = 86400 s; wk week = 604800 s; yr year = 12 month
lb pound £ = 453.59237 g; oz ounce = 28.349523125 g; tonne = 1000000 g; cent ¢ = 0.01 dollar
L l liter litre = 0.001 m^3; gal gallon = 3.785411784 L; qt quart = 0.946352946 L
pt pint = 0.473176473 L; ha hectare = 10000 m^2; acre = 4046.8564224 m^2; mph = mi/h
kph kmh kmph = km/h; N newton = kg m/s^2; J joule = N m; W watt = J/s; Pa pascal = N/m^2
Hz hertz = s^-1; C coulomb = A s; V volt = J/C; Ω ohm = V/A; F farad = C/V; T tesla = N/A m
"""
"""Names of units, and of which others they are made."""
_PREFIXES = {
    "kilo": 3, "centi": -2, "milli": -3, "deci": -1, "micro": -6, "nano": -9, "mega": 6, "giga": 9,
    "k": 3, "c": -2, "m": -3, "d": -1, "μ": -6, "µ": -6, "n": -9, "M": 6, "G": 9,
}  # fmt: skip
_PREFIXED = re.compile(rf"({'|'.join(_PREFIXES)})(.+)")
_PIECE = re.compile(
    r"(?P<per>/|\bper\b)?\s*(?P<before>(?:square|sq|cubic|cu)\b)?[.\s]*(?P<name>[^\W\d_]+|[°$£€¥¢]\s*[CF]?)"
    r"\s*(?:\^?\{?(?P<power>-?[1-9])\}?|(?P<behind>(?:squared|cubed)\b))?[\s.·*-]*"
)
_OPPOSITES = """
east west; north south; left right; up down; above below; profit loss; gain loss; ad bc
increase decrease; clockwise counterclockwise
"""
_WORD = re.compile("[a-z]+")
_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}


def measure(unit: str) -> Measure | None:
    """Returns what `unit` measures; None if a word of it is not a known unit."""
    size, dimensions, sign, at = Fraction(1), Counter[str](), 1, 0
    unit = re.sub(r"\bdegrees?\s+(?=[CFcf])|\.(?=\^)", "", unit.strip())
    unit = re.sub(r"\b([ap])\.\s?m\b", r"\1m", unit)
    while at < len(unit):
        piece = _PIECE.match(unit, at)
        known = _known(piece["name"].replace(" ", "")) if piece else None
        if piece is None or known is None:
            return None
        at = piece.end()
        sign = -1 if piece["per"] else sign
        word = piece["before"] or piece["behind"]
        power = sign * (_WORDS[word] if word else int(piece["power"] or 1))
        size *= known.size**power
        for name, count in known.dimensions.items():
            dimensions[name] += count * power
    return Measure(size, dimensions) if at else None


def conversion(given: str, wanted: str) -> Fraction | None:
    """Returns how many `wanted` one `given` is: 1 if either is unknown, None if they differ."""
    words = {*_WORD.findall(f"{given} {wanted}".lower())}
    if any({*_WORD.findall(pair)} <= words for pair in re.split("[;\n]", _OPPOSITES.strip())):
        return None
    own, other = measure(given), measure(wanted)
    if own is None or other is None:
        return Fraction(1)
    if "°" in (given, wanted) and {"°C", "°F"} & {*own.dimensions, *other.dimensions}:
        return Fraction(1)
    return own.size / other.size if own.dimensions == other.dimensions else None


def _known(name: str) -> Measure | None:
    lowered = name.lower() if len(name) > 2 else name
    for word in (name, name.removesuffix("s"), lowered, lowered.removesuffix("s")):
        if word in _UNITS:
            return _UNITS[word]
        if (parts := _PREFIXED.fullmatch(word)) and parts[2] in _UNITS:
            base = _UNITS[parts[2]]
            return Measure(base.size * Fraction(10) ** _PREFIXES[parts[1]], base.dimensions)
    return None


def _read_table() -> None:
    for entry in re.split(r"[;\n]", _TABLE.strip()):
        names, _, made = entry.partition(" = ")
        number, _, of = made.rpartition(" ") if made[:1].isdigit() else ("1", "", made)
        unit = measure(of) or Measure(Fraction(1), Counter(names.split()[:1]))
        size = unit.size * Fraction(number)
        _UNITS.update(dict.fromkeys(names.split(), Measure(size, unit.dimensions)))


_UNITS: dict[str, Measure] = {}
_read_table()
