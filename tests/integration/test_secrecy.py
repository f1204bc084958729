"""What a worker gets: its own attempt. No answer, no secret, nothing of another rollout."""

from __future__ import annotations

import hashlib
from pathlib import Path

from support.commands import envserver, read_jsonl

SECRET = "sk-secret-5f2b8c"

NOSY = '''
import hashlib, os, re
from pathlib import Path
from envserver import Environment, Score, Task

class Nosy(Environment):
    """Writes down everything that its process can see of itself."""

    class Config(Environment.Config):
        notes: Path

    def tasks(self, split):
        for n in range(3):
            answer = hashlib.sha256(b"answer %d" % n).hexdigest()
            yield Task(f"nosy-{n}", {"question": f"Question {n}"}, {"answer": answer})

    def demonstration(self, task):
        return [{"role": "assistant", "content": "I do not say."}]

    async def rollout(self, task, run):
        await run.chat([{"role": "user", "content": task.public["question"]}])
        with open(self.config.notes / f"{run.rollout_id}.memory", "wb") as notes:
            notes.write(Path("/proc/self/environ").read_bytes())
            notes.write(Path("/proc/self/cmdline").read_bytes())
            with open("/proc/self/mem", "rb") as memory:
                for line in open("/proc/self/maps"):
                    found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
                    if found and "[v" not in line:
                        start, end = (int(part, 16) for part in found.groups())
                        memory.seek(start)
                        try:
                            notes.write(memory.read(end - start))
                        except OSError:
                            notes.write(b"(unreadable)")
        return "done"

    def score(self, task, result):
        return Score(reward=float(bool(task.hidden["answer"])))
'''


def test_no_answer_and_no_secret_is_anywhere_in_a_workers_memory(tmp_path: Path) -> None:
    (tmp_path / "nosy.py").write_text(NOSY)
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / ".env").write_text(f"ENVSERVER_OPENAI__API_KEY={SECRET}\n")
    ran = envserver(
        "process", "--env", "nosy.py", "--model", "sim", "--env.group_size", 1,
        "--workers.heartbeat_seconds", 60,  # reading all memory holds the worker up
        "--env.notes", notes, "--env.data_path_to_save_groups", "out.jsonl", folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    seen = sorted(notes.glob("*.memory"))
    assert len(seen) == 3
    answers = [hashlib.sha256(b"answer %d" % n).hexdigest() for n in range(3)]
    for path in seen:
        memory = path.read_bytes()
        assert b"Question" in memory  # it was really read
        for hidden in (SECRET, *answers):
            assert hidden.encode() not in memory
    assert SECRET not in (tmp_path / "out.jsonl").read_text() + ran.stdout + ran.stderr
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 3


GUESSER = '''
import re
from contextlib import nullcontext
from hashlib import sha256
from envserver import Environment, Score, Services, Task

CANARY = re.compile(rb"canary-[0-9a-f]{16}")

class Guesser(Environment):
    """Asks about a secret that only the server has, and looks for it in all of its own memory."""

    isolation = "sandboxed"

    def tasks(self, split):
        for n in range(2):
            secret = sha256(b"secret %d" % n).hexdigest()[:16]
            yield Task(f"guess-{n}", {"question": "Which?"}, {"secret": f"canary-{secret}"})

    def demonstration(self, task):
        return [{"role": "assistant", "content": "a"}]

    def services(self):
        return nullcontext(Services({"has": self.has}, state=lambda task: {"asked": 0}))

    async def has(self, arguments, caller):
        caller.state["asked"] += 1
        return {"yes": arguments["text"] in caller.task.hidden["secret"], **caller.state}

    async def rollout(self, task, run):
        planted = bytearray(b"canary-") + b"0" * 16
        reply = await run.chat([{"role": "user", "content": task.public["question"]}])
        texts = ("canary-", reply.content)
        answers = [await run.call_tool("has", {"text": text}) for text in texts]
        found = set()
        with open("/proc/self/mem", "rb") as memory:
            for line in open("/proc/self/maps"):
                place = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
                if place and "[v" not in line:
                    start, end = (int(part, 16) for part in place.groups())
                    memory.seek(start)
                    try:
                        found.update(CANARY.findall(memory.read(end - start)))
                    except OSError:
                        pass
        return {"found": sorted(one.decode() for one in found), "answers": answers}

    def score(self, task, result):
        return Score(reward=float(result.output["answers"][0]["yes"]))
'''


def test_a_service_knows_the_secret_and_a_sandboxed_worker_never_holds_it(tmp_path: Path) -> None:
    (tmp_path / "guesser.py").write_text(GUESSER)
    ran = envserver(
        "process", "--env", "guesser.py", "--model", "sim", "--env.group_size", 2,
        "--workers.heartbeat_seconds", 60,  # reading all memory holds the worker up
        "--env.data_path_to_save_groups", "out.jsonl", folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(tmp_path / "out.jsonl")
    assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 2
    for group in groups:
        for rollout in group["envserver"]["rollouts"]:
            output = rollout["output"]
            assert [answer["asked"] for answer in output["answers"]] == [1, 2]
            # All of its memory was read: what it planted itself is found, and nothing else.
            assert output["found"] == ["canary-" + "0" * 16]
    for n in range(2):
        secret = hashlib.sha256(b"secret %d" % n).hexdigest()[:16]
        assert secret not in (tmp_path / "out.jsonl").read_text()
