"""The suffix of a sampled answer is what the template itself would write, or is refused.

The oracle samples what the template renders for an answer, up to the token that ends it. Then
prompt, completion and suffix must be the tokens of the whole conversation's rendering, or the
suffix must be refused.
"""

import importlib.util
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from envserver_records.errors import TemplateRefused
from envserver_records.records import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from support import extent
from support.cases import cases_of
from support.templates import (
    CASES,
    KINDS,
    OWN,
    STOPS_OF,
    THINKING,
    Case,
    answer,
    call,
    chat_format,
    result,
    tool,
    user,
)

from envserver.models.probe import Echo
from envserver.tokens.chat_format import ChatFormat, agreeing
from envserver.tokens.comparison import AnswerContent, Segment, compare
from envserver.tokens.prepare import Refused
from envserver.tokens.suffix import Completion, Suffix, Turn, suffix

STOPS = [
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>"),
    *("<|call|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "</s>", "<|user|>"),
    *("<|observation|>", "<end_of_utterance>", "<turn|>", "<|eot|>", "<|tool_response>"),
]
"""Tokens that end a turn in one family or another."""

ASK, NEXT = user("How much is 2 + 2?"), user("And then?")
TOOLS = [tool(), tool("now")]


class NotApplicable(Exception):
    """The template does not take such a conversation, or does not show the answer."""


@cache
def real_templates() -> dict[str, str]:
    """trl's copies of the templates of well-known models, by name."""
    package = importlib.util.find_spec("trl")
    assert package is not None and package.submodule_search_locations, "run `make test`"
    folder = Path(package.submodule_search_locations[0]) / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


@cache
def chatml() -> ChatFormat:
    return chat_format(OWN["chatml"], stops=["<|im_end|>"])


def held_against_the_whole(format: ChatFormat, case: Case) -> str:
    """`exact`, `wrong`, or why it was refused."""
    history, said = case.messages[: case.at], case.messages[case.at]
    try:
        prompt = format.prompt_text(history, case.tools, {})
        whole = format.prompt_text(case.messages, case.tools, {})
        alone = format.render([*history, said], case.tools, {}, generation_prompt=False)
    except TemplateRefused as error:
        raise NotApplicable("rejected") from error
    begin = shared(prompt, whole)
    stop, end = first_stop(whole, end_of_words(case, whole, begin))
    own_stop, _ = first_stop(alone, end_of_words(case, alone, begin))
    if stop is None:
        raise NotApplicable("endless")
    ids, until = format.encode(whole), format.encode(whole[:end])
    assert ids[: len(until)] == until
    sampled = until[len(format.encode(whole[:begin])) : -1]
    stop_id = format.vocabulary.special_id(own_stop or stop)
    assert stop_id is not None
    completion = Completion([*sampled, stop_id], "stop", None)
    try:
        found = behind(format, case, completion)
    except Refused as refused:
        return refused.reason
    return "exact" if [*until[:-1], stop_id, *found.ids] == ids else "wrong"


def behind(format: ChatFormat, case: Case, completion: Completion, extra: str = "") -> Suffix:
    before, after = case.messages[: case.at], case.messages[case.at + 1 :]
    turn = Turn(before, case.messages[case.at], after, case.tools, {})
    return suffix(format, turn, completion, extra)


def end_of_words(case: Case, text: str, begin: int) -> int:
    """Where what the answer says last ends: the last value of its last call, or its words."""
    words, calls = case.words, case.messages[case.at].get("tool_calls")
    if calls:
        values = re.findall(r"\w+", calls[-1]["function"]["arguments"])
        words = values[-1] if values else calls[-1]["function"]["name"]
    at = text.find(words, begin)
    if at < 0:
        raise NotApplicable("not shown")
    return at + len(words)


def shared(one: str, other: str) -> int:
    """Length of what both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def first_stop(text: str, begin: int) -> tuple[str | None, int]:
    """The token that ends the turn after `begin`, and its end."""
    found = [(at, stop) for stop in STOPS if (at := text.find(stop, begin)) >= 0]
    at, stop = min(found, default=(len(text), None))
    return stop, at + len(stop or "")


@pytest.mark.thorough
def test_real_templates_go_on_as_they_write() -> None:
    tally: Counter[tuple[str, str]] = Counter()
    families: set[tuple[str, str]] = set()
    tried = KINDS if extent.WHOLE else ("byte_level",)
    for name, source in real_templates().items():
        family = name.removesuffix("_training")
        if name != family and not extent.WHOLE:
            continue  # nearly its family's
        # SentencePiece has its own use for the underscore in DeepSeek's special tokens.
        for kind in tried if name == family and "▁" not in source else ("byte_level",):
            format = chat_format(source, kind, special=STOPS, stops=STOPS)
            for shape, case in CASES.items():
                try:
                    outcome = held_against_the_whole(format, case)
                except NotApplicable as why:
                    outcome = f"not applicable: {why}"
                assert outcome != "wrong", (name, shape, kind)
                tally[kind, outcome] += 1
                if outcome == "exact":
                    families.add((kind, family))
    # gpt-oss ends an answer by another token than it shows later; Gemma 4 moves content behind
    # the results of its calls.
    refused = {"stop_not_rendered", "end_moves"}
    unfit = {"not applicable: rejected", "not applicable: not shown"}
    assert {outcome for _, outcome in tally} <= {"exact", *refused, *unfit}, tally
    for kind in tried:
        least_exact, least_families = (450, 30)
        if kind == "byte_level":
            least_exact, least_families = (1000 if extent.WHOLE else 600), 40
        assert tally[kind, "exact"] >= least_exact, tally
        assert len([pair for pair in families if pair[0] == kind]) >= least_families


ONE = call({"expression": "1"})
ENDED = cases_of(__file__, "ends.toml")["ends"]


@pytest.mark.parametrize(("sampled", "finish", "reason", "calls", "follows"), ENDED)
def test_how_an_answer_ended_decides_what_follows(
    sampled: str, finish: str, reason: str, calls: bool, follows: str
) -> None:
    said = answer(None, ONE) if calls else answer("Four.")
    case = Case([ASK, said, result("4") if calls else NEXT], 1, "", TOOLS)
    completion = Completion(chatml().encode(sampled), finish, reason or None)
    if follows.isidentifier():
        with pytest.raises(Refused, match=f"^{follows}$"):
            behind(chatml(), case, completion)
        return
    found = behind(chatml(), case, completion)
    new = "\n<tool_response>\n4\n</tool_response>" if calls else "\nAnd then?"
    assert found.text == f"{follows}<|im_start|>user{new}<|im_end|>\n<|im_start|>assistant\n"
    assert found.closing == follows.strip()
    assert chatml().decode(found.ids) == found.text


def test_a_stop_token_may_open_the_next_message_and_only_what_was_not_sampled_follows() -> None:
    format = chat_format(OWN["role_stops"], stops=["<|user|>", "<|observation|>"])
    case = Case([ASK, answer("Four."), NEXT], 1, "")
    found = behind(format, case, Completion(format.encode("\nFour.<|user|>"), "stop", None))
    assert found.text == "\nAnd then?<|assistant|>"
    with pytest.raises(Refused, match="stop_not_rendered"):
        behind(format, case, Completion(format.encode("\nFour.<|observation|>"), "stop", None))


def conversation(template: str) -> st.SearchStrategy[list[Message]]:
    """What came before an answer, in `template`."""
    said = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
    rounds = st.tuples(said.map(user), said.map(answer))
    system = st.lists(said, max_size=int(template in ("chatml", "thinking")))
    return st.builds(
        lambda first, turns, last: [*first, *(part for turn in turns for part in turn), last],
        system.map(lambda texts: [{"role": "system", "content": text} for text in texts]),
        st.lists(rounds, max_size=2),
        said.map(user),
    )


@cache
def own_format(template: str, kind: str) -> ChatFormat:
    return chat_format(OWN[template], kind, stops=STOPS_OF[template])


@settings(deadline=None, max_examples=extent.examples(240))  # formats are made on the way
@given(st.data(), st.sampled_from(sorted(OWN)), st.sampled_from(KINDS))
def test_whatever_was_sampled_is_left_as_it_is(data: st.DataObject, name: str, kind: str) -> None:
    """Ids of any kind: pieces that no encoder would choose, half letters, special tokens."""
    format = own_format(name, kind)
    history = data.draw(conversation(name))
    new = data.draw(st.lists(st.text(max_size=8).map(user), min_size=1, max_size=2))
    case = Case([*history, answer("(what the engine read)"), *new], len(history), "")
    ids = data.draw(st.lists(st.integers(0, format.vocabulary.size - 1), max_size=12))
    stop = format.vocabulary.special_id(STOPS_OF[name][0])
    assert stop is not None
    end = data.draw(st.sampled_from(["stop token", "stop string", "length", "anything"]))
    extra = data.draw(st.sampled_from(["", " more"])) if end in ("stop string", "length") else ""
    completion = {
        "stop token": Completion([*ids, stop], "stop", data.draw(st.sampled_from([None, stop]))),
        "stop string": Completion(ids, "stop", "x"),
        "length": Completion(ids, "length", None),
        "anything": Completion(
            ids,
            data.draw(st.sampled_from(["stop", "length", "tool_calls", "abort"])),
            data.draw(st.sampled_from([None, "x", *ids[-1:]])),
        ),
    }[end]
    try:
        found = behind(format, case, completion, extra)
    except Refused as refused:
        assert end == "anything" or not ids or ids[-1] in format.stop_ids, refused.reason
        return
    after = format.prompt_text(case.messages, None, {}).rpartition("(what the engine read)")[2]
    ended = "" if found.closing else format.decode(completion.ids[-1:])
    assert ended + found.text == extra + after
    if kind != "prepended":  # whose decoding shows spaces that no template wrote
        said = format.decode(completion.ids)
        assert format.decode(completion.ids + found.ids) == said + found.text


def test_arguments_that_are_no_json_end_all_the_same() -> None:
    case = Case([ASK, answer(None, call("{half")), result("4")], 1, "", TOOLS)
    sampled = chatml().encode('<tool_call>{"name": "now", "arguments": {half</tool_call><|im_end|>')
    assert behind(chatml(), case, Completion(sampled, "stop", None)).text.startswith(
        "\n<|im_start|>user\n<tool_response>\n4"
    )


# If a template renders an answer differently than it was sampled, the difference is named

ASKED, HEAD, END, THEN = "<U>How much?<E>", "<A>", "<E>", "<U>And now?<E><A>"
CALLS = (("call-1", "add", '{"one":1.5,"two":["a \\"b\\"",true]}'),)
WRITTEN = '<call>{"one": 1.5, "two": ["a \\"b\\"", true], "name": "add"}</call>'
SAMPLED = '<call>{"name": "add", "arguments": {"one": 1.5, "two": ["a \\"b\\"", true]}}</call>'
TURNS = cases_of(__file__, "comparisons.toml")["turns"]


@pytest.mark.parametrize(("sampled", "shown", "more", "differences"), TURNS)
def test_differences_have_names(
    sampled: str, shown: str, more: dict[str, Any], differences: list[str]
) -> None:
    sampled, shown = sampled.replace("CALL", SAMPLED), shown.replace("CALL", WRITTEN)
    more = {name: tuple(told) if name == "specials" else told for name, told in more.items()}
    called = more.pop("called", None)
    answer = AnswerContent(sampled, ()) if called is None else AnswerContent(called, CALLS)
    segment = Segment(context=ASKED + HEAD, sampled=sampled, answer=answer, **more)
    whole = ASKED + HEAD + shown + END + THEN
    assert compare([segment], END + THEN, whole, lambda: HEAD) == [{*differences}]
    later = Segment(context=END + THEN, sampled="Six.", answer=AnswerContent("Six.", ()))
    found = compare([segment, later], END + THEN, whole + "Six." + END + THEN, lambda: HEAD)
    assert found[0] == {*differences}


SINGLE = Segment(context=ASKED + HEAD, sampled="Four." + END, answer=AnswerContent("Four.", ()))
TWO = Segment(context=THEN, sampled="Six." + END, answer=AnswerContent("Six.", ()))


@pytest.mark.parametrize(
    "shown",
    [
        f"<U>How many?<E><A>Four.<E>{THEN}Six.<E>{THEN}",
        f"{ASKED}<A>Four.<E>{THEN}Six.<E>{THEN}And",
        f"{ASKED}<A>Four.<E><U>And then?<E><A>Six.<E>{THEN}",
        f"{ASKED}<A>Four.<E>{THEN}",
        f"{ASKED}<A>Four.<E>{THEN}Six.<E>{THEN.replace('now', 'you')}",
        "",
    ],
)
def test_a_changed_context_is_no_difference_in_a_turn(shown: str) -> None:
    assert {"other"} in compare([SINGLE, TWO], THEN, shown, lambda: HEAD)


# Our rendering and an engine's

QUESTION = [user("How much is 2 + 2?")]
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
STYLED = THINKING.replace("{%- if messages[0]", "{{- style }}{%- if messages[0]", 1)


def echoes(engine: ChatFormat) -> list[Echo]:
    """What the probe learns of an engine that renders by `engine`."""
    return [
        Echo(
            messages=QUESTION,
            tools=tools,
            prompt_ids=engine.prompt_ids(QUESTION, tools or None, {}),
        )
        for tools in ([], [tool()])
    ]


@pytest.mark.parametrize(
    ("template", "engines", "told", "found", "hint"),
    [
        (THINKING, {}, None, {}, ""),
        (THINKING, OFF, None, OFF, ""),
        (THINKING, ON, None, {}, ""),  # the same as without it
        (THINKING, {}, OFF, None, "They are equal with --openai.default_template_kwargs '{}'."),
        (THINKING, OFF, {}, None, "--openai.default_template_kwargs '{\"enable_thinking\":false}'"),
        (STYLED, {"style": "low"}, None, {"style": "low"}, ""),
        (STYLED, {"style": "odd"}, None, None, "give the same to --openai.default_template_kwargs"),
        (STYLED, {"style": "odd"}, {"style": "odd"}, {"style": "odd"}, ""),
    ],
)
def test_default_variables_are_told_or_found_and_never_guessed_wrong(
    template: str,
    engines: dict[str, Any],
    told: dict[str, Any] | None,
    found: dict[str, Any] | None,
    hint: str,
) -> None:
    ours = chat_format(template, KINDS[0])
    agreed, why = agreeing(ours, echoes(ours.with_defaults(engines)), told)
    assert (None if agreed is None else agreed.defaults) == found
    assert hint in why
    assert bool(why) == (found is None)


def test_a_requests_own_variable_wins_and_a_null_leaves_the_default() -> None:
    ours = chat_format(THINKING, KINDS[0]).with_defaults(OFF)
    plain = ours.prompt_text(QUESTION, None, {})
    assert "</think>" in plain
    assert "</think>" not in ours.prompt_text(QUESTION, None, ON)
    assert ours.prompt_text(QUESTION, None, {"enable_thinking": None}) == plain
    assert ours.prompt_text(QUESTION, None, {"enable_thinking": "auto"}) == plain
