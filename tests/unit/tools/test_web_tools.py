"""Agents see the web: searched, read, filtered; recorded, so that it stays the same; bounded."""

import asyncio
import io
import multiprocessing
import socket
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from envserver_records.tasks import Json
from envserver_tools.calling import ToolError, use_tool
from envserver_tools.web import (
    FetchLimits,
    ProviderFailed,
    Recorder,
    Store,
    Viewer,
    Web,
    WebSettings,
)
from envserver_tools.web import web_tools as tools_of
from envserver_tools.web.fetching import (
    BadAddress,
    Fetcher,
    PublicResolver,
    Raw,
    check_literal,
    normal_url,
)
from envserver_tools.web.web import DENIED, LeakFilter
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.waiting import PATIENCE, settled
from support.websites import KEY, QUESTION, Websites, websites

ANYBODY = Viewer()


@pytest.fixture
async def sites() -> AsyncIterator[Websites]:
    async with websites() as found:
        yield found


def seen_at(sites: Websites, **changes: Any) -> Web:
    facts: Json = {"provider_url": sites.url, "allow_private": True, **changes}
    facts.setdefault("limits", FetchLimits(seconds=20, bytes=1 << 20))
    return Web(WebSettings(**facts), key=KEY)


async def test_search_and_pages_with_tavily(sites: Websites) -> None:
    page = f"{sites.url}/page"
    async with seen_at(sites) as web:
        tools = tools_of(web, Viewer(question=QUESTION))

        async def shown(name: str, **arguments: Any) -> str:
            return (await use_tool(tools, name, arguments)).text

        found = await shown("web_search", query="  blue \n herons ")
        assert found.startswith(f"1. About blue herons\n   {page}\n   seen 1")
        assert sites.keys == {f"Bearer {KEY}"}
        text = await shown("visit_page", url=f"{page}#part", limit=60)
        for part in ("'A page'", "# Visit 1", f"[on]({sites.url}/next)", "go on with offset=60"):
            assert part in text
        assert "1 times" in await shown("find_in_page", url=page, text="visit")
        for bad in ({"query": " "}, {"query": "x" * 500}, {"query": "x", "num_results": 99}):
            assert not (await use_tool(tools, "web_search", bad)).ok
        assert "10 €" in await web.visit(f"{sites.url}/latin", 0, 100, ANYBODY)
    # A provider without a key, and pages by extraction.
    options = {"provider": "duckduckgo", "provider_url": f"{sites.url}/html"}
    async with seen_at(sites, **options) as web:
        text = await web.search("herons", 5, Viewer(question=QUESTION))
    assert text == f"1. About herons !\n   {page}\n   seen 2"
    async with seen_at(sites, reader="tavily") as web:
        assert "text by extraction" in await web.visit("https://a.example/", 0, 100, ANYBODY)


@pytest.mark.parametrize("provider", ["tavily", "duckduckgo"])
async def test_a_search_asks_for_some_results_of_a_year(sites: Websites, provider: str) -> None:
    place = {"tavily": sites.url, "duckduckgo": f"{sites.url}/html"}[provider]
    async with seen_at(sites, provider=provider, provider_url=place, depth="advanced") as web:
        tools = tools_of(web)
        asked = {"query": "herons", "num_results": 1, "filter_year": 1987}
        found = await use_tool(tools, "web_search", asked)
        assert found.ok and "2. " not in found.text
        assert not (await use_tool(tools, "web_search", {**asked, "filter_year": 87})).ok
        await use_tool(tools, "web_search", {"query": "herons"})
    if provider == "tavily":
        basis = {"search_depth": "advanced", "include_usage": True}
        year = {"start_date": "1987-01-01", "end_date": "1987-12-31"}
        assert sites.searches == [{"max_results": 1, **basis, **year}, {"max_results": 5, **basis}]
    else:
        assert sites.searches == [{"df": "1987-01-01..1987-12-31"}, {}]


async def test_a_provider_that_fails_is_asked_again_and_then_no_observation(
    sites: Websites, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(seconds: float) -> None:
        return None

    async with seen_at(sites) as web:
        monkeypatch.setattr("envserver_tools.web.fetching.asyncio.sleep", at_once)
        sites.failing = [429, 503]
        assert "seen 3" in await web.search("x", 1, ANYBODY)
        sites.failing = [401]
        with pytest.raises(ProviderFailed, match="TAVILY_API_KEY") as caught:
            await web.search("y", 1, ANYBODY)
        assert KEY not in str(caught.value)


NO_PAGES = {
    "/none": "HTTP status 404",
    "/loop": "redirects more than 5",
    "/bomb": "more than 1,048,576 bytes",
    "/film": "video/mp4 is not a document",
    "/hang": "within 0.5 seconds",
    "/out?to=file:///etc/passwd": "only http and https",
}


@pytest.mark.parametrize("path", NO_PAGES)
async def test_what_no_page_is_says_so(sites: Websites, path: str) -> None:
    limits = FetchLimits(seconds=0.5 if path == "/hang" else 20, bytes=1 << 20)
    async with seen_at(sites, limits=limits) as web:
        with pytest.raises(ToolError, match=NO_PAGES[path]):
            await web.visit(f"{sites.url}{path}", 0, 100, ANYBODY)


PRIVATE = """
127.0.0.1 localhost 127.1 2130706433 0x7f000001 0177.0.0.1 0 10.0.0.1 169.254.169.254 [::1]
[::ffff:127.0.0.1] [64:ff9b::7f00:1] [::127.0.0.1] [64:ff9b:1::7f00:1] [::ffff:0:7f00:1] [fec0::1]
[2002:7f00:1::] [fe80::1] 100.64.0.1 224.0.0.1 127.0.0.1. １２７.0.0.1
"""


async def test_private_addresses_are_refused(sites: Websites) -> None:
    port = sites.url.rpartition(":")[2]
    async with Fetcher(FetchLimits(seconds=5)) as fetcher:
        for host in PRIVATE.split():
            raw = await fetcher.page(f"http://{host}:{port}/page")
            assert raw.error and raw.lasting and not raw.body, host
    assert not sites.asked


async def test_names_and_redirects_do_not_lead_into_private_networks(
    sites: Websites, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(sites.url.rpartition(":")[2])
    looked_up = []

    def look_up(host: str, port: int, family: int) -> list[Any]:
        looked_up.append(host)
        private = {"hidden.example": "127.0.0.1", "mixed.example": "10.1.1.1"}[host]
        facts = {"family": socket.AF_INET, "proto": 0, "flags": 0, "hostname": host, "port": port}
        return [facts | {"host": address} for address in ("93.184.215.14", private)]

    monkeypatch.setattr("envserver_tools.web.fetching.look_up", look_up)
    async with Fetcher(FetchLimits(seconds=5)) as fetcher:
        for host in ("hidden.example", "mixed.example"):
            raw = await fetcher.page(f"http://{host}:{port}/page")
            assert "private address" in raw.error
            assert raw.lasting
    assert looked_up == ["hidden.example", "mixed.example"]

    def only_the_first(host: str) -> None:
        if sites.asked["/hop"]:
            check_literal(host)

    monkeypatch.setattr("envserver_tools.web.fetching.check_literal", only_the_first)
    async with Fetcher(FetchLimits(seconds=5)) as fetcher:
        raw = await fetcher.page(f"{sites.url}/hop?to=http://127.0.0.1:{port}/page")
    assert "not a public address" in raw.error
    assert sites.asked == {"/hop": 1}
    assert PublicResolver  # the one that is used where nothing is patched


def test_one_address_is_written_in_one_way() -> None:
    same = ["HTTP://Ex.ample:80/a%20b?x=1&utm_source=q#top", "http://ex.ample/a b?x=1"]
    assert {normal_url(url) for url in same} == {"http://ex.ample/a%20b?x=1"}
    assert normal_url("ex.ample") == "https://ex.ample/"
    for bad in ("ftp://a/b", "http://u:p@a/", "http://", "http://a:b/", "javascript://x"):
        with pytest.raises(BadAddress):
            normal_url(bad)


async def test_what_gives_the_task_away_is_left_out_and_told(sites: Websites) -> None:
    told: list[str] = []
    viewer = Viewer(question=QUESTION, flag=told.append)
    async with seen_at(sites, denied=(*DENIED, "127.0.0.1/sheets")) as web:
        text = await web.search("herons", 5, viewer)
        assert "Seven" not in text
        assert "huggingface" not in text
        assert len(told) == 2
        hop = "/hop?to=/sheets/x"
        for path in ("/leak", "/titled", hop, "/sheets", "/x/%2e%2e/sheets", "/x/../sheets/y"):
            with pytest.raises(ToolError, match="it is not available"):
                await web.visit(f"{sites.url}{path}", 0, 1000, viewer)
        with pytest.raises(ToolError, match="it is not available"):
            await web.visit("https://www.HuggingFace.co//data%73ets/x", 0, 100, viewer)
        assert told == ["web_leak_dropped"] * 9
        assert web.metrics.leaks_dropped == 9
        assert not {path for path in sites.asked if "sheets" in path}
        assert "7" in await web.visit(f"{sites.url}/leak", 0, 1000, ANYBODY)


async def test_what_is_seen_of_the_question_in_parts_is_told(sites: Websites) -> None:
    told: list[str] = []

    def viewer(rollout: str) -> Viewer:
        return Viewer(question=QUESTION, flag=told.append, rollout=rollout)

    async with seen_at(sites) as web:
        for rollout in ("a", "b"):  # one page each: no more than a phrase in common
            page = await web.visit(f"{sites.url}/half?from=0", 0, 1000, viewer(rollout))
            assert "How many blue herons" in page
        assert told == []
        await web.find(f"{sites.url}/half?from=6", "elbe", viewer("a"))
        assert told == ["web_leak_seen"]
    async with seen_at(sites, leaks="show", denied=()) as web:
        told.clear()
        assert "7" in await web.visit(f"{sites.url}/leak", 0, 1000, viewer("c"))
        assert set(told) == {"web_leak_seen"}


def test_the_filter_lets_other_pages_through() -> None:
    leaks = LeakFilter()
    assert not leaks.denies("https://huggingface.co/papers")
    assert not leaks.denies("https://nothuggingface.co/datasets")
    for url in (
        "https://cdn.example/x?repo=gaia-benchmark",
        "https://web.archive.org/web/2024/https://huggingface.co/datasets/x",
        "https://reader.example/?u=https%3A%2F%2Fwww.huggingface.co%2Fdatasets%2Fx",
        "https://huggingface-co.translate.goog/datasets/x",
        "https://huggingface.co/api/datasets/x/tree/main",
    ):
        assert leaks.denies(url), url
    assert not leaks.repeats("Blue herons nested on the northern bank of the Rhine.", QUESTION)
    assert not leaks.repeats("anything", "short question")
    title = "On the nesting of herons at the river Elbe in the years of the flood"
    quotes = f"In \u201c{title}\u201d, how many nests does the second table of page five count?"
    assert not leaks.repeats(f"{title}. By A. Heron. Table 2: nests", quotes)
    assert leaks.repeats(f"1, {quotes}, 17", quotes)
    assert leaks.repeats(title, f'What does "{title}" say?')
    six = "Who was first on the summit"
    assert leaks.repeats("Answers: WHO_WAS \u2167 ... Who was first on the summit? Nobody", six)


class Asked:
    """A web that gives another answer each time."""

    def __init__(self, raws: list[Raw] | None = None) -> None:
        self.count = 0
        self.raws = raws

    async def __call__(self) -> Raw:
        self.count += 1
        await settled()  # others may ask the same meanwhile
        if self.raws:
            return self.raws[self.count - 1]
        return Raw("u", 200, "t", b"body %d" % self.count)


async def test_equal_requests_are_asked_once(tmp_path: Path) -> None:
    asked = Asked()
    live = Recorder("live")
    same = await asyncio.gather(*(live.get({"q": 1}, asked, group="g") for _ in range(8)))
    same.append(await live.get({"q": 1}, asked, group="g"))
    assert {raw.body for raw in same} == {b"body 1"}
    assert (await live.get({"q": 1}, asked, group="h")).body == b"body 2"

    record = Recorder("record", tmp_path)
    first = asyncio.create_task(record.get({"q": 1}, asked))
    await asyncio.sleep(0)
    others = [asyncio.create_task(record.get({"q": 1}, asked)) for _ in range(4)]
    await asyncio.sleep(0)
    first.cancel()  # the one that began it goes away: the others still get the answer
    assert {raw.body for raw in await asyncio.gather(*others)} == {b"body 3"}
    assert record.metrics.upstream_calls == 1
    assert record.metrics.joined == 4


async def test_what_may_pass_is_asked_again_but_replayed(tmp_path: Path) -> None:
    slow = Raw("u", 0, "", b"", "too slow", lasting=False)
    asked = Asked([slow, slow, Raw("u", 404, "", b"", "HTTP status 404")])
    record = Recorder("record", tmp_path)
    assert (await record.get({"q": 1}, asked)).error == "too slow"
    assert (await Recorder("replay", tmp_path).get({"q": 1}, asked)).error == "too slow"
    for error in ("too slow", "HTTP status 404", "HTTP status 404"):
        assert (await record.get({"q": 1}, asked)).error == error
    assert asked.count == 3

    async def fails() -> Raw:
        raise ProviderFailed("no")

    for _ in range(2):
        with pytest.raises(ProviderFailed):
            await record.get({"q": 2}, fails)
    assert record.metrics.failures == 2


words = st.text(st.characters(codec="utf-8"), max_size=20)
raws = st.builds(
    Raw, url=words, status=st.integers(0, 599), content_type=words, body=st.binary(), error=words
)


@settings(max_examples=examples(30), deadline=None)
@given(run=st.dictionaries(words, raws, max_size=8), epoch=words)
def test_a_replay_is_the_recording_byte_for_byte(
    run: dict[str, Raw], epoch: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("web")

    async def record_and_replay() -> None:
        record = Recorder("record", folder / "a", epoch)
        for question, raw in run.items():
            assert await record.get({"q": question}, Asked([raw])) == raw
        tar, again = folder / "a.tar", folder / "b.tar"
        assert Store(folder / "a").export(tar) == len(run)
        assert Store(folder / "b").take_in(tar) == len(run)
        Store(folder / "b").export(again)
        assert tar.read_bytes() == again.read_bytes()
        replay = Recorder("replay", folder / "b", epoch)
        for question, raw in reversed(run.items()):
            assert await replay.get({"q": question}, Asked()) == raw
        with pytest.raises(Exception, match="not in the recorded web"):
            await Recorder("replay", folder / "b", f"{epoch}!").get({"q": ""}, Asked())

    asyncio.run(record_and_replay())


async def test_the_same_run_offline_shows_the_same(sites: Websites, tmp_path: Path) -> None:
    calls: list[tuple[str, Json]] = [
        ("web_search", {"query": "herons"}),
        ("visit_page", {"url": f"{sites.url}/page"}),
        ("visit_page", {"url": f"{sites.url}/none"}),
        ("visit_page", {"url": f"{sites.url}/page", "offset": 50, "limit": 30}),
        ("find_in_page", {"url": f"{sites.url}/page", "text": "visit"}),
        ("web_search", {"query": " herons ", "num_results": 5}),
    ]

    shown: list[Json] = []

    async def run(mode: str) -> list[str]:
        async with seen_at(sites, mode=mode, folder=tmp_path, epoch="spring") as web:
            tools = tools_of(web, Viewer(group="g"))
            said = [(await use_tool(tools, *call)).text for call in calls]
            shown.append(web.shown("g"))
            assert web.metrics.credits == (2 if mode == "record" and len(shown) == 1 else 0)
            return said

    first = await run("record")
    asked = sites.asked.total()
    assert asked == 3
    assert await run("record") == first
    assert await run("replay") == first
    assert sites.asked.total() == asked
    assert [facts["mode"] for facts in shown] == ["record", "record", "replay"]
    assert (shown[0]["epoch"], shown[0]["recording"], shown[0]["answers"]) == (
        "spring", tmp_path.name, 3,
    )  # fmt: skip
    assert len({facts["digest"] for facts in shown}) == 1
    calls.append(("web_search", {"query": "what nobody asked"}))
    await run("replay")
    assert shown[-1]["digest"] != shown[0]["digest"]
    calls.pop()
    async with seen_at(sites, mode="replay", folder=tmp_path) as web:
        with pytest.raises(ToolError, match="not in the recorded web"):
            await web.search("other", 5, ANYBODY)
    async with seen_at(sites, mode="off") as web:
        with pytest.raises(ToolError, match="there is no web"):
            await web.search("herons", 5, ANYBODY)
    kept = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert KEY.encode() not in kept


def _record_many(folder: str, url: str, results: Any) -> None:
    async def run() -> list[str]:
        web_settings = WebSettings(
            mode="record", folder=folder, provider_url=url, allow_private=True
        )
        async with Web(web_settings, key=KEY) as web:
            return [await web.search(f"q{number}", 1, ANYBODY) for number in range(5)]

    results.put(asyncio.run(run()))


@pytest.mark.thorough
async def test_many_processes_record_into_one_folder(sites: Websites, tmp_path: Path) -> None:
    sites.slowness = 0.02
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (str(tmp_path), sites.url, results)
    processes = [context.Process(target=_record_many, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    seen = [await asyncio.to_thread(results.get, True, PATIENCE) for _ in processes]
    for process in processes:
        await asyncio.to_thread(process.join, PATIENCE)
    assert seen[0] == seen[1] == seen[2]
    assert sites.asked["/search"] == 5


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    for name in ("../../out", "index/ab/" + "a" * 64 + ".json", "blobs/ab/" + "b" * 64):
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            facts = tarfile.TarInfo(name)
            facts.size = 2
            archive.addfile(facts, io.BytesIO(b"{}"))
        with pytest.raises(ValueError, match="not part of a recording"):
            Store(tmp_path / "folder").take_in(tmp_path / "a.tar")
    assert not (tmp_path / "folder").exists()
