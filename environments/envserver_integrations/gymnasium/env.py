"""Environments of Gymnasium, played in text: each seed is a task.

The environment runs in the worker, which executes no code of the model. The reward of each step is
a turn reward, divided by the width of `returns`, so that an episode's is in [0, 1].
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from envserver_records.tasks import Json
from pydantic import Field, PositiveInt

from envserver import (
    ConfigError,
    Environment,
    Message,
    NotFoundError,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)

from ..answers import Answer, action_of

_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_TAGS = {
    first + number: prefix + colour
    for first, prefix in ((30, ""), (40, "on-"), (90, ""), (100, "on-"))
    for number, colour in enumerate(_COLOURS)
}


class BadAction(Exception):
    """The answer names no action of the space; the message is for the model."""


def plain(rendered: str) -> str:
    """Returns a terminal's picture with its colours as tags: `<on-red>S</on-red>`."""
    parts: list[str] = []
    opened: list[str] = []
    at = 0
    for found in _ESCAPE.finditer(rendered):
        parts.append(rendered[at : found.start()])
        at = found.end()
        names = [name for code in found[1].split(";") if (name := _TAGS.get(int(code or 0)))]
        if not names:  # the end of a colour
            parts += [f"</{name}>" for name in reversed(opened)]
            opened.clear()
        parts += [f"<{name}>" for name in names]
        opened += names
    return "".join([*parts, rendered[at:]]).strip("\n")


def as_text(observation: Any) -> str:
    """Returns text as it is, and everything else as JSON."""
    if isinstance(observation, str):
        return observation

    def jsonable(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)

    return json.dumps(observation, default=jsonable, ensure_ascii=False)


def described(space: Any, names: Sequence[str]) -> str:
    if names:
        return ", ".join(names)
    if _kind(space) == "Discrete":
        return f"the numbers {space.start} to {space.start + space.n - 1}"
    return "text" if _kind(space) == "Text" else f"JSON, as in {as_text(_sample(space))}"


def example(space: Any, names: Sequence[str]) -> str:
    if names:
        return names[-1]
    return str(space.start) if _kind(space) == "Discrete" else as_text(_sample(space))


def _sample(space: Any) -> Any:
    space.seed(0)
    return space.sample()


def is_discrete(space: Any) -> bool:
    """Whether its actions are numbers, or names that stand for them."""
    return _kind(space) == "Discrete"


def action(space: Any, said: str, names: Sequence[str]) -> Any:
    if _kind(space) == "Discrete":
        return _numbered(space, said.strip("[] \t\n.").lower(), [name.lower() for name in names])
    if _kind(space) == "Text":
        found: Any = said
    else:
        try:
            found = _converted(space, json.loads(said))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise BadAction(f"That is not an action in JSON: {str(error)[:200]}") from error
    if not space.contains(found):
        raise BadAction("That is not one of the possible actions.")
    return found


def _numbered(space: Any, said: str, names: list[str]) -> Any:
    if said in names:
        return space.start + names.index(said)
    if re.fullmatch(r"-?[0-9]{1,9}", said) and space.start <= int(said) < space.start + space.n:
        return int(said)
    raise BadAction("That is not one of the possible actions.")


def _converted(space: Any, value: Any) -> Any:
    """Returns a JSON value in the types of a space; the space checks it afterwards."""
    import numpy

    kind = _kind(space)
    if kind == "Dict":
        return {key: _converted(part, value[key]) for key, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(_converted(part, item) for part, item in zip(space.spaces, value, strict=True))
    if kind == "Discrete":
        return int(value)
    if kind == "Text":
        return value
    return numpy.asarray(value, dtype=space.dtype)


def _kind(space: Any) -> str:
    own = (kind for kind in type(space).__mro__ if kind.__module__.startswith("gymnasium.spaces"))
    return next((kind.__name__ for kind in own), "")


class Known(NamedTuple):
    """Rules for the model, names of the actions in order, lowest and highest return."""

    rules: str = ""
    actions: tuple[str, ...] = ()
    returns: tuple[float, float] = (0.0, 1.0)


_LAKE = Known(
    "Walk over a frozen lake from S to G. F is ice, H a hole that ends the walk. You are where the "
    "map is <on-red>.",
    ("left", "down", "right", "up"),
)
KNOWN = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "Taxi": Known(
        "Drive the taxi to the passenger (the <blue> letter), pick them up, drive to their goal "
        "(the <magenta> letter) and drop them off. The taxi is <on-yellow>, with the passenger in "
        "it <on-green>. | is a wall, : is none. Each step costs 1, a wrong pickup or dropoff 10.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        (-200.0, 20.0),
    ),
    "CliffWalking": Known(
        "Walk from your place (x) to T in few steps. C is a cliff: it costs 100 and you start "
        "again.",
        ("up", "right", "down", "left"),
        (-100.0, -13.0),
    ),
    "Blackjack": Known(
        "Blackjack. You see your sum, the dealer's card, and whether you have a usable ace.",
        ("stick", "hit"),
        (-1.0, 1.0),
    ),
}
KNOWN["CliffWalkingSlippery"] = KNOWN["CliffWalking"]


class Gymnasium(Environment):
    """An environment of Gymnasium."""

    world: ClassVar[str]
    """`ID`, or `MODULE:ID`; the module is imported and registers it."""
    known: ClassVar[Known] = Known()
    exact_demonstrations = True
    demonstrations_solve = False

    class Config(Environment.Config):
        max_turns: PositiveInt = 50
        """Maximum steps, unless the environment ends before."""
        options: dict[str, Any] = {}
        """Arguments of `gymnasium.make`, such as {"is_slippery": false}."""
        observation: Literal["auto", "value", "render"] = "auto"
        """render: the picture of render mode ansi, colours as tags. value: the observation, as JSON
        where it is not text. auto: text, else the picture, else JSON."""
        system: str | None = None
        """System prompt; unset: the rules, for Gymnasium's own text environments."""
        prompt: str = (
            "{observation}\n\nActions: {actions}. Write one in brackets, as in [{example}]."
        )
        """First message; {observation}, {actions}, {example} and {world} are filled in."""
        next_prompt: str = "{observation}"
        """Every later message, also with {reward}, that of the last action."""
        actions: list[str] = []
        """Names of the numbers of a discrete action space, in order; numbers work, too."""
        answer: Answer | None = None
        """The action in an answer: all of it (after </think>), its last [brackets], its last line,
        or what is in its last <tag>. Unset: brackets for numbers and names, else all of it."""
        tag: str = "answer"
        """Name of the tag."""
        discount: float = Field(default=1.0, gt=0, le=1)
        """Factor by which each step's reward counts less than the one before."""
        returns: tuple[float, float] | None = None
        """Lowest and highest sum of an episode's rewards, which become 0 and 1; what lies outside
        is clipped. Unset: (0, 1), or what is known of Gymnasium's own."""
        invalid_reward: float = 0.0
        """Reward, before the division, of a turn whose answer names no action."""
        most_invalid: PositiveInt = 3
        """Answers in a row without an action that end the episode."""
        moves: list[str] = []
        """What the simulated engine says, over and over; unset: actions at random."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        low, high = self.config.returns or self.known.returns
        self._low: float = low
        self._width: float = high - low
        if self._width <= 0:
            raise ConfigError(f"returns: {high} is not above {low}.")

    def tasks(self, split: Split) -> Iterator[Task]:
        rng = random.Random(f"gymnasium-{self.world}-{self.config.seed}-{split}")
        for number in itertools.count():
            yield Task(f"{split}-{number}", {"seed": rng.randrange(2**31)})

    def rollout(self, task: PublicTask, run: Rollout) -> Json:
        """Plays an episode, in a thread: a step may take long."""
        env = made(self.world, self.config.options)
        try:
            return self._played(env, task.public["seed"], run)
        finally:
            env.close()

    def _played(self, env: Any, seed: int, run: Rollout) -> Json:
        config, space = self.config, env.action_space
        names, answer = self._action_names(space), self._answer(space)
        facts = {
            "world": self.world.rpartition(":")[2],
            "actions": described(space, names),
            "example": example(space, names),
        }
        observation, _ = env.reset(seed=seed)
        shown = self._shown(env, observation)
        messages = self._opening(_filled(config.prompt, observation=shown, **facts))
        total, invalid, ended = 0.0, 0, False
        turn = 0
        for turn in range(1, config.max_turns + 1):
            reply = run.chat_blocking(messages)
            messages.append(reply.message)
            said = action_of(reply.content, answer, config.tag)
            try:
                chosen = action(space, said, names)
            except BadAction as error:
                invalid += 1
                reward, shown, ended = config.invalid_reward, str(error), False
            else:
                invalid = 0
                observation, reward, terminated, cut, _ = env.step(chosen)
                reward, ended = float(reward), bool(terminated or cut)
                shown = self._shown(env, observation)
            total += reward
            run.reward(reward * config.discount ** (turn - 1) / self._width)
            run.log_metric("return", total)
            run.log_action("step", {"action": said}, {"reward": reward})
            if ended or invalid == config.most_invalid:
                break
            text = _filled(config.next_prompt, observation=shown, reward=f"{reward:g}", **facts)
            messages.append({"role": "user", "content": text})
        return {"ended": ended, "return": total, "steps": turn}

    def score(self, task: Task, result: Result) -> Score:
        played = isinstance(result.output, dict) and "return" in result.output
        earned = sum(reward.value for reward in result.turn_rewards)
        if not played and result.limit is None:  # nothing that a rollout returns
            return Score(reward=-earned)
        reached = min(max(earned - self._low / self._width, 0.0), 1.0)
        finished = played and result.output["ended"] is True
        return Score(reward=reached - earned, metrics={"finished": float(finished)})

    def demonstration(self, task: Task) -> list[Message]:
        return [{"role": "assistant", "content": said} for said in self._moves(task.public["seed"])]

    def _moves(self, seed: int) -> Iterator[str]:
        config = self.config
        if config.moves:
            yield from itertools.islice(itertools.cycle(config.moves), config.max_turns)
            return
        space = made(self.world, config.options).action_space
        names = self._action_names(space)
        space.seed(seed)
        for _ in range(config.max_turns):
            chosen = space.sample()
            said = names[chosen - space.start] if names else as_text(chosen)
            yield f"[{said}]" if self._answer(space) == "brackets" else said

    def final_answer(self, result: Result) -> str:
        return ""

    def _action_names(self, space: Any) -> Sequence[str]:
        return self.config.actions or (self.known.actions if is_discrete(space) else ())

    def _answer(self, space: Any) -> Answer:
        return self.config.answer or ("brackets" if is_discrete(space) else "whole")

    def _opening(self, prompt: str) -> list[Message]:
        system = self.known.rules if self.config.system is None else self.config.system
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*opening, {"role": "user", "content": prompt}]

    def _shown(self, env: Any, observation: Any) -> str:
        wanted = self.config.observation
        if wanted == "auto":
            picture = env.render_mode == "ansi" and not isinstance(observation, str)
            wanted = "render" if picture else "value"
        if wanted == "value":
            return as_text(observation)
        picture = env.render()
        return plain(picture if isinstance(picture, str) else picture.getvalue())


def gymnasium_environment(world: str) -> type[Environment]:
    spec = _spec(world)
    is_gymnasiums = str(spec.entry_point).startswith("gymnasium.")
    about = {
        "world": world,
        "known": KNOWN.get(spec.name, Known()) if is_gymnasiums else Known(),
        "name": "gymnasium_" + re.sub(r"\W+", "_", spec.id.lower()),
        "__doc__": f"{spec.id} of Gymnasium.",
    }
    return type("Gymnasium", (Gymnasium,), {**about, "__module__": __name__})


def made(world: str, options: Json) -> Any:
    """Makes an environment; it draws pictures in text where it can."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    spec = _spec(world)
    try:
        entry = spec.entry_point
        kind = load_env_creator(entry) if isinstance(entry, str) else entry
        modes = getattr(kind, "metadata", {}).get("render_modes", [])
        drawing = {"render_mode": "ansi"} if "ansi" in modes else {}
        return gymnasium.make(spec, **{**drawing, **options})
    except Exception as error:
        raise ConfigError(
            f"{world} cannot be made: {type(error).__name__}: {str(error)[:300]}",
            hint="--env.options are the arguments of gymnasium.make.",
        ) from error


def _spec(world: str) -> Any:
    import gymnasium

    module, _, name = world.rpartition(":")
    try:
        if module.endswith(".py"):
            path = Path(module)
            if str(path.parent) not in sys.path:
                sys.path.append(str(path.parent))
            importlib.import_module(path.stem)
        elif module:
            importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"The module {module} cannot be imported: {type(error).__name__}: {error}",
            hint="Name its file, gymnasium:my_world.py:ID, or install it: --with.",
        ) from error
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise NotFoundError(f"Gymnasium has no environment {name!r}: {error}") from error


def _filled(template: str, **values: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)
