"""Evaluations of held-out tasks while a trainer learns, seen in a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import expect
from support.browsers import Visitor, axe
from support.commands import until
from support.page_servers import in_a_thread
from support.waiting import PATIENCE

import envserver


@asynccontextmanager
async def evaluating(folder: Path) -> AsyncIterator[str]:
    """A server that evaluates each policy version on three tasks; yields its address."""
    async with envserver.aio.serve(
        "math",
        model="sim",
        sim={"latency_seconds": 0},
        workers={"processes": 1},
        store=str(folder / "groups.db"),
        server={"port": 0, "drain_seconds": 0},
        evaluate={"every": 1, "total_steps": 3},
    ) as server:
        yield server.url


def test_each_evaluated_version_is_a_point_and_a_row(tmp_path: Path, visitor: Visitor) -> None:
    with (
        in_a_thread(lambda: evaluating(tmp_path)) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
    ):

        def evaluations() -> list[dict[str, Any]]:
            return list(http.get("/v1/evaluations").json()["evaluations"])

        def states() -> list[str]:
            return [one["state"] for one in evaluations()]

        assert "held_out" not in http.get("/v1/source").json()["parts"]
        for count in (1, 2):
            version = {"version": count - 1}
            http.post("/v1/policy-version", json=version).raise_for_status()
            until(lambda n=count: states() == ["complete"] * n, lambda: str(states()))
        means = [one["results"]["evaluate/math/mean_reward"] for one in evaluations()]
        page = visitor.page(f"{url}/#/held_out")
        expect(page.get_by_label("Rewards of 2 evaluations over policy versions")).to_be_visible()
        points = page.locator(".versions a title")
        told = [f"version {version}: mean {mean:.3g} of" for version, mean in enumerate(means)]
        for point, text in zip(points.all_text_contents(), told, strict=True):
            assert point.startswith(text)
        expect(page.get_by_role("rowheader")).to_have_text(["1", "0"])
        axe(page)
        page.close()  # before the server ends, which it would report
