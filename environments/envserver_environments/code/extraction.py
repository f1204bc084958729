"""Finds the program in a model's visible text. Hostile input: linear time, a limit on parsing.

A function: the last fenced block that defines it at its top level (or in a class Solution), else
the last one. A program: the last valid block labelled Python, else without a label, else the last.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence

from envserver_tools.calling import visible_text

MAX_CODE_CHARACTERS = 50_000
MAX_PARSED_CHARACTERS = 200_000
"""Characters of one message that are parsed to find where a program ends, and which one counts."""

_PYTHON = ("python", "py", "python3", "{python}")
_LEAST_COST = 200
_CLOSINGS = 8
_FENCES_AHEAD = 16
"""Fences among which these are sought."""
_FENCE = re.compile(r"`{3,}+|~{3,}+")
_OPENING = re.compile(r"(?m)^([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([^\n`]*+)\n")
_ALONE = re.compile(r"(?m)[ \t]*+(`{3,}+|~{3,}+)[ \t]*+$")


def extract_code(text: str, entry_point: str) -> str | None:
    seen = visible_text(text.replace("\r\n", "\n"))
    blocks = [] if seen is None else list(_named_blocks(seen))
    if not blocks:
        return None
    if entry_point:
        wanted = [block for _, block in blocks]
        return _last_good(wanted, lambda tree: entry_point in _names_in(tree)) or wanted[-1]
    for names in (_PYTHON, ("",)):
        wanted = [block for name, block in blocks if name in names]
        good = _last_good(wanted, lambda tree: bool(tree.body))
        if good is not None:
            return good
    return blocks[-1][1]


def _last_good(blocks: Sequence[str], is_good: Callable[[ast.Module], bool]) -> str | None:
    parser = _LimitedParser()
    for block in reversed(blocks):
        tree = parser.parse(block)
        if tree is not None and is_good(tree):
            return block
    return None


def fenced_blocks(text: str) -> Iterator[str]:
    return (inside for _, inside in _named_blocks(text))


def _named_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields each block with the first word after its opening fence."""
    parser = _LimitedParser()
    position = 0
    while opening := _OPENING.search(text, position):
        indent, fence, start = opening[1], opening[2], opening.end()
        first = text.find(fence, start)
        if first < 0:
            return
        end, position = _closing(text, start, fence, first, parser)
        inside = text[start:end]
        name = next(iter(opening[3].lower().split()), "")
        yield name, re.sub(f"(?m)^[ \t]{{1,{len(indent)}}}", "", inside) if indent else inside


def _closing(
    text: str, start: int, fence: str, first: int, parser: _LimitedParser
) -> tuple[int, int]:
    """Returns the span of the fence that closes the program at `start`: the first one preceded by a
    valid program, on a line of its own if possible, else the first. Strings may contain fences."""
    ahead = itertools.islice(_FENCE.finditer(text, first), _FENCES_AHEAD)
    if parser.is_exhausted:
        return next(ahead).span()
    fences = [found for found in ahead if found[0].startswith(fence)]
    alone = [found for found in fences if _is_alone(text, start, found)]
    for found in dict.fromkeys([*alone[:_CLOSINGS], *fences[:_CLOSINGS]]):
        if parser.parse(text[start : found.start()], dedented=True) is not None:
            return found.span()
    return fences[0].span()


def _is_alone(text: str, start: int, fence: re.Match[str]) -> bool:
    line = text.rfind("\n", start - 1, fence.start()) + 1
    alone = _ALONE.match(text, line)
    return alone is not None and alone.start(1) == fence.start()


class _LimitedParser:
    """Parses Python until the texts together exceed MAX_PARSED_CHARACTERS."""

    def __init__(self) -> None:
        self._left = MAX_PARSED_CHARACTERS

    @property
    def is_exhausted(self) -> bool:
        return self._left < _LEAST_COST

    def parse(self, code: str, *, dedented: bool = False) -> ast.Module | None:
        cost = max(len(code), _LEAST_COST)
        if cost > self._left:
            return None
        self._left -= cost
        return parsed(textwrap.dedent(code) if dedented else code)


def defined_names(code: str) -> set[str]:
    tree = parsed(code)
    return _names_in(tree) if tree else set()


def _names_in(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for statement in tree.body:
        match statement:
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                names.add(statement.name)
                if isinstance(statement, ast.ClassDef) and statement.name == "Solution":
                    names.update(n.name for n in statement.body if isinstance(n, ast.FunctionDef))
            case ast.Assign():
                names.update(t.id for t in statement.targets if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Import() | ast.ImportFrom():
                names.update(alias.asname or alias.name for alias in statement.names)
    return names


def parsed(code: str, limit: int | None = MAX_CODE_CHARACTERS) -> ast.Module | None:
    """Parses `code`; returns None if it is not Python or longer than `limit` characters."""
    if limit is not None and len(code) > limit:
        return None
    try:
        with warnings.catch_warnings():
            # Warnings about invalid escapes in a model's program do not matter here.
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
