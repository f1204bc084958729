"""`envserver view` in a browser: evaluations, their comparison, a file that grows; and pages that
are files, with hostile text in them: nothing acts, nothing is fetched.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from playwright.sync_api import Locator, Page, expect
from support.browsers import Visitor, axe
from support.commands import running
from support.delivered import line, write_lines
from support.views import write_evaluation

from envserver import main

AT_ITS_END = "ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_CONNECTION_REFUSED"
HOSTILE = '<img src=x onerror="alert(1)">\u202eevil'


def listed(page: Page) -> Locator:
    return page.get_by_role("listbox", name="Groups").get_by_role("option")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`view` over two evaluations of forty tasks, the second a little better."""
    folder = tmp_path_factory.mktemp("runs")
    numbers = range(40)
    base = [line(n, (float(n % 2), float(n % 3 == 0)), split="test") for n in numbers]
    tuned = [line(n, (float(n % 2), float(n % 3 != 1)), split="test") for n in numbers]
    for one in tuned:
        one["envserver"]["model"] = HOSTILE
    write_evaluation(folder / "base", base)
    write_evaluation(folder / "tuned", tuned)
    with running("view", folder / "base", folder / "tuned", folder=folder) as view:
        yield view.wait_for(r"http://[\d.]+:\d+/")[0]


def test_two_runs_are_compared_down_to_both_groups_of_a_task(
    two_runs: str, visitor: Visitor
) -> None:
    page = visitor.page(two_runs)
    panel = page.get_by_role("region", name="math")
    expect(panel.get_by_role("row")).to_have_count(3)
    expect(panel.get_by_role("row", name="tuned")).to_contain_text("0.588 [")
    expect(panel.get_by_role("row", name="tuned")).to_contain_text("<img src=x")
    axe(page)
    page.get_by_role("link", name="Task by task").click()
    expect(page.get_by_role("heading", name="tuned against base")).to_be_visible()
    first = page.get_by_role("region", name="Tasks").get_by_role("row").nth(1)
    expect(first).to_contain_text("0.5")
    axe(page)
    page.get_by_label("Order").select_option("largest gain first")
    expect(first).to_contain_text("▲ +0.5")
    page.get_by_label("Search").fill("math-000002")
    expect(page.get_by_role("region", name="Tasks").get_by_role("row")).to_have_count(2)
    assert "text=math-000002" in page.url and "order=best" in page.url
    page.get_by_label("Search").blur()
    page.keyboard.press("j")
    expect(first.get_by_role("link", name="side by side")).to_be_focused()
    page.keyboard.press("Enter")
    for run in ("base", "tuned"):
        expect(page.get_by_text(f"{run}/math-train-0-000002").first).to_be_visible()
    expect(page.get_by_text("It is 2, says the 1.").first).to_be_visible()


@pytest.mark.slow
def test_a_file_of_a_gigabyte_is_shown_while_it_is_read(tmp_path: Path, visitor: Visitor) -> None:
    file, size = tmp_path / "run.jsonl", 0
    with file.open("wb") as out:
        for number in itertools.count():
            if size > 1_000_000_000:
                break
            answers = [f"{which} " * 20_000 for which in range(8)]
            size += out.write(orjson.dumps(line(number, (0.0, 1.0) * 4, answers=answers)) + b"\n")
    visitor.allow(AT_ITS_END)
    with running("view", file, folder=tmp_path) as view:
        started = time.monotonic()
        page = visitor.page(view.wait_for(r"http://[\d.]+:\d+/")[0])
        expect(listed(page).first).to_contain_text("math-")
        shown = time.monotonic() - started
        expect(page.get_by_text("so far")).to_have_count(0)
        whole = time.monotonic() - started
        memory = peak_mb(view.pid)
        print(f"{number} groups: page after {shown:.2f} s, all after {whole:.2f} s, {memory} MB")
        assert memory < 400


def peak_mb(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024


# Pages that are files


ATTACKS = (
    "</pre></style><script>document.title='owned'</script>"
    "<img src=//evil.example/x onerror=alert(1)><svg onload=alert(2)>"
    "<a href='javascript:alert(3)'>\u202e\x1b[31m"
)


def test_exported_rollouts_are_inert(visitor: Visitor, tmp_path: Path) -> None:
    facts = {"tools": [{"type": "function", "function": {"name": ATTACKS}}], "flags": [ATTACKS]}
    source = write_lines(
        tmp_path / "run.jsonl", [line(0, (0.0, 1.0), answers=[ATTACKS] * 2, **facts)]
    )
    assert main(["export", str(source), "--to", "html", "--out", str(tmp_path / "out.html")]) == 0
    page = visitor.page((tmp_path / "out.html").as_uri())
    assert "owned" not in page.title()
    closed = page.locator("details:not([open]) > summary")
    while closed.count():
        closed.first.click()
    expect(page.get_by_text("onerror=alert(1)").first).to_be_visible()
    assert page.locator("script, img, svg[onload], a[href^='javascript']").count() == 0
