"""The overview in a browser."""

from __future__ import annotations

from playwright.sync_api import expect
from support.browsers import SMALL, Visitor, axe, no_sideways_scroll
from support.page_house import PageHouse


def test_the_overview_is_clean_in_light_dark_and_on_a_small_screen(
    house: PageHouse, visitor: Visitor
) -> None:
    for name, options in {
        "light": {},
        "dark": {"color_scheme": "dark"},
        "small": {"viewport": SMALL},
    }.items():
        page = visitor.page(house.url, **options)
        expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
        axe(page)
        no_sideways_scroll(page)
        visitor.shot(page, f"overview-{name}")
