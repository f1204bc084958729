"""Conversations with a server, line by line, as unit/api/wire.txt and trainer.txt write them."""

import json
import re
from functools import partialmethod
from pathlib import Path
from typing import Any

import httpx

from .api import ENVIRONMENT, Api, mark_of, wire_group

JSON = {"content-type": "application/json"}
TAKE = re.compile(r"(\S+)(?: as (\S+))?(?: !(\S+))?(?: (\{.*\}))?$")


def conversations(file: Path) -> dict[str, list[str]]:
    """The lines of each, by its title: what stands after "# "."""
    parts = (part.partition("\n") for part in file.read_text().split("\n# ")[1:])
    return {title: [line for line in lines.splitlines() if line] for title, _, lines in parts}


class Conversation:
    """Says lines to a server. Each method is a line's first word, in small letters; it returns what
    must stand after the arrow, or None where it has looked at that itself."""

    answer: httpx.Response

    def __init__(self, api: Api) -> None:
        self.api = api
        self.leases: dict[str, Any] = {}
        self.refusals = 0

    async def hold(self, lines: list[str]) -> None:
        for line in lines:
            told, _, expected = line.partition(" ->")
            word, _, rest = told.partition(" ")
            if word.isupper():
                await self.ask(word, rest, expected.strip())
            else:
                said = await getattr(self, word)(rest, expected.strip())
                assert said is None or said == expected.strip(), f"{line!r} answered {said!r}"

    async def ask(self, method: str, words: str, expected: str) -> None:
        path, _, body = words.partition(" ")
        key, _, body = body.rpartition("! ") if body.startswith("!") else ("", "", body)
        sent: dict[str, Any] = {"json": json.loads(body)} if body else {}
        if key:
            sent["headers"] = {"idempotency-key": key.strip("!")}
        self.answer = answer = await self.api.http.request(method, path, **sent)
        status, _, text = (expected if expected[0].isdigit() else f"200 {expected}").partition(" ")
        assert answer.status_code == int(status), (words, answer.text)
        if path.startswith("/v1") and answer.is_error:
            assert answer.headers["content-type"] == "application/problem+json"
            assert {"type", "title", "status", "detail"} <= set(answer.json())
            assert answer.json()["status"] == int(status)
        if text.startswith("="):
            assert answer.json() == json.loads(text[1:]), (words, answer.text)
        elif text:
            alike(answer.json(), json.loads(text))

    async def warned(self, words: str, expected: str) -> None:
        """Of the last answer."""
        said = self.answer.headers.get("x-envserver-warning", "")
        assert words in said if words else not said

    async def hides(self, lease: str, expected: str) -> None:
        assert self.leases[lease]["lease_id"] not in self.answer.text

    # Trainers and environments of the Atropos API

    async def trainer(self, changes: str, expected: str) -> None:
        await self.api.register(**json.loads(changes or "{}"))

    async def start(self, changes: str, expected: str) -> None:
        await self.api.start(**json.loads(changes or "{}"))

    async def reset(self, *_: str) -> None:
        answer = await self.api.http.get("/reset_data")
        assert (answer.status_code, answer.text) == (200, "Reset successful")
        assert answer.headers["content-type"].startswith("text/plain")

    async def environment(self, changes: str, expected: str) -> str | None:
        made = await self.api.post("/register-env", ENVIRONMENT | json.loads(changes or "{}"))
        if expected.startswith("{"):
            assert made == json.loads(expected)
            return None
        return f"{made['env_id']} {made['wandb_name']}"

    async def group(self, words: str, expected: str) -> None:
        words, brace, more = words.partition("{")
        rows, fields = 2, json.loads(brace + more or "{}")
        for word in words.split():
            if word.startswith("@"):
                fields["env_id"] = json.loads(word[1:])
            elif word.startswith("x"):
                rows = int(word[1:])
        for mark in re.findall(r"(?<!\S)\d+", words):
            answer = await self.api.post("/scored_data", wire_group(rows, int(mark), **fields))
            assert answer == json.loads(expected or '{"status": "received"}')

    async def groups(self, words: str, expected: str) -> None:
        groups = []
        for mark, rows, env_id in re.findall(r"(\d+)x(\d+)(?:@(\d+))?", words):
            fields = {"env_id": int(env_id)} if env_id else {}
            groups.append(wire_group(int(rows), int(mark), **fields))
        assert await self.api.post("/scored_data_list", groups) == json.loads(expected)

    async def batch(self, _: str, expected: str) -> str | None:
        answer = await self.api.http.get("/batch")
        found = answer.json()["batch"]
        if found is None and expected.startswith("none"):
            assert expected.removeprefix("none: ") in f"none {answer.headers['x-envserver-reason']}"
            return None
        return " ".join(str(mark_of(group)) for group in found or [])

    async def status(self, *_: str) -> str:
        said = await self.api.get("/status")
        assert set(said) == {"current_step", "queue_size"}
        return f"{said['current_step']} {said['queue_size']}"

    async def raw(self, words: str, expected: str) -> None:
        path, _, body = words.partition(" ")
        answer = await self.api.http.post(path, content=body.encode(), headers=JSON)
        assert answer.status_code == 422, body
        if expected.startswith("{"):
            assert answer.json() == {"detail": [json.loads(expected)]}
        elif expected:
            assert answer.json()["detail"][0]["type"] == expected, (body, answer.text)

    async def refused(self, fields: str, expected: str) -> None:
        bad, place = wire_group(**json.loads(fields)), json.loads(expected)
        for path, body, prefix in (
            ("/scored_data", bad, ["body"]),
            ("/scored_data_list", [wire_group(mark=1), bad], ["body", 1]),
        ):
            answer = await self.api.http.post(path, content=json.dumps(body), headers=JSON)
            assert answer.status_code == 422, fields
            error = answer.json()["detail"][0]
            assert error["loc"][: len(prefix) + len(place)] == [*prefix, *place]
            assert {"type", "loc", "msg", "input"} <= set(error)
            self.refusals += 1
        known = (await self.api.get("/v1/status"))["atropos"]["refused_posts"]
        assert sum(known.values()) == self.refusals

    # Trainers of our own API

    async def put(self, words: str, expected: str) -> None:
        words, brace, more = words.partition("{")
        await self.api.put(*words.split(), **json.loads(brace + more or "{}"))

    async def run(self, words: str, expected: str) -> None:
        name, _, wanted = words.partition(" ")
        alike(await self.api.run(name, **json.loads(wanted or "{}")), json.loads(expected or "{}"))

    async def take(self, words: str, expected: str) -> str:
        """The groups of the next lease: the ids of ours, the marks of those that were posted."""
        found = TAKE.match(words)
        assert found, words
        run, name, key, wanted = found.groups()
        lease = await self.api.lease(run, key or "", **json.loads(wanted or "{}"))
        known = self.leases.setdefault(name or run, lease) if key else lease
        assert known == lease  # the same answer again
        self.leases[name or run] = lease
        return " ".join(
            one["group_id"] if one["format"] == "group" else str(mark_of(one["group"]))
            for one in lease["groups"]
        )

    async def end(self, what: str, words: str, expected: str) -> str:
        name, run, more = (*words.split(" ", 2), "", "")[:3]
        lease = self.leases.get(name, {"lease_id": name})
        status = await self.api.end(what, lease, run or "run", **json.loads(more or "{}"))
        return "" if status in (200, 204) else str(status)

    ack = partialmethod(end, "ack")
    nack = partialmethod(end, "nack")
    extend = partialmethod(end, "extend")


def alike(found: Any, expected: Any) -> None:
    """Equal, but for keys of objects that are not named."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            alike(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected), (found, expected)
        for one, wanted in zip(found, expected, strict=True):
            alike(one, wanted)
    else:
        assert found == expected, (found, expected)
