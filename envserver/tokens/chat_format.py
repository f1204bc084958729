"""A model's chat format: its chat template and its vocabulary, messages <-> ids. Pure.

An engine may give variables to every template without saying which; `agreeing` finds them by
comparing our rendering of small conversations with the engine's.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.meta
import orjson
from envserver_records.errors import ConfigError, TemplateRefused
from envserver_records.records import Message, Tokens
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..models.probe import Echo
from .images import banned_tokens_of, image_token_of
from .prepare import RESERVED, KeptMessages, Refused, prepare, prepare_tools, with_defaults
from .vocabulary import CONFIG, Vocabulary, read_json

# The template is a program that comes with the model. It runs in jinja's immutable sandbox, which
# keeps it from attributes, calls and changes that it has no business with; loops over `range` and
# repeated values are bounded here, so that it cannot fill the memory by a short expression.

_LONGEST_REPEAT = 10_000_000
"""Characters or items that one `*` in a template may make."""
_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset({"first", "last", "index", "index0", "length"})
"""Plain values of a loop, which the sandbox allows anyway."""
_TO_JSON = json.JSONEncoder(ensure_ascii=False)


class ChatTemplate:
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
        """`messages`, `tools`: as `prepare` and `prepare_tools` return them."""
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
    """Returns the template, shared by a family's models, if it reads parts, and its variables."""
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

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # What jinja does with the template's own macros, without asking first what they are.
        if type(__obj) is not Macro:
            return super().call(__context, __obj, *args, **kwargs)
        for name in ("_block_vars", "_loop_vars"):
            kwargs.pop(name, None)
        return __obj(__context.eval_ctx, *args, **kwargs)

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
    """Unlike Jinja's own filter, does not escape what HTML would misread."""
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

    By the signs by which vLLM passes content on as parts or as one text
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
    """Returns the parameters of macros that get a content, for each loop (by `id`)."""
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
    """Returns `name` and every variable that is set to it or to a slice or filtering of it."""
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


_SHAPES_KEPT = 65_536
_PROMPTS_KEPT = 64
_LONGEST_KEPT = 131_072
"""Texts whose ids are remembered, and their most characters: the rollouts of a group begin with
the same prompt. All together take 25 MB at most where a character takes a byte."""
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


class ChatFormat:
    """Renders and encodes; safe to share between attempts and threads.

    Args:
        templates: by name: `default`, and `tool_use` for conversations with tools, if it has one.
        stop_ids: ids that end the model's turn by its own configuration.
        defaults: template variables of every conversation; a request's own take precedence.
        image_token: what the template writes for an image; None: the model sees none.
        banned: tokens that must not be sampled, see `images.banned_tokens_of`.
        processor: digest of the files that say how images become tokens; "" without any.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        templates: Mapping[str, str],
        stop_ids: frozenset[int],
        defaults: Mapping[str, Any] | None = None,
        *,
        image_token: int | None = None,
        banned: tuple[int, ...] = (),
        processor: str = "",
    ) -> None:
        self.vocabulary = vocabulary
        self.stop_ids = stop_ids
        self.defaults = dict(defaults or {})
        self.image_token = image_token
        self.banned = banned
        self.processor = processor
        self.shapes: dict[bytes, str] = {}
        """Results of the checks in `suffix`, by the shape of a conversation."""
        self._templates = {
            name: ChatTemplate(source, vocabulary.variables) for name, source in templates.items()
        }
        self._tokens = lru_cache(maxsize=_PROMPTS_KEPT)(vocabulary.tokens)

    @classmethod
    def load(cls, folder: Path) -> ChatFormat:
        vocabulary = Vocabulary.load(folder)
        config = read_json(folder / "config.json")
        return cls(
            vocabulary,
            _read_templates(folder),
            _read_stop_ids(folder, vocabulary),
            image_token=image_token_of(config),
            banned=banned_tokens_of(config),
            processor=_processor_digest(folder),
        )

    def with_defaults(self, defaults: Mapping[str, Any]) -> ChatFormat:
        other = copy.copy(self)
        other.defaults, other.shapes = dict(defaults), {}
        return other

    @property
    def own_variables(self) -> list[str]:
        """Names of variables by which a request or the engine can change what is rendered."""
        read = {name for template in self._templates.values() for name in template.names}
        given = {*RESERVED, *self.vocabulary.variables, "documents", "add_generation_prompt"}
        return sorted(read - given)

    def remember(self, shape: bytes, found: str) -> None:
        if len(self.shapes) >= _SHAPES_KEPT:
            self.shapes = {}
        self.shapes[shape] = found

    @property
    def template_digest(self) -> str:
        return "+".join(self._templates[name].digest for name in sorted(self._templates))

    @property
    def tokenizer_digest(self) -> str:
        return self.vocabulary.digest

    def template(self, with_tools: bool) -> ChatTemplate:
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        return self._templates[name]

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
        *,
        generation_prompt: bool,
        kept: KeptMessages | None = None,
    ) -> str:
        """Renders a conversation to text.

        Args:
            messages, tools: in OpenAI's chat shape, as an agent sends them.
            kwargs: template variables of the request (see `prepare.template_kwargs`).
            generation_prompt: end with what opens the model's next turn.
            kept: the prepared messages of the conversation's request before.
        """
        template = self.template(bool(tools))
        return template.render(
            prepare(
                messages,
                parts=template.parts,
                developer=template.developer,
                images="refused" if self.image_token is None else "shown",
                kept=kept,
            ),
            prepare_tools(tools),
            generation_prompt=generation_prompt,
            kwargs=with_defaults(self.defaults, kwargs),
        )

    def prompt_text(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
        kept: KeptMessages | None = None,
    ) -> str:
        own = {name: value for name, value in kwargs.items() if name != "add_generation_prompt"}
        prompted = bool(kwargs.get("add_generation_prompt", True))
        return self.render(messages, tools, own, generation_prompt=prompted, kept=kept)

    def prompt_ids(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> list[int]:
        ids: list[int] = self.tokens(self.prompt_text(messages, tools, kwargs)).tolist()
        return ids

    def tokens(self, text: str) -> Tokens:
        """Returns the ids of a whole prompt; callers share them, so never change them."""
        return (self._tokens if len(text) <= _LONGEST_KEPT else self.vocabulary.tokens)(text)

    def encode(self, text: str) -> list[int]:
        return self.vocabulary.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self.vocabulary.decode(ids)


def _read_templates(folder: Path) -> dict[str, str]:
    """Reads the templates by name; separate files override the tokenizer's configuration."""
    found: Any = None
    alone, several = folder / "chat_template.jinja", folder / "additional_chat_templates"
    if alone.is_file():
        found = {"default": alone.read_text(encoding="utf-8")}
        for path in sorted(several.glob("*.jinja")):
            found[path.stem] = path.read_text(encoding="utf-8")
    else:
        found = read_json(folder / "chat_template.json").get("chat_template")
        found = found or read_json(folder / CONFIG).get("chat_template")
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if not isinstance(found, dict) or not found:
        raise ConfigError(
            f"There is no chat template in {folder}.",
            hint=f"It should be in chat_template.jinja, chat_template.json or {CONFIG}.",
        )
    if "default" not in found:
        raise ConfigError(
            f"None of the chat templates in {folder} is named default.",
            hint=f"They are named {', '.join(sorted(found))}.",
        )
    return found


def _processor_digest(folder: Path) -> str:
    found = [folder / name for name in _PROCESSORS if (folder / name).is_file()]
    digest = hashlib.blake2b(digest_size=16)
    for path in found:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest() if found else ""


def _read_stop_ids(folder: Path, vocabulary: Vocabulary) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    eos = vocabulary.special_id(vocabulary.variables.get("eos_token", ""))
    return frozenset(ids if eos is None else ids | {eos})


SETTING: Final = "--openai.default_template_kwargs"
_TRIED: Final = (False, True, "none", "low", "medium", "high")
"""Values that templates know for their own variables: switches, and efforts of reasoning."""


def agreeing(
    chat_format: ChatFormat, echoes: Sequence[Echo], defaults: Mapping[str, Any] | None
) -> tuple[ChatFormat | None, str]:
    """Returns `chat_format` with the variables by which it renders as the engine does.

    Or None and a sentence that says how prompts differ. `defaults`: the engine's default variables;
    None: no variable, or else a single one, is tried.
    """
    first = chat_format.with_defaults(defaults or {})
    difference = _disagreement(first, echoes)
    if difference is None:
        return first, ""
    others = (chat_format.with_defaults(candidate) for candidate in _candidates(chat_format))
    found = next(
        (candidate for candidate in others if _disagreement(candidate, echoes) is None), None
    )
    if defaults is None:
        return found, "" if found else f"{difference} {_hint(chat_format)}"
    if found is not None:
        text = orjson.dumps(found.defaults).decode()
        return None, f"{difference} They are equal with {SETTING} '{text}'."
    return None, f"{difference} Are these the engine's {SETTING}? {_hint(chat_format)}"


def _candidates(chat_format: ChatFormat) -> Iterator[dict[str, Any]]:
    yield {}
    for value in _TRIED:
        for name in chat_format.own_variables:
            yield {name: value}


def _hint(chat_format: ChatFormat) -> str:
    names = ", ".join(chat_format.own_variables)
    variables = f"Its template reads the variables {names}. " if names else ""
    return (
        f"If the engine runs with --default-chat-template-kwargs, give the same to {SETTING}; if "
        "with --chat-template, name a folder with that template by --tokens.tokenizer. "
        f"{variables}"
    ).strip()


def _disagreement(chat_format: ChatFormat, echoes: Sequence[Echo]) -> str | None:
    for echo in echoes:
        kind = "with tools" if echo.tools else "without tools"
        try:
            ours = chat_format.prompt_ids(echo.messages, echo.tools or None, {})
        except (TemplateRefused, Refused) as error:
            return f"The template here refuses a conversation {kind} ({error})."
        if ours != echo.prompt_ids:
            return (
                f"A conversation {kind} is rendered to {len(ours)} tokens here and to "
                f"{len(echo.prompt_ids)} different ones by the engine."
            )
    return None
