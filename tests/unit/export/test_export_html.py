"""The page of a run: what it shows, that nothing in it can act, and that it stays bounded."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from envserver_factory.exporting import html
from envserver_factory.exporting.formats import Options
from envserver_factory.exporting.html import Html, HtmlPages
from envserver_local.simulated.tokenizer import shared_tokenizer

from envserver.export import group_of

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> \" onclick='alert(3)' "
    "</style></div></details></title> {{ 7 * 7 }} <a href='javascript:alert(4)'>x</a> "
    "<!-- \x00\x1b[31m \u202egnp.exe <meta http-equiv=refresh content='0;url=//evil.example'>"
)
ELEMENTS = (
    "html head meta title style body h1 h2 h3 p div span b i a table tr th td details summary"
)
ATTRIBUTES = "lang charset http-equiv content name class id href style title dir colspan"


class Page(HTMLParser):
    """What a browser would see: elements, attributes, addresses and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.addresses: list[str] = []
        self.styles: set[str] = set()
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes.update(name for name, _ in attrs)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]
        self.styles.update(value or "" for name, value in attrs if name == "style")

    def handle_data(self, data: str) -> None:
        self.text += data


EVERYTHING = Path(__file__).with_name("everything.json").read_text()
"""The messages and the facts of a rollout, in which everything that can be text is TEXT."""


def line(
    number: int, text: str, *, rollouts: int = 1, model: str = "sim", tokens: int = 6
) -> dict[str, Any]:
    """A group in which everything that can be text is `text`."""
    ids = shared_tokenizer().encode("two and two is four, and more besides")[:tokens]
    everything = json.loads(EVERYTHING.replace("TEXT", json.dumps(text)[1:-1]))
    name = f"{text}-{number}"
    each = [
        {**everything["rollout"], "rollout_id": f"{name}-r{row}", "rows": [row]}
        for row in range(rollouts)
    ]
    facts = {"group_id": name, "env": text, "task_id": name, "split": "train", "seed": 0}
    facts |= {"model": model, "index": number, "created_at": 1.0e9, "asked": rollouts + 1}
    facts |= {"failures": [{"kind": text, "message": text}], "lost": {text: 1}, "rollouts": each}
    return {
        "tokens": [ids] * rollouts,
        "masks": [[-100, -100, *ids[2:]]] * rollouts,
        "inference_logprobs": [[1.0, 1.0, *([-0.25] * (len(ids) - 2))]] * rollouts,
        "messages": [everything["messages"]] * rollouts,
        "scores": [0.5] * rollouts,
        "envserver": facts,
    }


def pages(folder: Path, lines: list[dict[str, Any]], **limits: Any) -> dict[str, str]:
    form, writer = Html(Options()), HtmlPages(folder, 1000, **limits)
    for number, each in enumerate(lines, 1):
        group = group_of(each, f"some/where.jsonl, line {number}")
        for row in form.rows(group, group.rollouts):
            writer.put(row)
    return {one.path: (folder / one.path).read_text("utf-8") for one in writer.close()}


@pytest.mark.parametrize("model", ["sim", HOSTILE])
def test_nothing_from_outside_can_act(tmp_path: Path, model: str) -> None:
    page = pages(tmp_path, [line(0, HOSTILE, model=model)], title=HOSTILE)["index.html"]
    seen = Page(page)
    assert seen.elements <= {*ELEMENTS.split()}
    assert seen.attributes <= {*ATTRIBUTES.split()}
    assert set(seen.addresses) == {"#r1"}
    assert all(re.fullmatch(r"width:[0-9.]+%", style) for style in seen.styles)
    assert "default-src 'none'" in page
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in seen.text
    assert "{{ 7 * 7 }}" in seen.text
    assert "some/where" not in page
    assert not re.search("[\x00\x1b\u202e]", page) and "[U+202E]" in seen.text


def test_a_page_shows_the_run_and_its_tokens(tmp_path: Path) -> None:
    page = Page(pages(tmp_path, [line(0, "word", rollouts=2)])["index.html"])
    assert "in 1 groups" in page.text and "2 of 3 rollouts" in page.text
    assert "Row 1: 6 tokens, 4 sampled, mean logprob -0.250" in page.text
    assert "two and two is" in page.text
    assert "hooks 1 changed, 1 refused" in page.text and "hosts outside word 2" in page.text


def test_a_big_run_is_an_index_with_pages_of_bounded_size(tmp_path: Path) -> None:
    lines = [line(number, "word", rollouts=2) for number in range(7)]
    made = pages(tmp_path, lines, most_rollouts=4)
    assert list(made) == [f"pages/page-000{n}.html" for n in range(1, 5)] + ["index.html"]
    index = Page(made["index.html"])
    assert index.addresses == [f"pages/page-000{n}.html" for n in range(1, 5)]
    assert "in 7 groups" in index.text
    assert Page(made["pages/page-0004.html"]).addresses == ["../index.html", "#r1", "#r2"]

    (tmp_path / "by-size").mkdir()
    assert len(pages(tmp_path / "by-size", lines, most_characters=1000)) == 8


def test_what_is_too_long_is_cut_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MOST_TOKENS", 3)
    monkeypatch.setattr(html, "MOST_MESSAGES", 2)
    long = "x" * (html.MOST_SHOWN + 1234)
    page = pages(tmp_path, [line(0, long)])["index.html"]
    assert len(page) < 40 * html.MOST_SHOWN
    text = Page(page).text
    assert "… 1,234 more characters" in text
    assert "2 messages left out" in text
    assert "… 1 more sampled tokens" in text
