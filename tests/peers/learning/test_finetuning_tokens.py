"""Which tokens are trained: with chat templates of several kinds, none of which marks them."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from envserver_clients.finetuning.conversation import Conversation, Plain, read_pair, read_row
from envserver_clients.finetuning.examples import (
    NOT_TRAINED,
    Encoded,
    Encoder,
    ExampleCounts,
    sft_examples,
)
from envserver_clients.finetuning.settings import SftSettings
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_model import TEMPLATE, tokenizer

from envserver import InputError

BEGIN = "<|begin|>"
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>\n\n"
    "{{ m.content | trim }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}"
)
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{{ eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
FORGETS = (  # earlier thoughts are not shown again
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = FORGETS.replace(  # the prompt begins a thought that is not shown in the answer
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)
TEMPLATES = {"chatml": TEMPLATE, "headers": HEADERS, "brackets": BRACKETS, "forgets": FORGETS}


def words(template: str) -> Any:
    made = tokenizer()
    made.chat_template = template
    if "bos_token" in template:
        made.add_special_tokens({"bos_token": BEGIN})
    return made


def messages(*contents: str) -> list[dict[str, Any]]:
    """The user begins."""
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": text} for place, text in enumerate(contents)]


def runs(row: Encoded) -> list[tuple[list[int], list[int]]]:
    """What is trained in a row: each piece with all that stands before it."""
    found, start = [], 0
    for trained, places in groupby(row.trained):
        end = start + len(list(places))
        if trained:
            found.append((row.ids[:start], row.ids[start:end]))
        start = end
    return found


def said(made: Any, row: Encoded) -> list[str]:
    return [made.decode(answer) for _, answer in runs(row)]


def encoded(made: Any, *contents: str, **how: Any) -> list[Encoded]:
    return Encoder(made, **how).conversation(Conversation(messages(*contents)), "row")


texts = st.text(st.sampled_from("ab 1+\n.é"), min_size=1, max_size=12).filter(
    lambda text: text == text.strip()
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=8)
@given(st.lists(texts, min_size=2, max_size=6), st.booleans())
def test_each_turn_is_trained_once_behind_what_the_engine_would_have_had(
    name: str, contents: list[str], thinks: bool
) -> None:
    made = words(TEMPLATES[name])
    if thinks:
        contents = [f"<think>{text}</think>{text}" for text in contents]
    chat = messages(*contents)
    rows = Encoder(made, ends=frozenset({0})).conversation(Conversation(chat), "row")
    pieces = [piece for row in rows for piece in runs(row)]
    for place, (before, answer) in zip(range(1, len(chat), 2), pieces, strict=True):
        text = made.apply_chat_template(chat[:place], tokenize=False, add_generation_prompt=True)
        assert before == made(text, add_special_tokens=False)["input_ids"]
        assert answer[-1] in (made.eos_token_id, 0)
        assert made.decode(answer[:-1]).strip() == chat[place]["content"]
    if "bos_token" in TEMPLATES[name]:
        assert all(row.ids.count(made.bos_token_id) == 1 for row in rows)
    if name != "forgets" or not thinks:
        assert len(rows) == 1


def test_a_template_that_forgets_makes_a_row_of_each_turn() -> None:
    made, contents = words(FORGETS), ("a", "<think>b</think>c", "d", "e")
    assert len(encoded(made, *contents)) == 2
    (last,) = encoded(made, *contents, last_only=True)
    assert said(made, last) == ["e<|im_end|>"]


def test_a_prompt_that_is_rendered_otherwise_is_told_of() -> None:
    made = words(THINKS)
    encoder = Encoder(made)
    (row,) = encoder.conversation(Conversation(messages("a", "b")), "row")
    assert encoder.rendered_otherwise == 1
    assert said(made, row) == ["b<|im_end|>"]


def test_calls_of_tools_are_trained_and_their_results_are_not() -> None:
    made = tokenizer()
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    read = read_row({"messages": chat, "tools": json.dumps(tools)}, "row")
    assert isinstance(read, Conversation)
    (row,) = Encoder(made).conversation(read, "row")
    called, told = said(made, row)
    assert called.endswith('{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>')
    assert told == "Two.<|im_end|>"
    assert '"parameters"' in made.decode(row.ids)


@pytest.mark.parametrize("prompt", ["Once", f"{BEGIN}Once"])
def test_plain_text_begins_once_and_ends(prompt: str) -> None:
    from tokenizers.processors import TemplateProcessing

    made = words(BRACKETS)
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, made.bos_token_id)]
    )
    row = Encoder(made).plain(Plain(prompt, " upon a time"))
    assert row.ids[0] == made.bos_token_id and row.ids.count(made.bos_token_id) == 1
    assert said(made, row) == [" upon a time<|im_end|>"]


def examples(folder: Path, *rows: Any, **how: Any) -> tuple[list[Any], ExampleCounts]:
    """A row may be the text of its line."""
    path = folder / "rows.jsonl"
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines))
    counts = ExampleCounts()
    chosen = SftSettings(model="", data=path, output=folder, max_length=64, **how)
    return list(sft_examples(chosen, [path], Encoder(tokenizer()), counts)), counts


def trained(labels: list[int]) -> str:
    return tokenizer().decode([label for label in labels if label != NOT_TRAINED])


def test_all_forms_of_rows_are_read(tmp_path: Path) -> None:
    rows = [
        {"messages": messages("a", "b"), "reward": 1.0},
        {"prompt": "a", "completion": "b"},
        {"prompt": messages("a"), "completion": [{"role": "assistant", "content": "b"}]},
        {"tool": "bash", "instruction": "a", "output": "b", "meta": {}},
        {"prompt": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", "completion": "b"},
    ]
    made, counts = examples(tmp_path, *rows)
    assert counts.rows == counts.examples == 5
    assert {trained(row["labels"]) for row in made} == {"b<|im_end|>"}
    start = next(place for place, one in enumerate(made[0]["labels"]) if one != NOT_TRAINED)
    assert all(row["input_ids"][: start + 2] == made[0]["input_ids"][: start + 2] for row in made)


@pytest.mark.parametrize(
    ("too_long", "examples_left", "counted"),
    [
        ("drop", 1, {"dropped_too_long": 2, "dropped_nothing_to_train": 1}),
        ("truncate", 2, {"truncated": 2, "dropped_nothing_to_train": 2}),
    ],
)
def test_rows_over_the_limit_are_left_out_or_cut_off_and_counted(
    tmp_path: Path, too_long: str, examples_left: int, counted: dict[str, int]
) -> None:
    rows = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": "b 1 " * 60},
        {"prompt": "a 1 " * 60, "completion": "b"},
        {"messages": messages("a")},
    ]
    made, counts = examples(tmp_path, *rows, too_long=too_long)
    assert len(made) == examples_left == counts.examples
    assert all(len(row["input_ids"]) <= 64 for row in made)
    assert {name: value for name, value in counts.as_dict().items() if name in counted} == counted


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ('{"text": "a"}', "this one has text"),
        ('{"messages": [{"content": "a"}]}', "does not have a role"),
    ],
)
def test_a_wrong_row_is_told_with_its_place(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(InputError, match=rf"rows.jsonl, line 2.*{why}"):
        examples(tmp_path, {"prompt": "a", "completion": "b"}, line)


def test_the_prompt_of_a_pair_stands_apart_or_in_both_answers() -> None:
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("two", "three"))
    whole = {"chosen": messages("a") + chosen, "rejected": messages("a") + rejected}
    split = {"prompt": messages("a"), "chosen": chosen, "rejected": rejected}
    assert read_pair(whole, "row") == read_pair(split, "row")
    with pytest.raises(InputError, match="are the same"):
        read_pair({**split, "rejected": chosen}, "row 3")


def test_recorded_tokens_are_trained_as_they_are(tmp_path: Path) -> None:
    row = {"tokens": [9, 8, 7, 6, 5], "mask": [False, True, True, False, True]}
    (one,), _ = examples(tmp_path, {**row, "messages": messages("a", "b")}, prompts="recorded")
    assert one == {"input_ids": row["tokens"], "labels": [NOT_TRAINED, 8, 7, NOT_TRAINED, 5]}
    wrong: list[dict[str, Any]] = [{**row, "mask": [1]}, {**row, "tokens": ["a"] * 5}]
    for other in (*wrong, {"messages": messages("a", "b")}):
        with pytest.raises(InputError, match=r"line 1: recorded tokens must be"):
            examples(tmp_path, other, prompts="recorded")
    with pytest.raises(InputError, match="token 99999 is not in the model's vocabulary"):
        examples(tmp_path, {**row, "tokens": [1, 2, 3, 4, 99999]}, prompts="recorded")


def test_a_rollout_of_several_recorded_rows_is_one_conversation(tmp_path: Path) -> None:
    row = {"messages": messages("a", "b"), "tokens": [9, 8], "mask": [False, True]}
    rows = [{**row, "rollout_id": name, "row": number} for name in "xy" for number in range(3)]
    made, counts = examples(tmp_path, *rows)
    assert len(made) == counts.examples == 2 and counts.dropped_repeated == 4
    made, counts = examples(tmp_path, *rows, prompts="recorded")
    assert len(made) == 6 and counts.dropped_repeated == 0


def test_a_template_with_marks_says_the_same() -> None:
    """transformers' own mask, from marks that the template puts around what the assistant says."""
    marked = TEMPLATE.replace(
        "<|im_start|>{{ message.role }}\n{{ message.content or '' }}",
        "<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
        "{{ message.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}{% continue %}{% endif %}"
        "{{ message.content or '' }}",
    )
    assert marked != TEMPLATE
    contents = ("a b", "c 1", "d", "e\nf")
    (row,), (same,) = (encoded(words(template), *contents) for template in (TEMPLATE, marked))
    theirs = words(marked).apply_chat_template(
        messages(*contents), return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    assert same == row
    flags = [bool(one) for one in theirs["assistant_masks"]]
    assert theirs["input_ids"] == row.ids and flags == row.trained
