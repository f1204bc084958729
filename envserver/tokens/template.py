"""A model's chat template, run as transformers runs it: conversation -> text.

The template is a program that comes with the model. It runs in jinja's immutable sandbox, which
keeps it from attributes, calls and changes that it has no business with; loops over `range` and
repeated values are bounded here, so that it cannot fill the memory by a short expression.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from envserver_records.errors import ConfigError, TemplateRefused
from envserver_records.records import Message
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LONGEST_REPEAT = 10_000_000
"""Characters or items that one `*` in a template may make."""
_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset({"first", "last", "index", "index0", "length"})
"""Plain values of a loop, which the sandbox allows anyway."""
_TO_JSON = json.JSONEncoder(ensure_ascii=False)


class ChatTemplate:
    """Compiled once.

    Args:
        source: the template's text.
        variables: what it may name besides the conversation: `bos_token`, `eos_token`, ...

    Raises:
        ConfigError: it does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._compiled, self.parts, self.names = _compile(source)
        """`parts`: it loops over a content's parts; else a content is given to it as one text.
        `names`: the variables that it reads."""
        self.variables = dict(variables)
        self.developer = '"developer"' in source or "'developer'" in source
        """It knows the role `developer`; else such messages are given to it as system messages."""
        self.digest = hashlib.blake2b(source.encode(), digest_size=16).hexdigest()

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        *,
        generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The text of a conversation.

        Args:
            messages, tools: as `prepare` and `prepare_tools` return them.
            generation_prompt: end with what opens the model's next turn.
            kwargs: further variables for the template.

        Raises:
            TemplateRefused: the template rejects the conversation; its error is in the message.
        """
        variables = {"documents": None, **self.variables, **kwargs}
        variables |= {"messages": messages, "tools": tools or None}
        try:
            return self._compiled.render(variables, add_generation_prompt=generation_prompt)
        except Exception as error:  # a template can raise whatever Python can
            raise TemplateRefused(
                f"The model's chat template rejects this conversation: {error}",
                hint="Send a conversation in the format that the model was trained for.",
            ) from error


@lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, bool, frozenset[str]]:
    """The compiled template, which models of a family share; whether it reads parts; the variables
    that it reads."""
    environment = _Environment()
    try:
        tree = environment.parse(source)
        parts = _reads_parts(tree)
        names = jinja2.meta.find_undeclared_variables(tree) - set(environment.globals)
        compiled = environment.from_string(tree)
        # Jinja copies them for each rendering, and its chain of mappings is slow to copy.
        compiled.globals = {**compiled.globals}
        return compiled, parts, frozenset(names)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"The chat template does not compile: {error}.") from error


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model says; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012  (as jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def getattr(self, obj: Any, attribute: str) -> Any:
        # What jinja does for `message.role`, without failing to find such an attribute first.
        if type(obj) is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > _LONGEST_REPEAT or abs(right) > 64):
            raise jinja2.TemplateRuntimeError("a power in it is too large")
        for many, times in ((left, right), (right, left)):
            long = isinstance(times, int) and hasattr(many, "__len__")
            if long and len(many) * times > _LONGEST_REPEAT:
                raise jinja2.TemplateRuntimeError("a repeated value in it is too long")
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML would misread; a model is not a browser."""
    if not (ensure_ascii or indent or separators or sort_keys):
        return _TO_JSON.encode(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _reads_parts(tree: nodes.Template) -> bool:
    """Returns whether a template loops over the parts of a message's content.

    vLLM decides by the same signs whether it passes a content on as parts or as one text
    (`--chat-template-content-format auto`); where it cannot tell it passes text.
    """
    try:
        return any(True for _ in _loops_over_content(tree))
    except _Unclear:
        return False


class _Unclear(Exception):
    """The template assigns or loops in a way that cannot be followed by names."""


def _loops_over_content(tree: nodes.Template) -> Iterator[nodes.For]:
    messages = _names_for(tree, "messages")
    message_names = [
        _name(loop.target)
        for loop in tree.find_all(nodes.For)
        if any(_reads(loop.iter, name) for name in messages)
    ]
    parameters = _content_parameters(tree, message_names)
    for loop in tree.find_all(nodes.For):
        in_macro = id(loop) in parameters
        names = parameters.get(id(loop), set()) if in_macro else {"content"}
        by_message = any(_reads(loop.iter, name, "content") for name in message_names)
        by_name = isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        if by_message or by_name:
            _name(loop.target)
            yield loop


def _content_parameters(tree: nodes.Template, messages: list[str]) -> dict[int, set[str]]:
    """The macro's parameters that get a content, for each loop inside a macro (by `id`)."""
    found: dict[int, set[str]] = {}
    calls = [call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in calls:
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            pairs = [*zip(names, call.args, strict=False)]
            pairs += [(word.key, word.value) for word in call.kwargs if word.key in names]
            given |= {
                name
                for name, value in pairs
                if any(_reads(value, message, "content") for message in messages)
            }
        for loop in macro.find_all(nodes.For):
            found[id(loop)] = given or found.get(id(loop), set())
    return found


def _names_for(tree: nodes.Template, name: str) -> list[str]:
    """`name` and every variable that is set to it or to a slice or filtering of it."""
    names = [name]
    for known in names:  # grows while it is walked
        for assignment in tree.find_all(nodes.Assign):
            if _reads(assignment.node, known):
                target = _name(assignment.target)
                if target not in names:
                    names.append(target)
    return names


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unclear
    return target.name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is the variable `name` (its item `key`), perhaps sliced or filtered."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getitem):
            if not (isinstance(node.arg, nodes.Const) and node.arg.value == key):
                return False
        elif not (isinstance(node, nodes.Getattr) and node.attr == key):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
