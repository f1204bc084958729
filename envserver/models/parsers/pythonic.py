"""Llama 3.2 and 4, OLMo, ToolACE: `[name(key="value"), other(key=1)]`, the whole of the answer."""

from __future__ import annotations

import ast

from .calls import ParsedCall, ParsedCalls, Tools, found, parsed_call

_MOST_CHARACTERS = 200_000


def parse(text: str, tools: Tools) -> ParsedCalls | None:
    """Returns the calls in `text`, which must contain nothing else."""
    text = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not text.startswith("[") or not text.endswith("]") or len(text) > _MOST_CHARACTERS:
        return None
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return found([_call(node) for node in tree.elts])
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _call(node: ast.expr) -> ParsedCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {pair.arg: ast.literal_eval(pair.value) for pair in node.keywords if pair.arg}
    return parsed_call(ast.unparse(node.func), arguments)
