"""What is on disk, indexed and served in this process."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
from envserver_records.records import Group, Json

from envserver.evaluation.folders import Evaluated, RunFile, groups_path, tasks_path
from envserver.evaluation.results import TaskFacts
from envserver.export import group_line
from envserver.running.evaluation_folder import write_run_file, write_tasks
from envserver.trainers.live_events import Feed
from envserver.viewing.app import create_viewer
from envserver.viewing.evaluations import Evaluations
from envserver.viewing.index import IndexReader, open_index
from envserver.viewing.indexing import Indexer
from envserver.viewing.indexing_process import Progress
from envserver.viewing.sources import viewed

from .delivered import write_lines


def indexed(index: Path, *places: Path) -> Progress:
    """Indexes what the places hold now, as a new process would."""
    indexer = Indexer(viewed([str(one) for one in places]), index, lambda _: None)
    indexer.read_new()
    found = indexer.progress(done=True)
    indexer.close()
    return found


@asynccontextmanager
async def opened(index: Path, *places: Path) -> AsyncIterator[IndexReader]:
    """The groups of an index that is up to date."""
    indexed(index, *places)
    async with open_index(index) as groups:
        yield groups


@asynccontextmanager
async def looking_at(index: Path, *places: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The routes of `envserver view`."""
    async with opened(index, *places) as groups:
        looked_at = viewed([str(one) for one in places])
        evaluations = Evaluations(looked_at, groups)
        app = create_viewer(groups, Feed(), lambda: {"kind": looked_at.kind}, evaluations)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http


def write_groups(path: Path, groups: Iterable[Group]) -> Path:
    """A file of `process`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [group_line(one, include_messages=True, score_range="unit") for one in groups]
    path.write_bytes(b"".join(lines))
    return path


def write_evaluation(folder: Path, lines: list[Json], **facts: Any) -> Path:
    """A folder as `envserver evaluate` leaves it."""
    origins = [one["envserver"] for one in lines]
    evaluated = Evaluated(
        environment=origins[0]["env"],
        env={},
        sampling={},
        split="test",
        group_size=max(one["asked"] for one in origins),
        seed=0,
        simulated=False,
        complete=True,
    )
    folder.mkdir(parents=True)
    write_run_file(folder, RunFile(evaluated=msgspec.structs.replace(evaluated, **facts)))
    write_lines(groups_path(folder), lines)
    tasks = [TaskFacts(group_id=o["group_id"], task_id=o["task_id"], labels={}) for o in origins]
    write_tasks(tasks_path(folder), tasks)
    return folder
