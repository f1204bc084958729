"""Pages that are files, with hostile text in them: nothing acts, nothing is fetched."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect
from support.browsers import Visitor
from support.delivered import line, write_lines

from envserver import main

HOSTILE = (
    "</pre></style><script>document.title='owned'</script>"
    "<img src=//evil.example/x onerror=alert(1)><svg onload=alert(2)>"
    "<a href='javascript:alert(3)'>\u202e\x1b[31m"
)


def test_exported_rollouts_are_inert(visitor: Visitor, tmp_path: Path) -> None:
    facts = {"tools": [{"type": "function", "function": {"name": HOSTILE}}], "flags": [HOSTILE]}
    source = write_lines(
        tmp_path / "run.jsonl", [line(0, (0.0, 1.0), answers=[HOSTILE] * 2, **facts)]
    )
    assert main(["export", str(source), "--to", "html", "--out", str(tmp_path / "out.html")]) == 0
    page = visitor.page((tmp_path / "out.html").as_uri())
    assert "owned" not in page.title()
    closed = page.locator("details:not([open]) > summary")
    while closed.count():
        closed.first.click()
    expect(page.get_by_text("onerror=alert(1)").first).to_be_visible()
    assert page.locator("script, img, svg[onload], a[href^='javascript']").count() == 0
    visitor.shot(page, "export-html-hostile")
