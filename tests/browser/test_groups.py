"""Groups, a group side by side, rollouts and tasks in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, Route, expect
from support.browsers import SMALL, Visitor, axe, no_sideways_scroll
from support.page_groups import LONG, LONG_ROW, GroupsHouse, groups_house
from support.page_house import in_a_thread
from support.stores import group

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
    script = (
        "(one) => one.getBoundingClientRect().y - one.closest('.list').getBoundingClientRect().y"
    )
    return float(row.evaluate(script))


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def at(page: Page, pattern: str) -> None:
    """Waits for an address."""
    expect(page).to_have_url(re.compile(pattern))


def test_a_hundred_thousand_groups_are_read_by_pages_and_do_not_move(
    house: GroupsHouse, visitor: Visitor
) -> None:
    page = visitor.context().new_page()
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url) if "order=newest" in one.url else None)
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
    assert all("limit=200" in url for url in asked)
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


def test_a_group_that_arrives_before_the_first_page_is_listed_once(
    house: GroupsHouse, visitor: Visitor
) -> None:
    page = visitor.context().new_page()
    held: list[Route] = []
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


def test_filters_and_the_bars_of_the_histogram_lie_in_the_address(
    house: GroupsHouse, visitor: Visitor
) -> None:
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
        assert (
            page.locator("main script, main b:text('bold?'), main a[href^='javascript']").count()
            == 0
        )
    assert page.get_by_role("img", name="image in the conversation").count() == 1
    assert "pwned" not in page.title()
    page.goto(f"{house.url}/#/groups/hostile/1")
    expect(page.locator("[data-message='10']")).to_be_attached()  # the last of the odd ones
    expect(page.get_by_text('"no": "list"')).to_be_visible()
    page.goto(f"{house.url}/#/tasks/rooms/{'lamp%20%3Cb%3E'}")
    expect(page.get_by_text("lamp <b>")).to_be_visible()
    page.goto(f"{house.url}/#/groups/long/0")
    page.get_by_role("button", name="all 1.15 M").click()
    expect(page.locator(".piece").last).to_be_attached()
    assert page.locator(".piece").count() < 100
    expect(page.get_by_text("And then, 119?")).to_have_count(0)
    page.get_by_role("button", name="76 messages more").click()
    expect(page.get_by_text("And then, 119?")).to_be_attached()
    shown = page.locator(".lane .long", has_text="A line").evaluate(
        "(one) => one.textContent.length"
    )
    assert shown > len(LONG) - 200  # the ends of the pieces' lines are blocks' ends


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
