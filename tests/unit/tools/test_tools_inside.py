"""Reading and editing files, as the functions inside a sandbox do it, for any text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from envserver_tools.inside.files import edit, read_file
from envserver_tools.inside.paths import Refused
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory that this process is in, as programs of a sandbox are in /work."""
    before, place = Path.cwd(), tmp_path_factory.mktemp("work")
    os.chdir(place)
    yield place
    os.chdir(before)


TEXTS = st.text(st.sampled_from("ab\n\ré\t"), max_size=60)


@settings(max_examples=examples(150), deadline=None)
@given(text=TEXTS, lines=st.integers(1, 9))
def test_pages_put_together_are_the_file(workspace: Path, text: str, lines: int) -> None:
    Path("page").write_bytes(text.encode())
    whole, start = [], 1
    while text:
        page = read_file("page", start, lines)["text"].split("\n")
        footer = page.pop() if page[-1].startswith("[") else ""
        whole += [line.partition("\t")[2] for line in page]
        assert len(page) <= lines
        if not footer:
            break
        start += len(page)
        assert footer.endswith(f"go on with start={start}]")
    assert "\n".join(whole) == text.removesuffix("\n")


@settings(max_examples=examples(150), deadline=None)
@given(text=TEXTS, old=st.text(st.sampled_from("ab\n"), min_size=1, max_size=3), new=TEXTS)
def test_an_edit_is_a_replacement_or_nothing(
    workspace: Path, text: str, old: str, new: str
) -> None:
    Path("edited").write_bytes(text.encode())
    count = sum(text.startswith(old, at) for at in range(len(text)))
    if count == 1 and old != new:
        edit("edited", old, new)
        text = text.replace(old, new)
    else:
        with pytest.raises(Refused, match="same" if old == new else f"occurs {count} times"):
            edit("edited", old, new)
    assert Path("edited").read_bytes() == text.encode()
