r"""Reads LaTeX as TeX does. Pure.

The result is a form that math-verify understands: braces around the arguments of `\frac`, plain
numbers out of `\text{12}`, `12 \times 10^{6}` for `12\text{ million}`, units as `\text{...}`.
"""

from __future__ import annotations

import re
from functools import lru_cache

from envserver_environments.demonstrations import table_beside

from .units import measure

TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|fbox)\s*"
SPACE = r"(?:\\[,;:!> ]|\\q?quad(?![A-Za-z])|~|\s)"
_NESTED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"
_TOKEN = re.compile(r"\\sqrt\s*\[[^\[\]]*\]|\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)
_TWO_ARGUMENTS = (
    "\\frac", "\\dfrac", "\\tfrac", "\\cfrac", "\\binom", "\\dbinom", "\\tbinom",
)  # fmt: skip
_CURRENCY = (
    r"(?:\\pounds(?![A-Za-z])|\\euro(?![A-Za-z])|\\?\$|[£€¥₹]|Rs\b\.?|(?:USD|EUR|GBP|INR)\b)"
)
_NUMBER_IN_TEXT = re.compile(
    rf"{TEXT}\{{(\s*+{_CURRENCY}?\s*+[-+]?\s*+(?:\d[\d,.]*|\.\d+)\s*(?:\\?%)?\s*)\}}"
)
_SCALE = re.compile(
    rf"(?<=\d){SPACE}*+{TEXT}\{{\s*(hundred|thousand|[kK]|million|billion|trillion)\b([^{{}}]*)\}}$"
)
_IN_WORDS = re.compile(rf"\A(\d+){SPACE}*(?:{TEXT}\{{)?\s*\(([a-z]+)\)\s*\}}?\Z")
_WORDS = (  # noqa: SIM905 - read as a line
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_POWERS = {
    "hundred": 2, "thousand": 3, "k": 3, "K": 3, "million": 6, "billion": 9, "trillion": 12,
}  # fmt: skip

_NUMBERS = dict(zip(_WORDS, range(20), strict=True)) | {
    f"{ten}{unit}": 10 * place + number
    for place, ten in enumerate(_TENS.split(), 2)
    for number, unit in enumerate(["", *_WORDS[1:10]])
}
_NOTHING = "nosolution nosolutions norealsolution norealsolutions emptyset theemptyset"
MEANINGS = {
    **{word: str(number) for word, number in _NUMBERS.items()},
    **{
        f"{word}{scale}": f"{number}{'0' * zeros}"
        for word, number in _NUMBERS.items()
        for scale, zeros in _POWERS.items()
        if len(scale) > 1
    },
    **dict.fromkeys(_NOTHING.split(), "\\emptyset"),
    "allrealnumbers": "\\mathbb{R}", "allreals": "\\mathbb{R}",
    "infinity": "\\infty", "doesnotexist": "DNE", "onehalf": "\\frac{1}{2}",
}  # fmt: skip
"""The meaning of a phrase in TeX; a key has the letters of its phrase only."""
_PRICE = re.compile(
    rf"([-+]?)\s*(?:({_CURRENCY})|{TEXT}\{{\s*({_CURRENCY})\s*\}}){SPACE}*([-+]?[\d.].*)"
)
_IN_BRACES = re.compile(r"\{([^{}]*)\}")
_DIGITS = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
_REPEATING = re.compile(r"(?<!\d)(\d{0,20})\.(\d{0,20})\\overline\{(\d{1,20})\}")
_HELD = table_beside(__file__)
_UNICODE = str.maketrans(
    _HELD["unicode"] | {chr(place + 0xFEE0): chr(place) for place in range(33, 127)}
)
_STYLES = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|bf|rm|it|sf|tiny|small|large|Large|LARGE|huge|Huge|displaystyle"
    r"|textstyle|checkmark)(?![A-Za-z])"
)
_FUNCTIONS = r"(arc(?:sin|cos|tan)|sin|cos|tan|sec|csc|cot|ln|log|exp|pi)"
_SUPERSCRIPT = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_OUTSIDE = r"(?![A-Za-z]|[^{}]*[^\\{}]\})"
"""Behind a plain word that is not in braces."""
_ABOUT = r"(?:(?:the )?(?:correct |final )?(?:answer|option|choice)\b(?: is)?\s*:?\s*)?"
_OPTION = (
    r"(?P<letter>\(?[A-E]\)?[.:]?(?=\s*\}?\s*\Z)"
    r"|(?-i:\([A-E]\)(?=[\s}\\~:])|[A-E](?:[.)]|:(?=[\s}])))"
    rf"(?=(?:{SPACE}|[}}$:])*(?!(?:\\text\{{\s*)?(?:or|and|[A-E]\}}?\Z)\b)(?:[-+]?[\d.$]|[a-z(\[]|\\(?:\$|[a-z]*(?:text|math|frac|sqrt|pi)))))"
)
_NAME = (
    r"(?!.*\b(?:(?:not?|isn|least|most|than)\b|lambda\b[^:]*:))"
    r"(?:the )?(?P<name>[a-z][a-z '-]{2,}?)\s*(?::|(?=\}\s*:)|\b(?:is|are)(?=[^a-z]*\d)|=(?=\s*\}))"
)
_LABELLED = re.compile(
    rf"(?P<inside>{TEXT}\{{)?\s*{_ABOUT}(?:{_OPTION}|{_NAME})?(?P<outside>\s*\}})?(?:{SPACE}|:)*"
    r"(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)
_ROWS = re.compile(
    r"(?:\\\{\s*)?\\begin\{(cases|array|matrix|split|align\*?|(?:align|gather)ed)\}(?:\{[lcr]*\})?(.*)\\end\{\1\}",
    re.DOTALL,
)
_EQUATION = re.compile(r"[^&=<>,]*&?=&?[^&=<>,]*")
_OUTWARD = re.compile(
    r"((?:\A|\\(?:cup|in)(?![A-Za-z])|,)\s*)([\[\](])([^\[\](),;]+)[,;]([^\[\](),;]+)([\[\])])"
    r"(?=\s*(?:\Z|\\cup|,))"
)
_TRANSPOSED = re.compile(
    r"(?:[(\[]([^()\[\]&]*,[^()\[\]&]*)[)\]]|\\begin\{([pb]matrix)\}(.*)\\end\{\2\})"
    r"\s*\^\s*\{?\s*(?:\\(?:top|intercal)|(?:\\[a-z]+\{)?[Tt]\}?)\s*\}?",
    re.DOTALL,
)
_PARTS = {
    "TEXT": TEXT, "SPACE": SPACE, "ORDINAL": "(?:st|nd|rd|th)", "FUNCTIONS": _FUNCTIONS,
    "NESTED": _NESTED, "OUTSIDE": _OUTSIDE,
}  # fmt: skip
_SPELLINGS = [
    (re.compile(re.sub("%([A-Z]+)%", lambda name: _PARTS[name[1]], pattern)), replacement)
    for pattern, replacement in _HELD["spellings"]
]
"""Patterns that math-verify cannot read, with equivalents that it can."""
_GROUPS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_WORDS_BEHIND = re.compile(
    rf"([-+]?(?:\d[\d,.:]*|\.\d+)(?:\s*/\s*\d+)?)({SPACE}*)"
    r"((?:[A-Za-zΩ€£¥¢]|\\(?:Omega|mu)(?![A-Za-z]))"
    r"(?:[A-Za-zΩ ./^0-9{}-]|\\(?:Omega|cdot)(?![A-Za-z]))*)"
)
_UNIT = re.compile(
    rf"(?P<value>.*?[\w)}}\]!%|])(?P<unit>(?:(?:{SPACE}|\\cdot|[/*])*+"
    r"(?:\\(?:text|textrm|textnormal|mathrm|mbox)\s*\{(?:[^{}]|\{[^{}]*\})*\}|\^\\circ(?:\s*[CF](?![A-Za-z]))?"
    r"|(?<=[\d ,}])\\(?:Omega(?![A-Za-z])|mu(?=\s*\\(?:text|mathrm))))"
    r"(?:\s*\^(?:\{\s*-?\d\s*\}|\d))?)+)\s*"
)
_LETTER = re.compile(rf"([-+]?[\d.,]*\d){SPACE}*([A-Za-z])")
_NOT_OF_UNITS = re.compile(r"\\(?:text|mathrm|mbox)[a-z]*(?=\s*\{)|[{}]|\\[A-Za-z]+|\\.|~")


@lru_cache(maxsize=4096)
def readable(latex: str) -> str:
    """Returns `latex` in a form that math-verify reads as TeX does."""
    if _DIGITS.fullmatch(latex):
        return latex
    plain = _SUPERSCRIPT.sub(_raised, _STYLES.sub("", without_marks(latex)))
    plain = plain.translate(_UNICODE).strip()
    plain = labelled(plain)[1] or plain
    if number := _NUMBER_IN_TEXT.fullmatch(plain) or _IN_BRACES.fullmatch(plain):
        plain = number[1].strip()
    for pattern, replacement in _SPELLINGS:
        plain = pattern.sub(replacement, plain)
    plain = _OUTWARD.sub(_inward, _TRANSPOSED.sub(_transposed, _ROWS.sub(_solutions, plain)))
    plain = plain.strip()
    if (said := _IN_WORDS.match(plain)) and MEANINGS.get(said[2]) == said[1]:
        return said[1]
    if _GROUPS.fullmatch(plain):
        plain = plain.replace(" ", "")
    if (found := _WORDS_BEHIND.fullmatch(plain)) and _are_words(found[2], found[3]):
        plain = f"{found[1]}\\text{{ {found[3]}}}"
    plain = _SCALE.sub(_power_of_ten, with_braces(_REPEATING.sub(_fraction, plain)))
    if price := _PRICE.fullmatch(plain):
        value, unit = quantity(price[4])
        currency = (price[2] or price[3]).strip("\\")
        plain = f"{price[1]}{value}\\text{{ {currency} {unit}}}"
    return plain


def without_marks(latex: str) -> str:
    r"""Returns `latex` without the `$`, `\(` and `\[` of formulas; a phrase as what it means."""
    paired = latex.count("$") % 2 == 0 and "\\$" not in latex
    plain = re.sub(rf"(?<!\\)\\[()\[\]]{'|[$]' if paired else ''}", "", latex).strip()
    return MEANINGS.get(re.sub(rf"{TEXT}(?=\{{)|[\s{{}}]|(?<=\w)[.-]", "", plain).casefold(), plain)


def labelled(latex: str) -> tuple[str, str]:
    r"""Splits `\text{(C) } 12`, `option C` or `\text{Total: }12` into a letter or name, and the
    rest."""
    found = _LABELLED.fullmatch(latex)
    if found is None:
        return "", latex
    label = re.sub(r"\W", "", found["letter"] or found["name"] or "")
    inside = "" if found["outside"] else found["inside"] or ""
    return label, f"{inside}{found['rest']}" if found["rest"] else ""


def quantity(latex: str, *, letters: bool = False) -> tuple[str, str]:
    """Splits a readable text into value and unit; `letters`: `12 m` is metres, and not algebra."""
    if letters and (found := _LETTER.fullmatch(latex)) and measure(found[2]):
        return found[1], found[2]
    if (found := _UNIT.fullmatch(latex)) is None:
        return latex, ""
    unit = found["unit"].replace("^\\circ", "°").replace("\\Omega", "Ω")
    unit = re.sub(rf"\\cdot|{SPACE}", " ", re.sub(r"\\mu\s*", "μ", unit))
    return found["value"], _NOT_OF_UNITS.sub("", unit).strip()


def with_braces(latex: str) -> str:
    r"""Puts braces around arguments. As in TeX one without them is one token: `\frac123` is 1/2,
    then 3."""
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


def _raised(found: re.Match[str]) -> str:
    digits = found[0].translate(_SUPERSCRIPTS)
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def _solutions(found: re.Match[str]) -> str:
    r"""Returns `x=1, y=2` for the rows of `\begin{cases}`, unless they are a function's pieces."""
    rows = [row.strip(" .,;\n") for row in found[2].split("\\\\")]
    is_system = all(map(_EQUATION.fullmatch, rows))
    return ", ".join(rows).replace("&", "") if is_system else found[0]


def _inward(found: re.Match[str]) -> str:
    """Returns `(2,5)` for the interval `]2,5[`."""
    low, high = found[2].replace("]", "("), found[5].replace("[", ")")
    return f"{found[1]}{low}{found[3]},{found[4]}{high}"


def _transposed(found: re.Match[str]) -> str:
    rows = (
        [re.split("[&,]", found[1])]
        if found[1]
        else [row.split("&") for row in found[3].split("\\\\")]
    )
    columns = " \\\\ ".join(map("&".join, zip(*rows, strict=False)))
    return f"\\begin{{pmatrix}}{columns}\\end{{pmatrix}}"


def _are_words(blank: str, words: str) -> bool:
    words = re.sub(r"\\mu\s*", "μ", words.replace("\\cdot", " ").replace("\\Omega", "Ω"))
    if measure(words) is not None:
        return len(words) > 1 or not words.isascii()
    return bool(blank) and re.fullmatch(r"[A-Za-z]{3,}(?:\s+[A-Za-z]{3,})*\s*", words) is not None


def _power_of_ten(found: re.Match[str]) -> str:
    unit = f"\\text{{{found[2]}}}" if found[2].strip() else ""
    return f" \\times 10^{{{_POWERS[found[1]]}}}{unit}"


def _fraction(found: re.Match[str]) -> str:
    whole, fixed, repeated = found.groups()
    before = int(f"0{whole}{fixed}")
    after = int(f"{before}{repeated}")
    return f"\\frac{{{after - before}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"
