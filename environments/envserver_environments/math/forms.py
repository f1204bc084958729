r"""Brings a gold and an answer, mostly from `latex.readable`, to one form that math-verify
compares, such as `(-\infty,1)` for `x<1`; or decides by their form. Pure."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from .latex import MEANINGS, SPACE, TEXT, labelled

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_EQUAL = re.compile(r"(?<![<>!:])=")
_RATIO = re.compile(r"[\d.\s]+(?::[\d.\s]+)+")
_UNEQUAL = re.compile(r"\\n(?:eq?|ot)(?![A-Za-z])|!=|<>")
_ORDER = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt|leqslant|geqslant)(?![A-Za-z])")
_INTERVAL = re.compile(r"[\[(]|\\(?:in|cup|mathbb)(?![A-Za-z])")
_NAME = re.compile(
    r"\s*(?:[A-Za-z]|\\[A-Za-z]+(?:\{[^{}]*\})?)(?:_(?:\w|\{[^{}]*\}))?'*\s*"
    r"(?:(?:\^\{-1\})?\((?:[^()]|\([^()]*\))*\))?\s*"
)
_VARIABLE = r"(?:[A-Za-df-hj-z]|\\(?!pi\b|infty\b|[lg]eq?\b)[a-z]+)(?![A-Za-z])(?:_\w)?"
_UNKNOWN = re.compile(rf"\s*({_VARIABLE})\s*")
_SET = re.compile(r"\s*\\\{(?:(?!\\mid|[|:()]).)*\\\}\s*", re.DOTALL)
_TUPLE = re.compile(r"\s*\(([^()]*,[^()]*)\)\s*")
_POINT = re.compile(rf"(?<![A-Za-z\\])(?:{TEXT}\{{)?[A-Z](?:_\w)?\}}?\s*=?\s*(?=\([^()]*,)")
_VECTOR = re.compile(r"\s*\\begin\{[pb]matrix\}([^()]*)\\end\{[pb]matrix\}\s*")
_BUILDER = re.compile(
    rf"\s*\\\{{\s*{_VARIABLE}\s*(?:\\in\s*\\mathbb\{{R\}}|\\in\s*R)?\s*(?:\\mid|\||:)(.*)\\\}}\s*"
)
_IN = re.compile(rf"\s*({_VARIABLE})\s*\\in(?![A-Za-z])\s*(?=[\[(])")
_ENDS = re.compile(r"\s*([\[(])([^,()\[\]]*),([^,()\[\]]*)([\])])\s*")
_EXCEPT = re.compile(rf"\A\s*({_VARIABLE})\s*\\neq?(?![A-Za-z])([^,]*)\Z")
_WITHOUT = re.compile(
    r"\A\s*\\mathbb\{R\}\s*(?:\\setminus|\\backslash|-)\s*\\\{([^,{}\\]*)\\\}\s*\Z"
)
_BARS = re.compile(rf"\s*\|\s*({_VARIABLE})\s*(?:([-+])\s*([\w.\\{{}}/]+))?\s*\|\s*")
_UNION = re.compile(r"\\(?:cup|lor)(?![A-Za-z])")
_LEAST, _MOST = "-\\infty", "\\infty"
_CLOSED_AT_INFINITY = re.compile(r"\[\s*[-+]?\s*\\infty|\\infty\s*\]")
_DOTS = re.compile(r"\\[lc]?dots|\.\.\.")
_PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
_ASSIGNED = re.compile(rf"\s*({_VARIABLE})\s*=([^=<>]*)")
_NAMED_TUPLE = re.compile(rf"\s*\(((?:{_VARIABLE}|[,\s])*)\)\s*=\s*(?=\()")
_OPERATORS = {"land": "&", "lor": "|", "cap": "&", "cup": "|", "neg": "~", "lnot": "~"}
_LOGIC = re.compile(rf"\\({'|'.join(_OPERATORS)})(?![A-Za-z])")
_OF_NAMES = re.compile(r"(?=.*[&|])[A-Za-z\s()&|~]{1,200}")
_DIRECTIONS = {"<": "<", "\\lt": "<", ">": ">", "\\gt": ">"}
_BASE = re.compile(
    rf"\(?([0-9A-Fa-f]*\d[0-9A-Fa-f]*|[A-Fa-f]{{2,}})\)?_(?:(\w)|\{{?\s*(?:{TEXT}\{{)?\s*(\w+)\s*\}}?\s*\}})"
)
_MODULUS = re.compile(
    rf"\(?\s*(?:\\[pb]?mod(?![a-z])|{TEXT}\{{\s*mod\s*\}}|\bmod\b)\s*(?:\{{\s*)?([1-9]\d{{0,18}})\s*\}}?\s*\)?"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SOLVED = re.compile(rf"\s*({_VARIABLE}(?:\^\{{-1\}})?)\s*(\([^()]*\))?\s*=(.*)", re.DOTALL)
_SUM_OF_INDEXED = re.compile(r"\\(sum|prod)\s*_\{\s*([a-z])\s*=.*_\{?\2(?![A-Za-z])")
_BELOW = re.compile(r"_\{[^{}]*\}")
_CLAUSE = re.compile(
    r"[ ,;(|:](?:(?:where|for|with|and|any|all|every|some) )*+"
    r"(?:(?P<name>[A-Za-z]) ?(?:\\in ?(?P<domain>[^,]+?)|(?:is )?(?:an?y? )?integer)"
    r"|integers? (?P<last>[A-Za-z])) ?[.)]? ?(?:\\\})?\Z"
)
_BLANKS = re.compile(rf"(?:{SPACE}|\\mid(?![A-Za-z]))++")
_NAMES = re.compile(
    rf"(?:{TEXT}|\\operatorname)\{{[^{{}}]*\}}|{_COMMAND.pattern}|[A-Za-z]{{4,}}|(?:sin|cos|tan|exp|log|lim|min|max|pi|ln)|[A-Za-z]"
)
_INDEXED = re.compile(r"_\{?\s*i(?![A-Za-z])|\\(?:hat|vec)(?![A-Za-z])")
_POWER_OF_I = re.compile(r"(?<![\\A-Za-z])i\s*(?:\^|\([^()]*(?<![\\A-Za-z])i(?![A-Za-z]))")
_OTHER_INDEX = re.compile(r"(?<![\\A-Za-z])[jkmnN](?![A-Za-z])")
_ROTATION = re.compile(r"e\s*\^|\\(?:exp|cos|sin)(?![A-Za-z])")
_COMMON_LOG = re.compile(r"\\log(?![A-Za-z]|\s*_)")
_NATURAL_LOG = re.compile(r"\\ln(?![A-Za-z])")
_CHANGE_OF_BASE = re.compile(r"[/{]\s*\\ln\s*[({]*10\b")

_AROUND_WORDS = re.compile(rf"{TEXT}(?=\{{)|\\(?:triangle|angle|q?quad)(?![A-Za-z])")
_NOT_OF_WORDS = re.compile(
    r"\*\*|-(?=[a-z]{2})|(?<=[a-z]{2})-|(?<![A-Z\d])'|[^\w<>=+/*|^'-]|_", re.ASCII
)
_SAME_WORDS = {"yes": "true", "no": "false"}
_CONSTANT = re.compile(r"\+\s*C\s*\Z|C\s*e\s*\^")
_ARTICLE = re.compile(r"\A\W*(?:an?|the)\s+(?=\w\w)")
_PHRASE = re.compile(rf"{TEXT}\{{[\s('\"]*[A-Za-z][A-Za-z0-9\s.,'()-]*\}}")
_PLAIN_PHRASE = re.compile(
    r"(?:\\(?:triangle|angle)\s*)?[A-Z]{2,}|[A-Z][a-z]{2,}|[A-Z]?[a-z]+\.?(?: [A-Za-z]+\.?)+"
    r"|yes|no|true|false|even|odd|none"
)


def as_asked(gold: str, answer: str) -> tuple[str, str] | None:
    r"""Returns both in one form: sets of numbers as intervals, solutions without their names.

    `i` is the imaginary unit unless the gold has it as a name; `\log` is `\ln` if only the other
    side has that. None if they are about different unknowns, such as `x>1` and `y>1`.
    """
    gold, answer = (text.replace("\\bmod", "\\mod") for text in (gold, answer))
    gold, answer = _as_vector(gold, answer), _as_vector(answer, gold)
    gold, answer = _with_natural_log(gold, answer), _with_natural_log(answer, gold)
    if _CONSTANT.search(gold) and "c" not in _NAMES.findall(gold) and "C" not in answer:
        answer = _renamed(answer, "c", "C")
    if not _is_name(gold, answer):
        gold, answer = (_renamed(text, "i", "\\sqrt{-1}") for text in (gold, answer))
    if _RATIO.fullmatch(gold):
        answer = answer.rpartition("=")[2]
    if gold.count(":") == answer.count(":") > 1:
        return _proportions(gold), _proportions(answer)

    wanted, given = _region(gold), _region(answer)
    if wanted is None or given is None:
        names = _unknowns(gold), _unknowns(answer)
        if len(names[0]) > 1 and names[1] and names[0] != names[1]:
            return None
        return _right_sides(_listed(gold), _listed(answer))
    same = not (wanted[0] and given[0]) or wanted[0] == given[0]
    return (wanted[1], given[1]) if same else None


def same_family(gold: str, answer: str) -> tuple[str, str] | None:
    r"""Returns both without a clause such as `k \in \mathbb{Z}`, their parameters with one name.

    One of them may lack it; a gold without it keeps its names. None for different domains.
    """
    found = [_family(text) for text in (gold, answer)]
    domains = {family.domain for family in found if family}
    if len(domains) > 1:
        return None
    bodies = []
    for text, family in zip((gold, answer), found, strict=True):
        body = family.body if family else text
        names = {family.name} if family else {*"klmnN"} & {*_NAMES.findall(body)}
        if found[0] and len(names) == 1:
            body = _renamed(body, names.pop(), "\\kappa ")
        bodies.append(body)
    return bodies[0], bodies[1]


class _Family(NamedTuple):
    body: str
    name: str
    domain: str


def _family(latex: str) -> _Family | None:
    r"""Reads `k\pi, k \in \mathbb{Z}`; None if there is no such clause behind a formula."""
    plain = re.sub(rf"{TEXT}\{{([^{{}}]*)\}}", r" \1 ", latex)
    plain = _BLANKS.sub(" ", plain).strip()
    if (clause := _CLAUSE.search(plain)) is None:
        return None
    body = plain[: clause.start()].rstrip(" ,;(|:")
    if plain.endswith("\\}"):
        body = body.removeprefix("\\{")
    domain = re.sub(r"\\[A-Za-z]+|[{}\s]", "", clause["domain"] or "Z")
    is_formula = body.strip() and not _ORDER.search(body)
    return _Family(body, clause["name"] or clause["last"], domain) if is_formula else None


def same_words(gold: str, answer: str) -> bool | None:
    """Returns whether `answer` has the letters of a word, a name or a choice; None for formulas.
    Words with commas that repeat, or do not follow the alphabet, are an order."""
    (wanted, gold_rest), (given, answer_rest) = map(labelled, (gold, answer))
    if given and (len(wanted) > 1 or wanted.isupper() or gold[0] == "("):
        if wanted.casefold() != given.casefold():
            return False
        if not (gold_rest and answer_rest):
            return True
    gold, answer = gold_rest or gold, answer_rest or answer
    if not (_PHRASE.fullmatch(gold) or _PLAIN_PHRASE.fullmatch(gold)):
        return None
    words, own = (
        [
            _SAME_WORDS.get(word := _NOT_OF_WORDS.sub("", _ARTICLE.sub("", item)).casefold(), word)
            for item in re.split(r",|\b(?:[Aa]nd|AND)\b", _AROUND_WORDS.sub("", text))
            if item.strip()
        ]
        for text in (gold, answer)
    )
    is_order = words != sorted({*words}) or {*words} <= {"true", "false"}
    if is_order and not re.search(r"\band\b", gold):
        return words == own
    return sorted(words) == sorted(own)


def same_in_base(gold: str, answer: str) -> bool | None:
    """Compares numbers with a base, such as `101_2`; None if neither has one."""
    wanted, given = (
        found and (found[1].lstrip("0").casefold(), MEANINGS.get(sub := found[2] or found[3], sub))
        for found in (_BASE.fullmatch(gold), _BASE.fullmatch(answer))
    )
    return None if wanted is None and given is None else wanted == given


def same_logic(gold: str, answer: str) -> bool | None:
    r"""Compares `p \land \neg q` with `\neg q \land p`, also of sets; None for another form."""
    if "|" in gold + answer:  # divides, or an absolute value
        return None
    wanted, given = (
        _LOGIC.sub(lambda found: _OPERATORS[found[1]], text) for text in (gold, answer)
    )
    if not (_OF_NAMES.fullmatch(wanted) and _OF_NAMES.fullmatch(given)):
        return None
    try:
        wanted_tree, given_tree = (
            ast.parse(text.strip(), mode="eval").body for text in (wanted, given)
        )
    except SyntaxError:
        return None
    return _in_order(wanted_tree) == _in_order(given_tree)


def same_residues(gold: str, answer: str) -> bool | None:
    r"""Compares `x \equiv 3 \pmod 7` with a class or a residue; None if both are something else."""
    wanted, given = _residues(gold), _residues(answer)
    if not (wanted and given) or wanted[0] == given[0] == 0:
        return None
    modulus = wanted[0] or given[0]
    if 0 in (wanted[0], given[0]):
        return wanted[1] == given[1] and all(0 <= number < modulus for number in given[1])
    classes = [{number % modulus for number in numbers} for _, numbers in (wanted, given)]
    return modulus == given[0] and classes[0] == classes[1]


def forms_differ(gold: str, answer: str) -> bool:
    """Returns whether the form excludes that they are equal, though math-verify says so: it takes
    the right side of any equation, and the ends of an interval, for the whole; it takes pairs for
    sets, and overlooks dots and brackets at infinity."""
    if gold.count(":") != answer.count(":") and max(gold.count(":"), answer.count(":")) > 1:
        return True
    dots = [_DOTS] if "," in gold or "." not in answer else []
    for pattern in (_UNEQUAL, _CLOSED_AT_INFINITY, *dots):
        if bool(pattern.search(gold)) != bool(pattern.search(answer)):
            return True
    if _ORDER.search(gold):
        return not (_ORDER.search(answer) or _INTERVAL.search(answer))
    if (indexed := _SUM_OF_INDEXED.search(gold)) and f"\\{indexed[1]}" not in answer:
        return True
    gold, answer = _BELOW.sub("", gold), _BELOW.sub("", answer)
    equation = _EQUAL.search(gold)
    if equation:
        left, right = gold[: equation.start()], gold[equation.end() :]
        relation = _UNKNOWN.fullmatch(left) and left.strip() != "y" and _UNKNOWN.fullmatch(right)
        solved = _NAME.fullmatch(left) and not relation
        return not solved and not _EQUAL.search(answer)
    kinds = [
        pattern for text in (gold, answer) for pattern in (_SET, _TUPLE) if pattern.fullmatch(text)
    ]
    return len(set(kinds)) == 2


def _in_order(formula: ast.expr) -> str:
    match formula:
        case ast.BinOp(left, operator, right):
            kind = type(operator)
            waiting, operands = [left, right], list[str]()
            while waiting:
                operand = waiting.pop()
                if isinstance(operand, ast.BinOp) and type(operand.op) is kind:
                    waiting += [operand.left, operand.right]
                else:
                    operands.append(_in_order(operand))
            return f"{kind.__name__}({', '.join(sorted(operands))})"
        case ast.UnaryOp(operand=operand):
            return f"not({_in_order(operand)})"
    return ast.unparse(formula)


def _residues(latex: str) -> tuple[int, set[int]] | None:
    """The modulus, 0 for a bare number, and the numbers before it."""
    if "\\bmod" in latex and "\\equiv" not in latex:  # a remainder
        return None
    moduli = {int(found) for found in _MODULUS.findall(latex)}
    rest = re.sub(rf"{_VARIABLE}\s*\\equiv|\\l(?:or|and)(?![A-Za-z])", ",", _MODULUS.sub("", latex))
    rest = re.sub(r"\\pm\s*(\d+)", r"\1,-\1", rest)
    if len(moduli) > 1 or not re.fullmatch(r"[\s,]*-?\d+(?:[\s,]+-?\d+)*[\s,]*", rest):
        return None
    return max(moduli, default=0), {int(number) for number in re.findall(r"-?\d+", rest)}


def _items(latex: str) -> list[str]:
    items, depth = [""], 0
    for sign in _THOUSANDS.sub("", latex):
        depth += (sign in "([{") - (sign in ")]}")
        if sign in ",;" and not depth:
            items.append("")
        else:
            items[-1] += sign
    return [item for item in items if item.strip()]


def _proportions(ratio: str) -> str:
    r"""Returns `(\frac{2}{1}, \frac{3}{1})` for `1:2:3`."""
    first, *others = ratio.split(":")
    terms = [f"\\frac{{{term}}}{{{first}}}" for term in others]
    return f"({', '.join(terms)})"


def _as_vector(latex: str, other: str) -> str:
    """Returns a matrix of one row or column, or a named point, as a tuple if the other side is one;
    any vector as `3i+4j` if the other side is such a sum."""
    if _TUPLE.match(other):
        latex = _POINT.sub("", latex)
    vector = _VECTOR.fullmatch(latex) or _TUPLE.fullmatch(latex)
    if vector is None or ("&" in vector[1] and "\\\\" in vector[1]):
        return latex
    cells = [cell.strip() for cell in re.split(r"\\\\|&|,", vector[1])]
    if {"i", "j"} <= {*_NAMES.findall(other)} and "," not in other:
        return "+".join(f"({cell}){unit}" for cell, unit in zip(cells, "ijk", strict=False))
    return f"({', '.join(cells)})" if _TUPLE.fullmatch(other) else latex


def _unknowns(latex: str) -> set[str]:
    """The names in `x=3, y=4`, without their indices."""
    found = map(_ASSIGNED.fullmatch, _items(re.sub(r"\\land(?![A-Za-z])", ",", latex)))
    return {name[1].strip().partition("_")[0] for name in found if name}


def _listed(latex: str) -> str:
    r"""Returns `3, 5` for `x=3 \lor x=5`, and `(3,4)` for `y=4, x=3` and `(x,y)=(3,4)`."""
    text = re.sub(r"\\l(?:and|or)(?![A-Za-z])", ", ", latex)
    if "\\pm" in text or "\\mp" in text:
        text = ", ".join(map(_with_both_signs, _items(text)))
    if tuple_ := _NAMED_TUPLE.match(text):
        variables = re.findall(_VARIABLE, tuple_[1])
        return text[tuple_.end() :] if variables == sorted(variables) else text
    items = _items(text)
    pairs = sorted((found[1], found[2]) for item in items if (found := _ASSIGNED.fullmatch(item)))
    names = {name for name, _ in pairs}
    if len(items) < 2 or not pairs:
        return text
    if len(names) == len(items) and not any("_" in name for name in names):
        return latex if "\\lor" in latex else f"({', '.join(value for _, value in pairs)})"
    if len({name.partition("_")[0] for name in names}) == 1:
        return ", ".join(_ASSIGNED.sub(r"\2", item) for item in items)
    return text


def _with_both_signs(item: str) -> str:
    if "\\{" in item or len(_PLUS_MINUS.findall(item)) != 1:
        return item
    return ", ".join(_PLUS_MINUS.sub(sign, item) for sign in "+-")


def _region(latex: str) -> tuple[str, str] | None:
    r"""Returns the name of the unknown, if any, and the intervals of `x<1 \lor x>2` or `[1,2)`."""
    builder = _BUILDER.fullmatch(latex)
    text = _EXCEPT.sub(r"\1<\2 \\lor \1>\2", _without_bars(builder[1] if builder else latex))
    text = _WITHOUT.sub(r"(-\\infty,\1) \\cup (\1,\\infty)", text)
    if not _ORDER.search(text) and len(_items(text)) > 1:
        return None
    parts = [part for side in _UNION.split(text) for part in _items(side)]
    found = [_interval(part) for part in parts]
    names = {region[0] for region in found if region and region[0]}
    if not all(found) or len(names) > 1:
        return None
    return "".join(names), "\\cup ".join("".join(region[1:]) for region in found if region)


def _without_bars(inequality: str) -> str:
    r"""Returns `3-2<x<3+2` for `|x-3|<2`, and two inequalities for `|x-3|>2`."""
    parts, signs = _ORDER.split(inequality), _ORDER.findall(inequality)
    if len(parts) != 2:
        return inequality
    is_less = signs[0] == "<" or signs[0].startswith("\\l")
    bars, bound = _BARS.fullmatch(parts[0]), parts[1]
    if bars is None:
        bars, bound, is_less = _BARS.fullmatch(parts[1]), parts[0], not is_less
    if bars is None:
        return inequality
    name, middle = bars[1], f"{'-' if bars[2] == '+' else ''}{bars[3] or ''}"
    equal = "" if _DIRECTIONS.get(signs[0]) else "="
    bound = f"({bound.strip()})" if re.search(r"[-+]", bound) else bound.strip()
    least, most = f"{middle}-{bound}", f"{middle}+{bound}" if middle else bound
    less, more = (" \\le ", " \\ge ") if equal else ("<", ">")
    if is_less:
        return f"{least}{less}{name}{less}{most}"
    return f"{name}{less}{least} \\lor {name}{more}{most}"


def _is_name(gold: str, answer: str) -> bool:
    """Returns whether `i` is a name or an index in the gold, and not the imaginary unit."""
    if _INDEXED.search(gold) or _INDEXED.search(answer):
        return True
    if "i" not in _NAMES.findall(gold) or _ROTATION.search(gold):
        return False
    return _OTHER_INDEX.search(gold) is not None or _POWER_OF_I.search(gold) is not None


def _renamed(latex: str, name: str, new: str) -> str:
    return _NAMES.sub(lambda token: new if token[0] == name else token[0], latex)


def _right_sides(gold: str, answer: str) -> tuple[str, str]:
    """Returns the right sides of `y(t)=...` and `y=...`: about numbers, or the same function."""
    wanted, given = _SOLVED.fullmatch(gold), _SOLVED.fullmatch(answer)
    if not (wanted and given):
        return gold, answer
    if wanted[1] != given[1] and not {(wanted[1], wanted[2]), (given[1], given[2])} & {("y", None)}:
        return gold, answer
    name, own = (_NAMES.findall(found[2] or "") for found in (wanted, given))
    if len(name) == len(own) == 1 and name != own and name[0] not in _NAMES.findall(given[3]):
        return wanted[3], _renamed(given[3], own[0], name[0])
    same = (wanted[2] or given[2]) == (given[2] or wanted[2])
    return (wanted[3], given[3]) if same else (gold, answer)


def _with_natural_log(latex: str, other: str) -> str:
    is_natural = _NATURAL_LOG.search(other) and not _CHANGE_OF_BASE.search(other)
    return _COMMON_LOG.sub(r"\\ln", latex) if is_natural else latex


_Interval = tuple[str, str, str, str, str, str]
"""The unknown, a bracket, an end, a comma, the other end and its bracket."""


def _interval(latex: str) -> _Interval | None:
    r"""Reads `x\in[a,b)`, `a \le x < b`, `x \le b`, or `x \ge a \land x < b`."""
    name = _IN.match(latex)
    text = latex[name.end() :] if name else latex
    if latex.strip() == "\\mathbb{R}":
        return "", "(", _LEAST, ",", _MOST, ")"
    if ends := _ENDS.fullmatch(text):
        return name[1] if name else "", ends[1], ends[2], ",", ends[3], ends[4]
    halves = [_of_order(half) for half in re.split(r"\\land(?![A-Za-z])", latex)]
    if len(halves) == 2 and halves[0] and halves[1] and halves[0][0] == halves[1][0]:
        low, high = sorted(halves, key=lambda half: half is not None and half[2] == _LEAST)
        if low and high and (low[4], high[2]) == (_MOST, _LEAST):
            return (*low[:4], *high[4:])
    return halves[0] if len(halves) == 1 else None


def _of_order(inequality: str) -> _Interval | None:
    parts = _ORDER.split(inequality)
    signs = [_DIRECTIONS.get(sign, sign) for sign in _ORDER.findall(inequality)]
    strict = [sign in ("<", ">") for sign in signs]
    rising = [sign == "<" or sign.startswith("\\l") for sign in signs]
    if len(set(rising)) != 1:
        return None
    if not rising[0]:
        parts.reverse()
        strict.reverse()
    named = [_UNKNOWN.fullmatch(part) for part in parts]
    match [bool(name) for name in named]:
        case [_, True, _]:
            low, high = parts[0], parts[2]
        case [True, False]:
            low, high, strict = _LEAST, parts[1], [True, *strict]
        case [False, True]:
            low, high, strict = parts[0], _MOST, [*strict, True]
        case _:
            return None
    name = next(name[1] for name in (named[1:2] if len(parts) > 2 else named) if name)
    return name, "[("[strict[0]], low.strip(), ",", high.strip(), "])"[strict[1]]
