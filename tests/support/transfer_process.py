"""A trainer that sends weights: python transfer_process.py MODEL [SETTINGS as JSON].

In, a JSON object a line: {"publish": N} sends the weights of a version, {"restore": true} those
that engines lack. With "halt_at" it waits for a line before that bucket. Out, a line for each:
what was published, or the error. The versions are those of versions_process.py. Runs where torch,
transformers and our clients are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from envserver_clients.http import SyncEnvClient
from envserver_clients.weights import PromptCheck, Published, Transfer
from envserver_clients.weights.transfer import Bucket
from envserver_records import EnvserverError
from envserver_records.tasks import Json
from versions_process import Versions

PROMPT = list(range(300, 340))
ANSWER = list(range(400, 432))


def main(folder: Path, settings: Json) -> None:
    torch.set_num_threads(1)
    versions = Versions(folder, lora=False)
    url = settings.pop("server", None)
    tolerance = settings.pop("tolerance", 1e-4)
    server = None if url is None else SyncEnvClient(url, run=None).__enter__()
    push = Transfer(settings.pop("engines"), server=server, **settings)
    for line in sys.stdin:
        try:
            answer = obey(json.loads(line), push, versions, tolerance)
        except EnvserverError as error:
            answer = {"error": error.kind, "message": error.message, **error.detail}
        sys.stdout.write(json.dumps(answer, default=str) + "\n")
        sys.stdout.flush()


def obey(asked: Json, push: Transfer, versions: Versions, tolerance: float) -> Any:
    if "restore" in asked:
        return {"restored": push.restore()}
    version = asked["publish"]
    # Another version's logprobs are what a wrong check looks like.
    (scored,) = versions.score(asked.get("checked_as", version), [PROMPT + ANSWER])
    versions.score(version, [PROMPT])
    check = PromptCheck(PROMPT, ANSWER, scored[len(PROMPT) - 1 :], tolerance)
    prepared = push.prepare(version, versions.tensors(), check)
    if (at := asked.get("halt_at")) is not None:
        prepared = replace(prepared, buckets=Halting(prepared.buckets, at))
    return told(push.send(prepared))


class Halting(list[Bucket]):
    """Buckets; before number `at` a line says so, and a line is waited for."""

    def __init__(self, buckets: list[Bucket], at: int) -> None:
        super().__init__(buckets)
        self._at: int | None = at

    def __iter__(self) -> Iterator[Bucket]:
        for number, bucket in enumerate(list(super().__iter__())):
            if number == self._at:
                self._at = None
                print(json.dumps({"halted": number}), flush=True)
                sys.stdin.readline()
            yield bucket


def told(published: Published) -> Json:
    return {
        "version": published.version,
        "engines": published.engines,
        "difference": published.difference,
        "seconds": published.seconds,
        "failed": {url: error.message for url, error in published.failed.items()},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
