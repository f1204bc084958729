"""Conversations of tau per second, played and valued, without models.

    python tests/benchmarks/bench_tau.py TAU2_DATA [seconds per domain]

For each domain of tau2-bench: how long loading takes (once per process), a fresh world, and how
many conversations a second one core plays and values, going through all tasks: the expected
actions, then all that is to be said, the stop, and the reward by replaying all of it. tau2-bench's
own evaluator takes 0.1 to 0.4 s for building one airline database, and builds two.
"""

import itertools
import sys
import time
from pathlib import Path

from envserver_environments.tau.domains.loading import tau2_domain
from envserver_environments.tau.domains.world import Domain
from envserver_environments.tau.episodes import Episode
from envserver_environments.tau.evaluation import evaluate
from envserver_environments.tau.tasks import TauTask, read_task

DOMAINS = ("airline", "retail", "telecom", "mock")
WORLDS = 2000


def main() -> None:
    data = Path(sys.argv[1])
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
    for name in DOMAINS:
        began = time.perf_counter()
        domain = tau2_domain(name, data)
        loading = time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(WORLDS):
            domain.world()
        world = (time.perf_counter() - began) / WORLDS
        rate = conversations_per_second(domain, seconds)
        sys.stdout.write(
            f"{name:8} load {loading:5.2f} s, world {world * 1e6:6.1f} us, "
            f"{rate:7.1f} conversations/s\n"
        )


def conversations_per_second(domain: Domain, seconds: float) -> float:
    ids = domain.splits.get("base") or list(domain.tasks)
    began = time.perf_counter()
    for count, task_id in enumerate(itertools.cycle(ids)):
        passed = time.perf_counter() - began
        if passed > seconds and count >= len(ids):
            return count / passed
        play_and_value(domain, read_task(domain.tasks[task_id]))
    raise AssertionError("it goes on for ever")


def play_and_value(domain: Domain, task: TauTask) -> float:
    criteria = task.evaluation_criteria
    assert criteria is not None
    episode = Episode(domain, task)
    if episode.speaker == "user":
        episode.say("Please help me.")
    for number, action in enumerate(criteria.actions or ()):
        if episode.speaker != action.requestor:
            episode.say("Please go on.")
        episode.say(None, [{"id": str(number), "name": action.name, "arguments": action.arguments}])
    if episode.speaker == "assistant":
        episode.say("Done. " + "; ".join(criteria.communicate_info or ()))
    episode.say("Thanks. ###STOP###")
    verdicts = [True] * len(criteria.nl_assertions or ())
    found = evaluate(domain, task, episode.messages, str(episode.ending), nl_verdicts=verdicts)
    return found.reward


if __name__ == "__main__":
    main()
