"""Alarms that were provoked, seen in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect
from support.alarm_server import serving
from support.browsers import Visitor
from support.page_servers import in_a_thread
from support.waiting import PATIENCE

SENTENCES = (
    r"reward of zero is always 0",
    r"In 100 % of the groups of same .* all rewards are equal",
    r"In 100 % of the groups of same .* all rollouts say the same",
    r"\d+ workers of dies died in .* The worker exited with code 3",
    r"100 % of the rollouts of dies .* to the workers",
    r"% of the sampled tokens of masked .*structured_output",
    r"No trainer has leased for \d+ .*, while [\d,]+ groups? wait",
    r"A commit of the store takes",
    r"The disk of the store fills up",
    r"Model calls have been paused for",
)


def test_ten_alarms_stand_above_every_page_and_lead_to_what_they_mean(
    tmp_path: Path, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.api.recording.SECONDS", 0.25)
    with in_a_thread(lambda: serving(tmp_path, "Zero", "Same", "Dies", "Masked")) as alarms:
        page = visitor.page(f"{alarms.url}#/runs")
        shown = page.get_by_role("status", name="Alarms").get_by_role("listitem")
        for number, sentence in enumerate(SENTENCES):
            if number == len(SENTENCES) - 1:
                httpx.post(
                    f"{alarms.url}/v1/policy/pause", json={}, timeout=PATIENCE
                ).raise_for_status()
            expect(shown.filter(has_text=re.compile(sentence)).first).to_be_visible()
        visitor.shot(page, "alarms")
        shown.filter(has_text="say the same").get_by_role("link", name="show").click()
        expect(page).to_have_url(re.compile("environment=same"))
        expect(page.locator(".list-row").first).to_contain_text("same")
        page.context.close()
