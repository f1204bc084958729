"""A trainer that writes down all that it is given:

    python -m chaos.trainer URL[,URL...] RUN DELIVERY FOLDER lease|stream

It does what a careful trainer does: lease, train (here: digest), save the checkpoint, acknowledge
with the checkpoint's name. Killed at any moment it starts again from its last checkpoint, or, when
there is a file RUN.go-back in its folder, from an earlier one. Lines of its journal, each on disk
before it goes on:

    {"at": seconds, "what": "given", "lease": ..., "granted": seconds,
     "groups": {group id: [format, digest, sampled runs]}}
    {"at": ..., "what": "saved", "checkpoint": n, "lease": ...}
    {"at": ..., "what": "acked", "checkpoint": n, "lease": ...}    the server confirmed it
    {"at": ..., "what": "lost", "lease": ...}                       others have its groups
    {"at": ..., "what": "resumed", "checkpoint": n or null}         the server confirmed it

`granted` is when the server made the lease. Seconds are `time.time()`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from envserver_clients.http import Retries, SyncEnvClient
from envserver_clients.records import Batch

from envserver import ConflictError

from .digests import digest_of_rows, sampled_runs

PATIENT = Retries(tries=400, first_pause_seconds=0.05, longest_pause_seconds=0.5)
LEASE_SECONDS = 8.0
BATCH = 3
GO_BACK = "go-back"


class Journal:
    """Lines on disk; a half line that a kill left behind is cut off at the next start."""

    def __init__(self, path: Path) -> None:
        self.lines = read_journal(path)
        with path.open("ab") as whole:
            whole.truncate(sum(len(json.dumps(line)) + 1 for line in self.lines))
        self._file: BinaryIO = path.open("ab")

    def write(self, what: str, **facts: Any) -> None:
        line = {"at": time.time(), "what": what, **facts}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines.append(line)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole lines."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def main(url: str, run: str, delivery: str, folder: Path, way: str) -> None:
    journal = Journal(folder / f"{run}.jsonl")
    client = SyncEnvClient(
        url, run=run, batch_size=BATCH, delivery=delivery, retries=PATIENT, timeout_seconds=15
    )
    with client as trainer:
        number = _start_again(trainer, journal, folder / f"{run}.{GO_BACK}")
        batches = trainer.stream if way == "stream" else trainer.batches
        for batch in batches(whole=False, seconds=LEASE_SECONDS):
            number += 1
            granted = batch.expires_at - LEASE_SECONDS
            journal.write("given", lease=batch.lease_id, granted=granted, groups=_told(batch))
            journal.write("saved", checkpoint=number, lease=batch.lease_id)
            _acknowledge(trainer, journal, batch.lease_id, number)


def _start_again(trainer: SyncEnvClient, journal: Journal, go_back: Path) -> int:
    saved = [line for line in journal.lines if line["what"] == "saved"]
    if not saved:
        return 0
    last = saved[-1]
    # It was saved; whether the server was told is not known.
    ended = [line for line in journal.lines if line["what"] in ("acked", "lost")]
    if not any(line["lease"] == last["lease"] for line in ended):
        _acknowledge(trainer, journal, last["lease"], last["checkpoint"])
    resumable = _acked_checkpoints(journal.lines)
    if go_back.exists() and len(resumable) > 2:
        resumable = resumable[:-2]
        journal.write("going back", checkpoint=resumable[-1])
    go_back.unlink(missing_ok=True)
    if resumable:
        trainer.resume(f"step-{resumable[-1]}")
        journal.write("resumed", checkpoint=resumable[-1])
    return int(last["checkpoint"])


def _acked_checkpoints(lines: list[dict[str, Any]]) -> list[int]:
    """Those that the trainer may still go on from, oldest first."""
    found: list[int] = []
    for line in lines:
        if line["what"] == "acked":
            found.append(line["checkpoint"])
        elif line["what"] in ("resumed", "going back"):
            found = [number for number in found if number <= line["checkpoint"]]
    return found


def _acknowledge(trainer: SyncEnvClient, journal: Journal, lease: str, number: int) -> None:
    try:
        trainer.ack(lease, checkpoint=f"step-{number}")
    except ConflictError as error:
        journal.write("lost", lease=lease, why=error.message)
    else:
        journal.write("acked", checkpoint=number, lease=lease)


def _told(batch: Batch) -> dict[str, Any]:
    told = {}
    for group in batch.groups:
        digest = digest_of_rows((row.tokens, row.mask) for row in group.rows)
        sampled = [run for row in group.rows for run in sampled_runs(row.tokens, row.mask)]
        told[group.group_id] = [group.format, digest, sampled if group.format == "group" else []]
    return told


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5])
