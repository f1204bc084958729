"""Under random faults of everything, no accepted group is lost, none comes again after it was
acknowledged, and tokens stay what they were.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from chaos.faults import torment
from chaos.judge import Verdict, judge
from chaos.world import LONG, SHORT, World, world
from support.postgres import Postgres

from envserver.sandbox import linux

SEED = 20261122


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 64 MB for the store; an ordinary folder where we may not mount one."""
    folder.mkdir()
    if os.geteuid() != 0:
        yield folder
        return
    linux.mount("tmpfs", str(folder), "tmpfs", data="size=64m")
    try:
        yield folder
    finally:
        linux.unmount(str(folder))


def report(made: World, done: Counter[str], verdict: Verdict) -> str:
    lines = [
        f"chaos on {'SQLite' if made.postgres is None else 'PostgreSQL'}: {done.total()} faults"
    ]
    lines += [f"  {name:50} {count:5}" for name, count in done.most_common()]
    lines += [f"  {name:50} {count:5}" for name, count in made.told.seen.items()]
    lines.append(verdict.table())
    return "\n".join(lines)


def torture(made: World, faults: int, tell: Callable[[str], None]) -> None:
    done = torment(
        made, SEED, faults, rest_seconds=(0.1, 0.8), progress=0.5 if faults < 50 else 0.2
    )
    made.until_joined()
    made.let_finish()
    engine_said = [echo.completion_ids for echo in made.witness]
    verdict = judge(made.told, engine_said, made.journals(), made.deliveries)
    tell(report(made, done, verdict))
    assert verdict.faults == []
    assert done.total() == faults
    # Something was at stake; how much the engine sampled meanwhile depends on the machine's load.
    assert min(verdict.accepted, verdict.acknowledged) > faults / 2
    assert verdict.sampled_runs > faults / 10


@pytest.mark.parametrize(
    ("faults", "environment"),
    [
        pytest.param(8, SHORT, marks=pytest.mark.thorough),
        pytest.param(8, LONG, marks=pytest.mark.thorough),
        pytest.param(500, SHORT, marks=pytest.mark.slow),
        pytest.param(100, LONG, marks=pytest.mark.slow),
    ],
)
def test_on_sqlite_two_trainers_share_every_group_exactly_once(
    faults: int, environment: Sequence[object], tmp_path: Path, tell: Callable[[str], None]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        store = str(disk / "store.db")
        with world(tmp_path, store=store, postgres=None, environment=environment) as made:
            torture(made, faults, tell)


@pytest.mark.slow
@pytest.mark.parametrize("faults", [8, 500])
def test_on_postgresql_each_of_two_trainers_gets_every_group_exactly_once(
    faults: int, tmp_path: Path, postgres: Postgres, tell: Callable[[str], None]
) -> None:
    deliveries = {"a": "shared", "b": "broadcast"}
    store = postgres.emptied()
    with world(tmp_path, store=store, postgres=postgres, deliveries=deliveries) as made:
        torture(made, faults, tell)


@pytest.mark.parametrize(
    ("faults", "servers"),
    [pytest.param(6, 2, marks=pytest.mark.thorough), pytest.param(500, 3, marks=pytest.mark.slow)],
)
def test_several_servers_on_one_postgresql_lose_nothing_and_repeat_nothing(
    faults: int, servers: int, tmp_path: Path, postgres: Postgres, tell: Callable[[str], None]
) -> None:
    """Kills and pauses of the servers and the database, and cut connections: clients go on."""
    store = postgres.emptied()
    with world(tmp_path, store=store, postgres=postgres, servers=servers) as made:
        torture(made, faults, tell)
