"""Single groups dealt to runners elsewhere: each is answered once, whoever is lost."""

from __future__ import annotations

import asyncio

import pytest
from envserver_records.records import Task
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api import native_group
from support.extent import examples
from support.waiting import settled

from envserver.api.dealing import dealing_app
from envserver.api.server import serve_api
from envserver.remote.dealing import Dealer, Made, Rules, Take
from envserver.rollouts.stream import GroupRequest

RUNNERS = ("a", "b", "c")
STEPS = st.lists(
    st.tuples(st.sampled_from(("take", "send", "send twice", "lose")), st.sampled_from(RUNNERS)),
    max_size=30,
)


def requested(number: int) -> GroupRequest:
    return GroupRequest(
        group_id=f"g{number}", index=number, env="math", split="train", seed=0,
        task=Task(f"t{number}", {}),
    )  # fmt: skip


def made(group_id: str) -> Made:
    return Made(group_id=group_id, group=native_group(group_id))


@settings(max_examples=examples(60))
@given(steps=STEPS)
def test_each_group_is_answered_once_whichever_runners_are_lost(
    steps: list[tuple[str, str]],
) -> None:
    asyncio.run(played(steps))


async def played(steps: list[tuple[str, str]]) -> None:
    dealer = Dealer(Rules(), poll_seconds=0)
    wanted = [f"g{number}" for number in range(6)]
    making = [asyncio.create_task(dealer.make(requested(number))) for number in range(6)]
    await settled()
    held: dict[str, list[str]] = {name: [] for name in RUNNERS}
    sent: list[str] = []
    for step, name in steps:
        if step == "take":
            dealt = await dealer.take(Take(name, 2, held[name]))
            held[name] = [one for one in held[name] if one not in dealt.cancelled]
            held[name] += [one.group_id for one in dealt.requests]
        elif step == "lose":
            held[name] = []
        elif held[name]:
            sent.append(held[name].pop())
            for _ in range(1 + (step == "send twice")):
                dealer.settle(made(sent[-1]))
        await settled()
    # One that stays makes the rest: what others still hold is theirs until they are silent.
    for name in RUNNERS:
        dealt = await dealer.take(Take(name, 9, []))
        while dealt.requests:
            for one in dealt.requests:
                dealer.settle(made(one.group_id))
            await settled()
            dealt = await dealer.take(Take(name, 9, []))
    answers = await asyncio.gather(*making)
    assert [one.group_id for one in answers] == wanted
    assert all((one.group is None) == (one.drop is not None) for one in answers)
    assert dealer.open_groups == 0


async def test_a_group_that_ends_its_runners_is_given_up() -> None:
    dealer = Dealer(Rules(), poll_seconds=0)
    making = asyncio.create_task(dealer.make(requested(0)))
    await settled()
    for _ in range(3):
        assert (await dealer.take(Take("a", 1, []))).requests == [requested(0)]
        await dealer.take(Take("a", 1, ["g0"]))
    assert not (await dealer.take(Take("a", 1, []))).requests
    drop = (await making).drop
    assert drop is not None and drop.failed and "lost 3 times" in drop.message


async def test_a_runner_that_asks_anew_loses_nothing_to_its_earlier_questions() -> None:
    dealer = Dealer(Rules())
    asked = []
    for _ in range(4):
        asked.append(asyncio.create_task(dealer.take(Take("a", 1, []))))
        await settled()
    making = asyncio.create_task(dealer.make(requested(0)))
    await settled()
    assert [one.result().requests for one in asked] == [[], [], [], [requested(0)]]
    dealer.settle(made("g0"))
    assert (await making).group is not None


async def test_answers_that_a_runner_did_not_wait_for_are_no_losses() -> None:
    dealer = Dealer(Rules(), poll_seconds=0)
    making = asyncio.create_task(dealer.make(requested(0)))
    await settled()
    for _ in range(9):
        assert (await dealer.take(Take("a", 1, []))).requests == [requested(0)]
    dealer.settle(made("g0"))
    assert (await making).group is not None


async def test_at_the_end_no_runner_waits_for_an_answer() -> None:
    dealer = Dealer(Rules())
    asked = asyncio.create_task(dealer.take(Take("a", 1, [])))
    await settled()
    dealer.close()
    await settled()
    assert asked.result().drain
    assert (await dealer.take(Take("a", 1, []))).drain


async def test_a_runner_that_leaves_in_its_message_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = await serve_api(dealing_app(Dealer(Rules()), "token"), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(
        b"POST /v1/work/take HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token\r\n"
        b"Content-Length: 9\r\n\r\n1"
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await server.close()
    assert not caplog.records


async def test_work_is_shared_and_what_nobody_wants_is_cancelled() -> None:
    dealer = Dealer(Rules(), poll_seconds=0, runners=lambda: 2)
    making = [asyncio.create_task(dealer.make(requested(number))) for number in range(4)]
    await settled()
    first = await dealer.take(Take("a", 9, []))
    assert [one.group_id for one in first.requests] == ["g0", "g1"]  # the other one gets the rest
    making[0].cancel()
    await settled()
    dealer.drain("a")
    after = await dealer.take(Take("a", 9, ["g0", "g1"]))
    assert (after.cancelled, after.requests, after.drain) == (["g0"], [], True)
    for task in making:
        task.cancel()
