"""The overview and the pages of runs, engines, workers, failures, alarms, evaluations."""

import itertools
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from playwright.sync_api import Page, expect
from support.alarm_server import serving
from support.browsers import DASHBOARD, SMALL, Visitor, axe, no_sideways_scroll, requests_of
from support.commands import running, until
from support.delivered import line, write_lines
from support.page_house import PageHouse, in_a_thread, page_house, put_history, rows, small_api
from support.views import write_evaluation
from support.waiting import PATIENCE

import envserver
from envserver import main
from envserver.telemetry.history import curves

PAGES = ("", "runs", "runs/trainer", "engines", "workers", "failures")
GROUPS = 16


@pytest.fixture(scope="module")
def house(_has_browser: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageHouse]:
    """A server with the numbers of three hours: in their midst it started again, in the last
    minutes calls failed."""
    folder = tmp_path_factory.mktemp("house")
    put_history(folder / "groups.db", hours=3)
    with page_house(folder, groups=GROUPS) as opened:
        opened.consume(2)
        yield opened


def chart(page: Page, title: str) -> dict[str, list[str]]:
    """The numbers of a chart: by line, its last, lowest and highest value."""
    heading = page.get_by_role("heading", name=title, exact=True)
    table = page.get_by_role("figure").filter(has=heading)
    rows = table.locator("tbody tr")
    expect(rows.first).to_be_visible()
    return {
        row.locator("th").inner_text().strip(): row.locator("td").all_inner_texts()
        for row in rows.all()
    }


def measurements(page: Page) -> int:
    """Number of rows that the overview draws."""
    caption = page.locator("caption", has_text="Reward in numbers")
    found = re.search(r"(\d+) measurements", caption.text_content() or "")
    assert found, caption.text_content()
    return int(found[1])


def test_what_changed_stands_out_in_words(house: PageHouse, visitor: Visitor) -> None:
    """The first of the file: five minutes after the start its past is out of sight."""
    page = visitor.page(house.url)
    changed = page.get_by_role("region", name="What changed")
    expect(changed).to_contain_text(
        re.compile("worse The number of failures “engine_unavailable” a minute rose from")
    )
    expect(changed).to_contain_text(
        re.compile(r"worse The reward of code fell from 0\.5\d* to 0\.")
    )
    expect(changed).to_contain_text("The server started again.")
    expect(changed).not_to_contain_text("reward of math")  # it rose as slowly as all the hour
    failed = page.get_by_role("figure").filter(
        has=page.get_by_role("heading", name="Failed attempts")
    )
    expect(failed).to_contain_text("changed")


def test_pages_are_clean_in_light_dark_and_small(house: PageHouse, visitor: Visitor) -> None:
    page = visitor.page(house.url)
    for look, size in {"light": None, "dark": None, "small": SMALL}.items():
        page.emulate_media(color_scheme="dark" if look == "dark" else "light")
        if size:
            page.set_viewport_size(size)
        for name in PAGES:
            page.goto(f"{house.url}#/{name}")
            expect(page.locator("main h2").first).to_be_visible()
            expect(page.get_by_text("Reading")).to_have_count(0)
            axe(page)
            no_sideways_scroll(page)
            visitor.shot(page, f"{name.replace('/', '-') or 'overview'}-{look}")


def test_counters_that_begin_again_do_not_fall(house: PageHouse, visitor: Visitor) -> None:
    page = visitor.page(f"{house.url}#/?range=2h")
    for title, most in (("Rollouts a minute", 1000), ("Reward", 1)):
        for name, numbers in chart(page, title).items():
            last, lowest, highest = (float(text.replace(",", "")) for text in numbers)
            assert 0 < lowest <= last <= highest <= most, (title, name, numbers)
    for kind in ("Completion", "Prompt"):  # of very different sizes
        assert list(chart(page, f"{kind} tokens a second")) == ["code", "math", "video"]
    page.keyboard.press("v")  # over policy versions
    expect(page).to_have_url(re.compile("x=version"))
    versions = page.locator("caption", has_text="Reward in numbers")
    expect(versions).to_have_text(re.compile(r": ([5-9]|1\d) measurements"))


def test_a_night_in_one_view(house: PageHouse, visitor: Visitor) -> None:
    page = visitor.page("about:blank")
    of = {"kind": "engine_unavailable", "fault": "engine", "what": "attempt", "message": "Gone."}
    of |= {"environment": "code", "group_id": ""}
    rows = [{"n": n, "time": time.time() - 9, "task_id": f"task-{n // 2}", **of} for n in range(3)]
    page.route("**/v1/failures?*", lambda route: route.fulfill(json={"failures": rows}))
    page.goto(f"{house.url}#/failures?range=1h")
    night = page.get_by_role("group", name="What went wrong, by kind")
    expect(night.get_by_role("row", name="engine_unavailable")).to_contain_text(
        re.compile(r"\d+ attempts.*and before.*v\d+.*code.*task-0 2 ×.*task-1 1 ×")
    )
    expect(night).not_to_contain_text("zero_variance")  # a statistic
    night.get_by_role("link", name="task-0").click()
    expect(page.get_by_role("group", name="Failures").get_by_role("row")).to_have_count(3)
    expect(page.get_by_label("Whose fault").get_by_role("option")).to_have_text(["any", "engine"])


def test_a_server_that_says_nothing_counts_as_away(house: PageHouse, visitor: Visitor) -> None:
    page = visitor.page("about:blank")
    page.clock.install()
    page.route("**/v1/failures?*", lambda _: None)  # never answered
    with page.expect_request("**/v1/failures?*"):
        page.goto(f"{house.url}#/failures")
    page.clock.fast_forward(61_000)
    expect(page.get_by_text("not answer for 60 seconds. This page tries")).to_be_visible()
    with page.expect_request("**/v1/failures?*"):
        page.clock.fast_forward(3_000)


def test_keys_help_and_colours(house: PageHouse, visitor: Visitor) -> None:
    page = visitor.page(house.url)
    expect(page.get_by_role("heading", name="What changed")).to_be_visible()
    page.keyboard.press("1")
    expect(page).to_have_url(re.compile("range=15m"))
    page.keyboard.press("?")
    help_dialog = page.get_by_role("dialog", name="Keys")
    expect(help_dialog).to_contain_text("next, previous row")
    axe(page)
    page.keyboard.press("Escape")
    expect(help_dialog).to_have_count(0)
    colours = page.get_by_role("button", name="Colours")
    colours.click()
    colours.click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_ten_tabs_share_one_stream(house: PageHouse, visitor: Visitor) -> None:
    context = visitor.context()
    streams = requests_of(context, "v1/events")
    tabs = [context.new_page() for _ in range(10)]
    for tab in tabs:
        tab.goto(f"{house.url}#/runs/trainer")
    for tab in tabs:
        expect(tab.get_by_text("● live")).to_be_visible()
    assert len(streams) == 1
    owner = streams[0].frame.page  # whichever tab was first
    last = next(tab for tab in tabs if tab != owner)
    with context.expect_event("request", lambda one: "v1/events" in one.url):
        owner.close()
    last.goto(f"{house.url}#/")
    leased = last.locator(".tiles div").filter(has_text="Groups waiting").locator("dd")
    expect(leased).to_have_text(str(GROUPS - 2))
    house.consume(2)
    expect(leased).to_have_text(str(GROUPS - 4))
    assert len(streams) == 2


def test_without_locks_each_tab_has_its_own_stream(house: PageHouse, visitor: Visitor) -> None:
    context = visitor.context()  # as over plain HTTP from another machine
    context.add_init_script(
        "Object.defineProperty(Navigator.prototype, 'locks', {value: undefined})"
    )
    streams = requests_of(context, "v1/events")
    for _ in range(2):
        tab = context.new_page()
        tab.goto(f"{house.url}#/failures")
        expect(tab.get_by_text("● live")).to_be_visible()
    assert len(streams) == 2


def test_an_open_page_goes_on_when_a_server_was_killed(house: PageHouse, visitor: Visitor) -> None:
    visitor.allow("net::ERR_|status of 503")
    page = visitor.page(f"{house.url}#/?range=15m")
    expect(page.get_by_text("● live")).to_be_visible()
    gone = page.get_by_text("The server has not answered since")
    house.kill()
    expect(gone).to_be_visible()
    house.start()
    expect(gone).to_have_count(0)
    expect(page.get_by_text("● live")).to_be_visible()

    def rows_of_the_server() -> int:
        times = house.get("v1/series", start=-4200, points=420)["times"]
        return sum(time >= times[-1] - 900 for time in times) + 1  # one before the edge

    def has_each_row_once() -> bool:
        page.wait_for_timeout(200)  # the browser's events come in
        return measurements(page) == rows_of_the_server()

    until(has_each_row_once, lambda: f"{measurements(page)}, not {rows_of_the_server()} rows")
    rows = measurements(page)
    until(lambda: has_each_row_once() and measurements(page) > rows, lambda: "a row more")


def test_the_page_says_which_server_leads(tmp_path: Path, visitor: Visitor) -> None:
    with in_a_thread(lambda: small_api(tmp_path)) as api:
        page = visitor.page("about:blank")
        followers: list[str] = []
        leader = {"url": "http://10.0.0.1:8000", "since": 1.8e9, "followers": followers}
        page.route("**/v1/status", lambda route: route.fulfill(json={"server": {"leader": leader}}))
        page.goto(f"{api.url}#/workers")
        servers = page.get_by_role("region", name="Servers that share the store")
        expect(servers).to_contain_text("http://10.0.0.1:8000 ● leads")
        expect(servers).to_contain_text("no other server would take over")
        followers.append("http://10.0.0.2:8000")
        expect(servers).to_contain_text("http://10.0.0.2:8000 follows")
        axe(page)
        page.context.close()


# Alarms that were provoked


SENTENCES = (
    r"reward of zero is always 0",
    r"In 100 % of the groups of same .* all rewards are equal",
    r"In 100 % of the groups of same .* all rollouts say the same",
    r"\d+ workers of dies died in .* The worker exited with code 3",
    r"100 % of the rollouts of dies .* to the workers",
    r"% of the sampled tokens of masked .*structured_output",
    r"No trainer has leased for \d+ .*, while [\d,]+ groups? wait",
    r"A commit of the store takes",
    r"The disk of the store is almost full",
    r"Model calls have been paused for",
)


def test_ten_alarms_stand_above_every_page_and_lead_to_what_they_mean(
    tmp_path: Path, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.trainers.status.SECONDS", 0.25)
    with in_a_thread(lambda: serving(tmp_path, "Zero", "Same", "Dies", "Masked")) as alarms:
        page = visitor.page(f"{alarms.url}#/runs")
        shown = page.get_by_role("status", name="Alarms").get_by_role("listitem")
        for number, sentence in enumerate(SENTENCES):
            if number == len(SENTENCES) - 1:
                paused = httpx.post(f"{alarms.url}/v1/policy/pause", json={}, timeout=PATIENCE)
                assert paused.is_success
            expect(shown.filter(has_text=re.compile(sentence)).first).to_be_visible()
        shown.filter(has_text="say the same").get_by_role("link", name="show").click()
        expect(page).to_have_url(re.compile("environment=same"))
        expect(page.locator(".list-row").first).to_contain_text("same")
        page.context.close()


# Evaluations of held-out tasks while a trainer learns


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

        def each(name: str) -> list[Any]:
            return [one[name] for one in http.get("/v1/evaluations").json()["evaluations"]]

        assert "held_out" not in http.get("/v1/source").json()["parts"]
        for count in (1, 2):
            version = {"version": count - 1}
            http.post("/v1/policy-version", json=version).raise_for_status()
            until(lambda n=count: each("state") == ["complete"] * n, lambda: str(each("state")))
        means = [results["evaluate/math/mean_reward"] for results in each("results")]
        page = visitor.page(f"{url}/#/held_out")
        expect(page.get_by_label("Rewards of 2 evaluations over policy versions")).to_be_visible()
        points = [re.compile(f"^version {at}: mean {mean:.3g} of") for at, mean in enumerate(means)]
        expect(page.locator(".versions a title")).to_have_text(points)
        expect(page.get_by_role("rowheader")).to_have_text(["1", "0"])
        axe(page)
        page.close()  # before the server ends, which it would report


# What the overview calls a change: what differs beyond noise, and nothing else


@pytest.mark.usefixtures("_has_browser")
def test_a_day_of_noise_and_slow_progress_has_no_changes(tmp_path: Path) -> None:
    day = [(60.0 * minute, one) for minute, one in enumerate(rows(1440, 0))]
    script, source = tmp_path / "changes.mjs", Path(__file__).with_name("changes.ts")
    rolldown = DASHBOARD / "node_modules" / ".bin" / "rolldown"
    words = [rolldown, source, "--platform", "node", "-o", script]
    subprocess.run(words, check=True, capture_output=True, cwd=DASHBOARD)
    series = orjson.dumps(curves(day, len(day), frozenset()))
    told = subprocess.run(["node", str(script)], input=series, check=True, capture_output=True)
    said = told.stdout.splitlines()  # of each hour, the last first: ["reward code bad"]
    assert len(said) > 250 and {*said} == {b"[]"}


# `envserver view` in a browser: evaluations, their comparison, a file that grows; and pages that
# are files, with hostile text in them: nothing acts, nothing is fetched

AT_ITS_END = "ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_CONNECTION_REFUSED"
HOSTILE = '<img src=x onerror="alert(1)">\u202eevil'


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


def test_two_runs_are_compared_down_to_groups_of_a_task(two_runs: str, visitor: Visitor) -> None:
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
        page = visitor.page(view.wait_for(r"http://[\d.]+:\d+/")[0])
        groups = page.get_by_role("listbox", name="Groups")
        expect(groups.get_by_role("option").first).to_contain_text("math-")
        expect(page.get_by_text("so far")).to_have_count(0)
        status = Path(f"/proc/{view.pid}/status").read_text()
        peak_kb = int(status.partition("VmHWM:")[2].split()[0])
        print(f"{number} groups, {peak_kb} KB")
        assert peak_kb < 400_000


# Pages that are files


ATTACKS = (
    "</pre></style><script>document.title='owned'</script>"
    "<img src=//evil.example/x onerror=alert(1)><svg onload=alert(2)>"
    "<a href='javascript:alert(3)'>\u202e\x1b[31m"
)


def test_exported_rollouts_are_inert(visitor: Visitor, tmp_path: Path) -> None:
    facts = {"tools": [{"type": "function", "function": {"name": ATTACKS}}], "flags": [ATTACKS]}
    rollouts = [line(0, (0.0, 1.0), answers=[ATTACKS] * 2, **facts)]
    source = write_lines(tmp_path / "run.jsonl", rollouts)
    assert main(["export", str(source), "--to", "html", "--out", str(tmp_path / "out.html")]) == 0
    page = visitor.page((tmp_path / "out.html").as_uri())
    assert "owned" not in page.title()
    closed = page.locator("details:not([open]) > summary")
    while closed.count():
        closed.first.click()
    expect(page.get_by_text("onerror=alert(1)").first).to_be_visible()
    assert page.locator("script, img, svg[onload], a[href^='javascript']").count() == 0
