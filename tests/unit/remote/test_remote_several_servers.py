"""A joiner that was given several URLs: it goes on at another server, in the same session."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from envserver_records.errors import ConflictError
from envserver_records.records import pack
from support.api import running_api
from support.doors import doors
from support.joined import registration, stream_group
from support.waiting import until

from envserver.remote import Heartbeat, Registration
from envserver.remote.gate import RunnerGate
from envserver.remote.link import Link
from envserver.running.run_settings import JoinSettings


async def test_a_session_goes_on_at_another_server_and_late_copies_do_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.remote.link._POLL_SECONDS", 0.2)
    versions: list[int] = []
    async with running_api(tmp_path / "store.db") as api, doors(api.url) as (first, second):
        first.shut("loses answers")
        wanted = Registration(**registration())
        link = Link(f"{first.url},{second.url}", wanted, gate=RunnerGate())
        link.publish, link.facts = versions.append, lambda: Heartbeat(capacity=9)
        async with link.open() as welcome:
            asked = [line.split()[1].partition("?")[0] for line in first.came + second.came]
            assert asked == ["/v1/environments"] * 2
            living = asyncio.create_task(link.live())
            for index, (here, other) in enumerate(((second, first), (first, second))):
                here.shut("loses answers")
                here.losing = b"/groups"
                other.shut("open")
                await link.post(pack(stream_group(index, welcome.seed)))
                await api.post("/v1/policy-version", {"version": index})
                await until(lambda: versions[-1:] == [index])  # noqa: B023
            here.shut("open")
            await first.come_late()
            await second.come_late()
            await link.post(pack(stream_group(2, welcome.seed)))
            assert not living.done()
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
        assert (await api.store.counts())["queued"] == 3
        (shown,) = (await api.get("/v1/environments"))["environments"]
        assert shown["gone"]


async def test_another_process_of_the_same_name_still_ends_a_session(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        wanted = Registration(**registration())
        one, other = (Link(api.url, wanted, gate=RunnerGate()) for _ in range(2))
        async with one.open(), other.open():
            with pytest.raises(ConflictError, match="Another process"):
                await one.live()


def test_each_url_of_join_is_checked() -> None:
    assert JoinSettings(url=" http://a:1/, https://b:2").url == "http://a:1,https://b:2"
    assert JoinSettings().url == ""
    with pytest.raises(ValueError, match="must look like"):
        JoinSettings(url="http://a:1,b:2")
