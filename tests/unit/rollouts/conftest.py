"""Environments whose scorer does what the response says."""

from __future__ import annotations

from pathlib import Path

import pytest

ENVIRONMENT = '''
import asyncio, math, os, socket, sys, time
from pathlib import Path
from envserver import Environment, Score, ScorerError, Task


class Moody(Environment):
    """Does what the response says."""

    score_cpu_seconds = 0.2
    score_timeout_seconds = 600.0
    prepared = 0

    class Config(Environment.Config):
        bonus: float = 0.0
        cpu_seconds_to_load: float = 0.0

    def tasks(self, split):
        for i in range(3):
            yield Task(f"t{i}", {"question": i}, {"answer": i})

    async def rollout(self, task, run):
        return None

    def prepare_scoring(self):
        Moody.prepared += 1
        while time.process_time() < self.config.cpu_seconds_to_load:
            pass

    def task_from_row(self, row):
        return Task("row", row, row)

    def score(self, task, result):
        while "burn" in task.hidden:
            pass
        match result.output:
            case "hang":
                Path(__file__).with_name("hanging").touch()
                time.sleep(3600)
            case "burn":
                while True:
                    pass
            case "full memory":
                os.kill(os.getpid(), 9)
            case "wait":
                time.sleep(3)
                return Score(reward=1.0)
            case "die once":
                dead = Path(__file__).with_name("dead")
                if not dead.exists():
                    dead.touch()
                    os._exit(7)
                return Score(reward=1.0)
            case "prepared":
                return Score(reward=1.0, metrics={"times": self.prepared})
            case "die":
                os._exit(7)
            case "fork":
                if (child := os.fork()) == 0:
                    return Score(reward=0.25)
                os.waitpid(child, 0)
                return Score(reward=1.0)
            case "talk":
                for number in range(3, 64):
                    try:
                        stream = socket.socket(fileno=os.dup(number))
                    except OSError:
                        continue
                    if stream.family == socket.AF_UNIX:
                        stream.send((5).to_bytes(4, "big") + b"hello")
                return Score(reward=1.0)
            case "unreadable":
                raise ScorerError("no", why=Moody.Config())
            case "exit":
                sys.exit(3)
            case "raise":
                raise ValueError("no idea")
            case "nan":
                return Score(reward=math.nan)
            case "two":
                return Score(reward=2.0)
            case "text":
                return Score(reward="1")
            case "metric":
                return Score(reward=1.0, metrics={"x": math.inf})
            case "nothing":
                return None
            case "judge":
                return Score(reward=1.0, error="the judge is down")
            case "unscorable":
                return Score(reward=None)
            case "async":
                return self.later()
            case "pid":
                return Score(reward=1.0, metrics={"pid": os.getpid()})
        return Score(reward=1.0 if result.output == task.hidden.get("answer") else 0.0)

    async def later(self):
        await asyncio.sleep(0)
        return Score(reward=0.5 + self.config.bonus)

    def score_group(self, task, results, scores):
        return [Score(reward=score.reward / len(scores)) for score in scores]
'''


@pytest.fixture
def moody(tmp_path: Path) -> str:
    path = tmp_path / "moody.py"
    path.write_text(ENVIRONMENT)
    return str(path)


@pytest.fixture
def hasty(tmp_path: Path) -> str:
    """The same, with little time for what hangs: the rest needs some milliseconds."""
    path = tmp_path / "hasty.py"
    path.write_text(ENVIRONMENT.replace("seconds = 600.0", "seconds = 3.0"))
    return str(path)
