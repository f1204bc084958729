"""Groups, a group side by side, rollouts and tasks in a browser."""

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envserver_records.errors import Blame
from envserver_records.packing import pack
from envserver_records.records import (
    Conversation,
    Group,
    SandboxUsage,
    Score,
    Sequence,
    Trajectory,
    Usage,
)
from envserver_records.tasks import TurnReward
from envserver_records.timings import FailedAttempt, Printed, Timing
from playwright.sync_api import Locator, Page, Request, Route, expect
from support.api import Api, running_api
from support.browsers import SMALL, Visitor, axe, no_sideways_scroll, requests_of
from support.cases import cases_of
from support.page_house import in_a_thread
from support.stores import group
from support.trajectories import trajectory

from envserver.http.health import Metrics
from envserver.store import GroupPut
from envserver.store.demand import put_of
from envserver.store.packed import facts_of_rewards

HOSTILE = (
    "<script>document.title = 'pwned'</script>"
    "<img src=x onerror=\"document.title = 'pwned'\"><b>bold?</b> [link](javascript:alert(1))"
    " \x1b[31mred\x1b[0m \u202eevil\u202c \u200bunseen\u200b \x00 \U000e0041"
)
LONG = "A line of a very long text, which has no end.\n" * 25_000  # more than a megabyte
ODD = cases_of(__file__, "odd_messages.json")
"""Messages that are not as any API has them."""
LONG_ROW = 30_000
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwAD"
    "hgGAWjR9awAAAABJRU5ErkJggg=="
)
_ENVIRONMENTS = ("math", "code", "tau", "video")


def row(length: int, agent: str | None = None, seed: int = 0) -> Sequence:
    """A row: contexts of 100 tokens, turns of 200; every third turn is by version 4."""
    rng = np.random.default_rng(seed)
    place = np.arange(length)
    trained = (place % 300 >= 100).astype(np.uint8)
    calls = np.where(trained, place // 300, -1).astype(np.int32)
    logprobs = np.where(trained, -rng.exponential(0.6, length), 0).astype(np.float32)
    return Sequence(
        tokens=rng.integers(300, 1200, length).astype(np.int32),
        mask=trained,
        logprobs=logprobs,
        calls=calls,
        versions=np.where(trained, 3 + (calls % 3 == 2), -1).astype(np.int32),
        path=list(range(1 + (length - 1) // 300)),
        agent=agent,
        flags=["mixed_versions"] if length > 900 else [],
    )


def conversation(place: int, said: str = "") -> list[dict[str, Any]]:
    """A conversation that parts from the others' in its first answer."""
    call = {
        "id": f"call-{place}",
        "type": "function",
        "function": {"name": "look", "arguments": f'{{"where": "shelf {place}"}}'},
    }
    return [
        {"role": "system", "content": "You look for things.\n" + "Be careful. " * 80},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Where is the lamp? Here is the room:"},
                {"type": "image_url", "image_url": {"url": PICTURE}},
                {"type": "image_url", "image_url": {"url": "https://example.com/spy.png"}},
            ],
        },
        {
            "role": "assistant",
            "reasoning_content": f"I think about shelf {place}. " * 20,
            "content": f"I will look at the shelf with number {place}.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": f"call-{place}", "content": f"There are {place} lamps."},
        {"role": "assistant", "content": said or f"The answer is {place}."},
        {"role": "user", "content": "Thank you."},
    ]


def _rollout(group_id: str, place: int, said: str = "", **changes: Any) -> Trajectory:
    reward = (1.0, 0.0, 0.5, 0.25)[place % 4]
    critic = [
        {"role": "user", "content": "Was it right?"},
        {"role": "assistant", "content": "Partly."},
    ]
    facts: dict[str, Any] = {
        "messages": conversation(place, said),
        "task_id": "lamp",
        "env": "rooms",
        "score": Score(
            reward=reward,
            components={"found": reward, "brief": 0.5},
            metrics={"steps": 2.0},
            turns=[TurnReward(0, 0.25, "seeker"), TurnReward(1, -0.1, "seeker")],
        ),
        "turns": 2,
        "tools": [{"type": "function", "function": {"name": "look", "description": "Looks."}}],
        "others": [
            Conversation(
                agent="critic",
                trained=False,
                model="judge",
                messages=critic,
                tools=[],
                turns=1,
                completion_tokens=3,
            )
        ],
        "agent_calls": {"seeker": [0, 1], "critic": [2]},
        "usage": Usage(
            seconds=4.0,
            model_seconds=2.5,
            prompt_tokens=900,
            completion_tokens=120,
            scoring_seconds=0.4,
            sandbox=SandboxUsage(
                cpu_seconds=0.7, peak_memory_mb=81.0, executions=2, killed={"memory": 1}
            ),
        ),
        "timings": [
            Timing(kind="engine", started=0.1, seconds=1.2, name="sim", agent="seeker",
                   first=0.3, call=0, row=0, start=100, end=300),
            Timing(kind="tool", started=1.3, seconds=0.5, name="look", agent="seeker"),
            Timing(kind="sandbox", started=1.4, seconds=0.3, name="python"),
            Timing(kind="engine", started=1.9, seconds=1.3, name="sim", agent="seeker", call=1,
                   row=0, start=400, end=600),
            Timing(kind="scoring", started=3.3, seconds=0.4),
        ],
        "attempts": [
            FailedAttempt(attempt=1, kind="engine_error", blame=Blame.ENGINE,
                          message="The engine hung up. " + HOSTILE, seconds=1.5)
        ] if place == 1 else [],
        "attempt": 2 if place == 1 else 1,
        "printed": [Printed(0.5, "stdout", "looking ..."), Printed(1.4, "log", "found it")],
        "flags": ["repetition"] if place == 2 else [],
    }  # fmt: skip
    return trajectory(f"{group_id}-r{place}", row(900, "seeker", place), **(facts | changes))


def group_of(group_id: str, rollouts: list[Trajectory], **changes: Any) -> Group:
    facts: dict[str, Any] = {
        "index": 0,
        "env": "rooms",
        "task_id": "lamp",
        "split": "train",
        "model": "sim",
        "policy_version": 3,
        "created_at": 1_790_000_000.0,
        "public": {"question": "Where is the lamp?"},
    }
    return Group(group_id=group_id, trajectories=rollouts, **(facts | changes))


def hard_groups() -> list[Group]:
    """`rooms`: side by side; `hostile`: texts that attack; `long`: a megabyte, 30,000 tokens, 126
    messages."""
    lost = FailedAttempt(
        attempt=3, kind="engine_error", blame=Blame.ENGINE, message="No answer.", seconds=2.0
    )
    rooms = [_rollout("rooms", place) for place in range(4)]
    limit = {"truncated": True, "limit": "tokens"}
    ended = Usage(seconds=9.0, model_seconds=8.0, completion_tokens=2048, ended_by="tokens")
    hostile = [
        _rollout("hostile", 0, HOSTILE),
        _rollout("hostile", 1, usage=ended, messages=[*conversation(1, HOSTILE), *ODD], **limit),
    ]
    more = [{"role": "user", "content": f"And then, {number}?"} for number in range(120)]
    messages = [*conversation(0, LONG), *more]
    long = [_rollout("long", 0, messages=messages, sequences=[row(LONG_ROW, "seeker")])]
    return [
        group_of("rooms", rooms, asked=5, lost={"engine_error": 1}, missing={"4": [lost]}),
        group_of("hostile", hostile, task_id="lamp <b>", policy_version=4),
        group_of("long", long, policy_version=5),
    ]


def many_groups(count: int) -> list[GroupPut]:
    """Groups of which only the facts are there, for lists."""
    rng = random.Random(0)
    return [
        GroupPut(
            group_id=f"many-{number:06}",
            body=b"",
            env=_ENVIRONMENTS[number % 4],
            format="group",
            size=4,
            tokens=400,
            max_length=100 + number % 7,
            policy_version=number // 1000,
            facts=facts_of_rewards(rng.choices((0.0, 1.0), (3, 2), k=4), f"task-{number % 500}"),
        )
        for number in range(count)
    ]


class GroupsHouse:
    """A server with groups, at `url`; it runs in `loop`, in another thread."""

    def __init__(self, api: Api, loop: asyncio.AbstractEventLoop) -> None:
        self._api = api
        self._loop = loop
        self.url = api.url

    def add(self, *groups: GroupPut) -> None:
        """Puts groups, as if they had just been finished."""
        asyncio.run_coroutine_threadsafe(self._api.store.put(list(groups)), self._loop).result(60)


@contextlib.asynccontextmanager
async def groups_house(folder: Path, many: int = 0) -> AsyncIterator[GroupsHouse]:
    """The trainer API over a store with `many_groups(many)` and then `hard_groups`."""
    async with running_api(folder / "groups.db", metrics=Metrics()) as api:
        made = many_groups(many)
        for start in range(0, many, 5000):
            await api.store.put(made[start : start + 5000])
        await api.store.put([put_of(one, pack(one)) for one in hard_groups()])
        yield GroupsHouse(api, asyncio.get_running_loop())


MANY = 100_000
MOST_NODES = 500


@pytest.fixture(scope="module")
def house(_has_browser: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupsHouse]:
    """A server with a hundred thousand groups, and three that are hard to show."""
    folder = tmp_path_factory.mktemp("groups")
    with in_a_thread(lambda: groups_house(folder, MANY)) as opened:
        yield opened


def nodes(page: Page) -> int:
    return int(page.evaluate("() => document.querySelectorAll('*').length"))


def height_in_list(row: Locator) -> float:
    """Pixels from the top of the list in view to a row."""
    top = "(row) => row.getBoundingClientRect().y - row.closest('.list').getBoundingClientRect().y"
    return float(row.evaluate(top))


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def at(page: Page, pattern: str) -> None:
    """Waits for an address."""
    expect(page).to_have_url(re.compile(pattern))


def test_100_000_groups_are_read_by_pages_and_stay(house: GroupsHouse, visitor: Visitor) -> None:
    page = visitor.context().new_page()
    asked = requests_of(page, "order=newest")
    page.goto(f"{house.url}/#/groups")
    rows = page.locator(".list-row")
    expect(page.get_by_role("status").filter(has_text="groups")).to_contain_text("100,003 groups")
    expect(rows.first).to_contain_text("rooms")
    assert nodes(page) < MOST_NODES
    assert len(asked) == 1, asked
    page.get_by_role("listbox").focus()
    press(page, "End")
    expect(page.locator("[aria-posinset='203']")).to_be_visible()  # of the next page
    press(page, "End")
    expect(page.locator("[aria-posinset='403']")).to_be_visible()
    assert nodes(page) < MOST_NODES
    assert len(asked) <= 5, asked
    assert all("limit=200" in request.url for request in asked)
    # What arrives waits until it is asked for.
    chosen = page.locator("[aria-selected='true']")
    place = height_in_list(chosen)
    house.add(group("arrived", b"", env="news"))
    new = page.get_by_role("button", name="1 new")
    expect(new).to_be_visible()
    assert height_in_list(chosen) == place
    new.click()
    expect(rows.first).to_contain_text("news")
    expect(page.get_by_role("button", name="1 new")).not_to_be_visible()


def test_a_group_before_the_first_page_is_listed_once(house: GroupsHouse, visitor: Visitor) -> None:
    page = visitor.context().new_page()
    held: list[Route] = []
    aborted: list[Request] = []
    page.on("requestfailed", lambda request: aborted.append(request))
    page.route("**/v1/rewards*", lambda _: None)  # never answered
    page.route(re.compile("order=newest"), lambda route: held.append(route))
    page.goto(f"{house.url}/#/groups")
    expect(page.get_by_text("● live")).to_be_visible()
    house.add(group("early", b"", env="early"))
    rows = page.locator(".list-row")
    new = page.get_by_role("button", name="1 new")
    expect(new.or_(rows)).to_be_visible()
    for route in held:
        route.continue_()
    expect(rows.nth(5)).to_be_visible()
    expect(new).to_have_count(0)
    assert rows.filter(has_text="early").count() == 1
    for name in ("next", "last"):  # they slide in while the histogram is still read
        house.add(group(name, b"", env=name))
        expect(rows.filter(has_text=name)).to_be_visible()
    assert not aborted


def test_filters_and_the_histogram_are_in_the_address(house: GroupsHouse, visitor: Visitor) -> None:
    page = visitor.page(f"{house.url}/#/groups")
    page.get_by_label("Environment").fill("math")
    at(page, "environment=math")
    status = page.get_by_role("status").filter(has_text="groups")
    expect(status).to_contain_text("25,000 groups")
    bar = page.get_by_role("button", name=re.compile(r"^0\.5 to 0\.55: "))
    wanted = re.findall(r": (.*) group", bar.get_attribute("aria-label") or "")[0]
    bar.click()
    at(page, "min_reward=0.5&max_reward=0.54")
    expect(status).to_contain_text(f"{wanted} groups")
    page.get_by_role("button", name=re.compile("^age")).click()
    at(page, "order=oldest")
    row = page.locator(".list-row").first
    expect(row).to_contain_text("0.5")
    shown = row.get_by_text("task-").inner_text()
    # The link shows the same to somebody else.
    other = visitor.page(page.url)
    expect(other.locator(".list-row").first).to_contain_text(shown)
    expect(other.get_by_role("button", name=re.compile(r"^0\.5 to"))).to_have_attribute(
        "aria-pressed", "true"
    )
    bar.click()
    expect(status).to_contain_text("25,000 groups")
    page.get_by_label("Search").fill("nothing like this")
    expect(page.get_by_text("No group matches.")).to_be_visible()
    page = visitor.page(f"{house.url}/#/groups?words=shelf+with+number")
    expect(page.locator(".list-row").first).to_contain_text("rooms")
    status = page.get_by_role("status").filter(has_text="searched")
    expect(status).to_contain_text(re.compile(r"^\d groups and more in 5,\d\d\d groups searched"))
    expect(status.get_by_role("button", name="search further")).to_be_visible()


def test_the_keys_lead_through_groups_and_rollouts(house: GroupsHouse, visitor: Visitor) -> None:
    page = visitor.page(f"{house.url}/#/groups?environment=rooms")
    expect(page.locator(".list-row")).to_have_count(3)
    ends = page.get_by_label("End").get_by_role("option")
    expect(ends).to_have_text(["any", "agent", "tokens"])
    press(page, "j", "j", "j", "Enter")  # the oldest of three: long, hostile, rooms
    at(page, "#/groups/rooms")
    expect(page.get_by_text("2 messages in common; they part at message #2")).to_be_visible()
    lanes = page.get_by_role("region", name=re.compile("^Rollout [0-9]"))
    expect(lanes).to_have_count(4)
    expect(page.get_by_text("1 rollout is missing")).to_be_visible()
    expect(lanes.nth(1)).to_contain_text("turn 0: +0.25")
    expect(lanes.nth(1)).to_contain_text("found 0")
    expect(page.get_by_role("img", name="differs from here").first).to_be_visible()
    expect(lanes.nth(1)).to_contain_text("#5, the same in all")
    press(page, "c", "j", "j", "c")
    at(page, "show=0%2C2")
    expect(lanes).to_have_count(2)
    press(page, "c")
    expect(lanes).to_have_count(4)
    press(page, "k", "f")  # after rollout 1, which has the lowest reward, none of the group failed
    press(page, "Enter")
    at(page, r"#/groups/rooms/1\?environment=rooms")
    expect(page.get_by_role("heading", name="critic")).to_be_visible()
    expect(page.get_by_text("There are 1 lamps.")).to_be_visible()
    press(page, "t", "t")
    at(page, "tab=timing")
    expect(page.get_by_role("link", name="sim").first).to_be_visible()
    press(page, "t")
    expect(page.get_by_text("The engine hung up.")).to_be_visible()
    press(page, "]", "]", "]")  # over the end of the group: there is none after it
    at(page, "#/groups/rooms/3.*tab=use")
    press(page, "[", "[", "[", "[")
    at(page, "#/groups/hostile/0.*tab=use")
    expect(page.get_by_role("tab", name="use")).to_be_visible()
    press(page, "f")
    at(page, "#/groups/hostile/1")
    press(page, "Escape")
    at(page, "#/groups/hostile.environment=rooms&at=1")
    press(page, "Escape")
    at(page, r"#/groups\?environment=rooms&chosen=hostile")
    press(page, "?")
    expect(page.get_by_role("dialog")).to_contain_text("next group with a failure")


def test_thirty_thousand_tokens_are_a_few_nodes(house: GroupsHouse, visitor: Visitor) -> None:
    page = visitor.page(f"{house.url}/#/groups/long/0?tab=tokens")
    expect(page.get_by_text(f"{LONG_ROW:,} tokens")).to_be_visible()
    expect(page.locator(".token-page").first).to_be_visible()
    panel = page.get_by_label("The chosen token")
    press(page, "n")
    expect(panel).to_contain_text("1, trained")
    at(page, "token=")
    assert float(re.findall(r"probability\s*([0-9.e-]+)", panel.inner_text())[0]) < 0.1
    page.goto(f"{house.url}/#/groups/long/0?tab=tokens&token={LONG_ROW - 1}&shade=version")
    expect(panel).to_contain_text(f"{LONG_ROW - 1} of {LONG_ROW}")
    press(page, "ArrowLeft")
    expect(panel).to_contain_text(f"{LONG_ROW - 2} of {LONG_ROW}")
    page.locator(".token-page").last.click(position={"x": 60, "y": 8})
    expect(panel).not_to_contain_text(f"{LONG_ROW - 2} of")
    assert nodes(page) < MOST_NODES
    shades = page.evaluate("() => [...CSS.highlights.keys()].sort().join(' ')")
    assert "token-context" in shades and "token-kind-3" in shades, shades
    spent = page.evaluate(
        "() => performance.getEntriesByName('tokens-painted').map((one) => one.duration)"
    )
    print(f"tokens: {nodes(page)} nodes, pages painted after {[round(one) for one in spent]} ms")


def test_what_a_model_wrote_is_only_text(house: GroupsHouse, visitor: Visitor) -> None:
    page = visitor.page(f"{house.url}/#/groups/hostile/0")
    said = page.get_by_text("<script>document.title").last
    expect(said).to_contain_text(r"\u001b[31mred\u001b[0m \u202eevil\u202c \u200bunseen\u200b")
    expect(said).to_contain_text("[link](javascript:alert(1))")
    expect(page.get_by_text("image: https://example.com/spy.png")).to_be_visible()
    for tab in ("raw", "use", "conversation"):
        page.get_by_role("tab", name=tab).click()
        made = page.locator("main script, main b:text('bold?'), main a[href^='javascript']")
        expect(made).to_have_count(0)
    expect(page.get_by_role("img", name="image in the conversation")).to_have_count(1)
    assert "pwned" not in page.title()
    page.goto(f"{house.url}/#/groups/hostile/1")
    expect(page.locator("[data-message='10']")).to_be_attached()  # the last of the odd ones
    expect(page.get_by_text('"no": "list"')).to_be_visible()
    page.goto(f"{house.url}/#/groups/long/0")
    page.get_by_role("button", name="all 1.15 M").click()
    expect(page.locator(".piece").last).to_be_attached()
    assert page.locator(".piece").count() < 100
    expect(page.get_by_text("And then, 119?")).to_have_count(0)
    page.get_by_role("button", name="76 messages more").click()
    expect(page.get_by_text("And then, 119?")).to_be_attached()
    shown = page.locator(".lane .long", has_text="A line").text_content() or ""
    assert len(shown) > len(LONG) - 200  # the ends of the pieces' lines are blocks' ends


LONG_ID = "astropy-" * 400
PLAIN_IDS = (
    f"{LONG_ID}1",
    f"{LONG_ID}2",
    "a b",
    "\u05e9\u05dc\u05d5\u05dd",
    "../..",
    "a%2Fb",
    "a/b",
    "/",
    "?a=b&c#d",
    "<script>document.title = 'pwned'</script>",
    "\U0001f600",
)
ODD_IDS = dict(zip(PLAIN_IDS, PLAIN_IDS, strict=True)) | {
    " ": r"\u0020",
    "\u00a0": r"\u00a0",
    "\u3164": r"\u3164",
    "a  b": r"a\u0020 b",
    "a\nb": r"a\u000ab",
    "a b ": r"a b\u0020",
    "\u202eb a": r"\u202eb a",
}
"""Ids of tasks, and how the page shows them."""


def test_a_task_of_any_id_can_be_told_from_others(tmp_path: Path, visitor: Visitor) -> None:
    with in_a_thread(lambda: groups_house(tmp_path)) as house:
        odd = [
            group_of(f"odd-{number}", [_rollout(f"odd-{number}", 0)], env="odd", task_id=task)
            for number, task in enumerate(ODD_IDS)
        ]
        house.add(*(put_of(one, pack(one)) for one in odd))
        page = visitor.page(f"{house.url}/#/tasks?environment=odd")
        shown = page.locator(".short-name")
        expect(shown).to_have_count(len(ODD_IDS))
        assert set(shown.all_text_contents()) == set(ODD_IDS.values())
        ends = shown.filter(has_text=LONG_ID).locator("span:last-child")
        assert sorted(ends.all_text_contents()) == ["stropy-1", "stropy-2"]
        for number, name in enumerate(ODD_IDS.values()):
            page.goto(f"{house.url}/#/groups/odd-{number}")
            page.get_by_role("link", name=name, exact=True).click()
            expect(page.locator(".trail b")).to_have_text(name)
            expect(page.locator(".facts")).to_contain_text("1 group, 1 rollout")
        assert "pwned" not in page.title()
        page.context.close()


PAGES = {
    "groups": "#/groups?environment=rooms&spread_above=-1",
    "group": "#/groups/rooms",
    "rollout": "#/groups/rooms/1",
    "tokens": "#/groups/rooms/1?tab=tokens&token=310",
    "timing": "#/groups/rooms/1?tab=timing",
    "use": "#/groups/rooms/1?tab=use",
    "tasks": "#/tasks",
    "task": "#/tasks/math/task-0",
    "compare": "#/compare?a=rooms&b=hostile/1",
}
READY = ".list-row, .lane, .token-facts, .timeline, .use-part"


@pytest.mark.parametrize("look", ["light", "dark", "small"])
def test_the_pages_are_clean(house: GroupsHouse, visitor: Visitor, look: str) -> None:
    options = {"light": {}, "dark": {"color_scheme": "dark"}, "small": {"viewport": SMALL}}[look]
    page = visitor.context(**options).new_page()
    for name, place in PAGES.items():
        page.goto(f"{house.url}/{place}")
        expect(page.locator(READY).first).to_be_visible()
        axe(page)
        no_sideways_scroll(page)
        visitor.shot(page, f"{name}-{look}", whole=False)
