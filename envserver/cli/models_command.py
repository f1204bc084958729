"""`envserver models WORD`: lists, starts, makes and probes models and engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import orjson
from envserver_records.errors import EngineError, UsageError
from pydantic import Field, model_validator

from ..settings.config import (
    EngineConfig,
    EnvironmentSettings,
    Logged,
    LogLevel,
    OpenAIConfig,
    SandboxConfig,
    SimConfig,
    TokensConfig,
)
from ..settings.section import Count, Port, PositiveShare, Section
from ..settings.server import LoopbackHost
from ..telemetry.redaction import printable
from . import lean_imports
from .command_line import CommandSpec, say

if TYPE_CHECKING:
    from envserver_local.simulated.policy import Solver
    from envserver_local.tiny.from_experts import TinyPlan
    from rich.progress import Progress

    from ..environment import Environment
    from ..models.catalogue import ModelEntry
    from ..models.probe import ProbeResult


class ListSettings(Section):
    models_file: Path = EngineConfig().models_file
    """YAML file that names the models."""
    as_json: bool = False
    """Print JSON instead of a table."""


LIST = CommandSpec(
    "models list", "Lists the named models, and how each is served and sampled.", ListSettings
)


def run_list(argv: list[str]) -> int:
    with lean_imports():
        from ..models.catalogue import read_catalogue
        from .console import Console, show_json, table

    settings = LIST.read(argv)
    entries = list(read_catalogue(settings.models_file).values())
    if settings.as_json:
        show_json([entry.model_dump(mode="json", exclude_none=True) for entry in entries])
    elif entries:
        header = ("name, files", "by", "dtype", "tokens", "temp")
        Console().print(table(header, map(_row, entries), padding=(0, 1, 0, 0)))
    if not entries:
        say(f"No models: {settings.models_file} lists none.")
    return 0 if entries else 1


def _row(entry: ModelEntry) -> tuple[str, ...]:
    values = [entry.sampling.get(name) for name in ("max_tokens", "temperature")]
    sampling = ["" if value is None else f"{value:g}" for value in values]
    dtype = f"{entry.dtype}{', 4 bit' if entry.load_in_4bit else ''}"
    served = f" as {entry.served_name}" if entry.served_name else ""
    return (f"{entry.name}{served}\n  {entry.files}", entry.backend, dtype, *sampling)


_START = """Starts an engine for a model: vLLM if it is installed and starts, else the local
engine, and says why. Prints the address when the engine is ready, restarts the engine when it
dies, and stops it on exit. NAME is a name in models.yaml, a folder, or a name on the hub."""


class StartSettings(Logged):
    name: str = ""
    """Name of the model. Can be given as the first argument."""
    engine: EngineConfig = EngineConfig()


START = CommandSpec(
    "models start",
    _START,
    StartSettings,
    usage="NAME",
    arguments=("name",),
    aliases={name: f"engine.{name}" for name in EngineConfig.model_fields},
    frequent=(
        *("name", "engine.backend", "engine.port", "engine.vllm_args", "engine.local_args"),
        *("engine.models_file", "engine.start_seconds", "engine.log"),
    ),
)

PORT = 9001


def run_start(argv: list[str]) -> int:
    with lean_imports():
        from .loop import run_loop, show_logs

    settings = START.read(argv, defaults={"engine": {"port": PORT}})
    if not settings.name:
        raise UsageError(
            "Give a model: envserver models start NAME",
            hint="`envserver models list` shows the names.",
        )
    show_logs(settings)
    run_loop(_start(settings))
    return 0


async def _start(settings: StartSettings) -> None:
    from ..models.catalogue import find_model, read_catalogue
    from ..models.manager import running_engine

    config = settings.engine
    entry = find_model(settings.name, read_catalogue(config.models_file), config.models_file)
    async with running_engine(entry, config, tell=say) as engine:
        print(engine.base_url, flush=True)
        await engine.until_lost()


_TINY = """Trains a language model of a million parameters that adds and subtracts numbers up to 9
and is sometimes right, with or without tools: a starting point from which reinforcement learning
shows an effect on a laptop. The same settings give the same weights on one machine."""


class TinySettings(Section):
    folder: Path = Path()
    """Folder for the model. Can be given as the first argument."""
    tasks: Literal["sums", "many", "half_sort", "half_tool"] = "sums"
    """sums: up to 9, 155 problems. many: tens of thousands, to show that what is learned
    generalises: sorting five digits with one answer, sums up to 99 with a calculator.
    half_sort, half_tool: one of these two, from right answers only, ended early."""
    seed: int = 0
    """Seed for the experts, the initial weights and the training order."""
    steps: int | None = Field(default=None, ge=2)
    """Optimizer steps; fewer give a weaker model. Default: 500 (sums), 600 (many), 38 (half_sort),
    190 (half_tool)."""
    groups: Count | None = None
    """Groups of expert rollouts for each kind of tasks. Default: 124 groups of eight (sums), 1500
    of two (many), of one (half_sort, half_tool)."""
    solve_probability: PositiveShare | None = None
    """Fraction of rollouts that the expert solves, and about what the trained model solves.
    Default: 0.25 (sums), 0.35 (many), 1 (half_sort, half_tool)."""
    threads: Count = 1
    """Torch threads; another number gives other weights. More help only on an idle machine."""
    overwrite: bool = False
    """Replace an existing tiny model."""


TINY = CommandSpec("models tiny", _TINY, TinySettings, usage="FOLDER", arguments=("folder",))


def run_tiny(argv: list[str]) -> int:
    with lean_imports():
        from envserver_local.tiny.from_experts import (
            RECIPES,
            TinyPlan,
            check_folder,
            make_from_experts,
        )

        from .console import Console, count_bars
        from .loop import run_loop

    settings = TINY.read(argv)
    if settings.folder == Path():
        raise UsageError("Give a folder: envserver models tiny FOLDER")
    check_folder(settings.folder, overwrite=settings.overwrite)
    recipe = RECIPES[settings.tasks]
    plan = TinyPlan(
        tasks=settings.tasks,
        seed=settings.seed,
        steps=settings.steps or recipe.steps,
        groups=settings.groups or recipe.groups,
        solve_probability=settings.solve_probability or recipe.solve_probability,
        threads=settings.threads,
    )
    with count_bars(Console(stderr=True), "{task.fields[note]}", transient=False) as bars:
        view = _TinyView(bars, plan)
        run_loop(make_from_experts(settings.folder, plan, view, overwrite=settings.overwrite))
    print(settings.folder)
    return 0


class _TinyView:
    def __init__(self, bars: Progress, plan: TinyPlan) -> None:
        from envserver_local.tiny.from_experts import RECIPES

        self._bars = bars
        self._experts = {
            mode: bars.add_task(f"experts, {mode}", total=plan.groups, visible=False, note="")
            for mode in RECIPES[plan.tasks].flags
        }
        self._training = bars.add_task("training", total=plan.steps, visible=False, note="")

    def experts(self, mode: str, groups: int) -> None:
        self._bars.update(self._experts[mode], completed=groups, visible=True)

    def training(self, step: int, loss: float | None) -> None:
        note = "loading torch" if loss is None else f"loss {loss:.3f}"
        self._bars.update(self._training, completed=step, visible=True, note=note)


_SIM = """Serves the simulated engine as an OpenAI-compatible server. It is not a language
model: it answers with correct or spoiled solutions of the tasks of --env, and random text without
--env."""


class SimSettings(EnvironmentSettings):
    host: LoopbackHost = "127.0.0.1"
    """Address to listen on; only loopback addresses."""
    port: Port = 9001
    """Port; 0 chooses a free port."""
    sim: SimConfig = SimConfig()
    sandbox: SandboxConfig = SandboxConfig()


SIM = CommandSpec(
    "models sim",
    _SIM,
    SimSettings,
    usage="[--env NAME]",
    frequent=(
        *("environment", "host", "port", "sim.solve_probability", "sim.openers"),
        *("sim.latency_seconds", "sim.seed", "log_level"),
    ),
)


def run_sim(argv: list[str]) -> int:
    with lean_imports():
        from .loop import run_loop, show_logs

    settings = SIM.read(argv)
    show_logs(settings)
    solver = _solver(settings)
    run_loop(_serve_sim(settings, solver))
    return 0


def _solver(settings: SimSettings) -> Solver | None:
    from ..registry import find
    from ..running.mix import RunSpec
    from ..running.simulated_server import demonstration_solver
    from .loop import run_loop

    if settings.environment is None:
        return None
    spec = RunSpec(settings, settings.environment, find(settings.environment))
    environment = spec.make_environment()
    if environment.sandbox is None:  # tasks may be slow, and a thread cannot be interrupted
        return demonstration_solver(environment, settings.env.split)
    return run_loop(_with_sandboxes(environment, settings))


async def _with_sandboxes(environment: Environment, settings: SimSettings) -> Solver:
    import asyncio

    from ..running.sandboxes import sandboxes_of
    from ..running.simulated_server import demonstration_solver

    # Only its tasks are read: no worker needs a sandbox.
    async with sandboxes_of(environment, settings.sandbox, "pooled"):
        return await asyncio.to_thread(demonstration_solver, environment, settings.env.split)


async def _serve_sim(settings: SimSettings, solver: Solver | None) -> None:
    from envserver_local.simulated.server import serve_sim

    from .loop import stopped

    def listening(url: str) -> None:
        say(f"Simulated engine (no language model) at {url}")

    place = settings.host, settings.port
    await serve_sim(settings.sim, *place, solver, listening=listening, stop=stopped())


_PROBE = """Sends about a dozen tiny requests to an engine and shows what it can do: how exactly
its tokens can be recorded, what is missing, and how to fix it. Several addresses (separated by
commas) are probed one by one, and their differences are shown."""


class ProbeSettings(Logged):
    url: list[str] = Field(default_factory=list)
    """Addresses of engines, with or without `http://`; unset: those of openai.base_url."""
    log_level: LogLevel = "error"
    as_json: bool = False
    """Print JSON instead of a table."""
    openai: OpenAIConfig = OpenAIConfig()
    tokens: TokensConfig = TokensConfig()

    @model_validator(mode="before")
    @classmethod
    def _addresses(cls, values: dict[str, Any]) -> dict[str, Any]:
        urls = [url.strip() for url in ",".join(values.get("url") or []).split(",") if url.strip()]
        if not urls:
            return values
        whole = [url if "://" in url else f"http://{url}" for url in urls]
        return {**values, "openai": {**values.get("openai", {}), "base_url": whole}}


PROBE = CommandSpec("models probe", _PROBE, ProbeSettings, usage="URL...", arguments=("url",))

_TRIES = 2


def run_probe(argv: list[str]) -> int:
    with lean_imports():
        from .loop import run_loop, show_logs

    settings = PROBE.read(argv)
    show_logs(settings)
    return run_loop(_probe_all(settings))


async def _probe_all(settings: ProbeSettings) -> int:
    import asyncio

    urls = settings.openai.base_urls
    outcomes = await asyncio.gather(
        *(_probe(url, settings) for url in urls), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):
            raise outcome
    probed = [outcome for outcome in outcomes if isinstance(outcome, ProbedEngine)]
    show = print_json if settings.as_json else print_table
    show(probed, differences(probed))
    for url, outcome in zip(urls, outcomes, strict=True):
        if isinstance(outcome, EngineError):
            say(printable(f"envserver: {url}: {outcome}", keep="\n"))
    return 0 if len(probed) == len(urls) else 1


async def _probe(url: str, settings: ProbeSettings) -> ProbedEngine:
    import asyncio

    from ..models.openai import OpenAIEngine
    from ..models.probe import probe
    from ..proxy.endpoint import capabilities_of

    config = settings.openai.model_copy(update={"base_url": url})
    async with OpenAIEngine(config, tries=_TRIES) as engine:
        model = await engine.model_name()
        probe_result = await probe(engine, wanted=config.mode, model=model)
    capabilities = await asyncio.to_thread(
        capabilities_of, probe_result, settings.tokens, config.default_template_kwargs
    )
    return ProbedEngine(
        url=url,
        probe_result=probe_result,
        tokenizer=capabilities.folder,
        template_kwargs=capabilities.format.defaults if capabilities.format else {},
        not_stitched=capabilities.why_not or None,
    )


_MODES = {
    "tokens": "token ids in, token ids out",
    "completions": "token ids in and out by /v1/completions, messages by chat",
    "chat": "messages in, token ids out: each call is a separate prompt",
    "opaque": "messages in and out, no token ids: text only, cannot be used for RL",
}
_LOGPROBS = {
    "raw": "raw: from the model, before temperature",
    "processed": "processed: after temperature and other sampling settings",
    "unknown": "unknown whether raw or processed",
}
_BETTER = {
    "tokens": "Mode tokens",
    "completions": "Mode completions",
    "chat": "Mode chat",
    "tools": "Tool calls",
    "pausable": "Pausing",
}


class ProbedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """The probe result of one address. `template_kwargs`: variables that the engine gives to every
    chat template, configured or detected; `not_stitched`: why conversations cannot be continued
    from recorded tokens."""

    url: str
    probe_result: ProbeResult
    tokenizer: Path | None
    template_kwargs: dict[str, Any]
    not_stitched: str | None


def differences(probed: Sequence[ProbedEngine]) -> list[str]:
    lines = []
    facts = [_facts(engine) for engine in probed]
    for name in facts[0] if facts else ():
        values = [_short(fact[name]) for fact in facts]
        if len(set(values)) > 1:
            addresses = [
                f"{value} at {engine.url}" for value, engine in zip(values, probed, strict=True)
            ]
            lines.append(f"{name}: {', '.join(addresses)}")
    return lines


def _facts(probed: ProbedEngine) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(probed.probe_result)
    del facts["reasons"]
    echoes = facts.pop("echoes")
    facts["prompts"] = f"{[len(echo['prompt_ids']) for echo in echoes]} tokens"
    return facts


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value in (None, "") else str(value)


def print_json(probed: Sequence[ProbedEngine], different: Sequence[str]) -> None:
    from .console import show_json

    engines = [
        {
            "url": engine.url,
            **msgspec.to_builtins(engine.probe_result),
            "tokenizer": str(engine.tokenizer) if engine.tokenizer else None,
            "template_kwargs": engine.template_kwargs,
            "stitching": engine.not_stitched is None,
            "not_stitched": engine.not_stitched,
        }
        for engine in probed
    ]
    show_json({"engines": engines, "differences": list(different)})


def print_table(probed: Sequence[ProbedEngine], different: Sequence[str]) -> None:
    from rich.table import Table

    from .console import Console

    console = Console(highlight=False, markup=False)

    def show_list(title: str, lines: Sequence[str], style: str = "bold yellow") -> None:
        if lines:
            console.say(title, style=style)
            show_grid([("  -", line) for line in lines], gap=1)

    def show_grid(rows: Iterable[tuple[str, str]], gap: int, style: str | None = None) -> None:
        grid = Table.grid(padding=(0, gap))
        grid.add_column(style=style, no_wrap=True)
        grid.add_column(overflow="fold")
        for row in rows:
            grid.add_row(*row)
        console.print(grid)

    for engine in probed:
        console.say(engine.url, style="bold")
        show_grid(((f"  {name}", value) for name, value in _rows(engine)), gap=2, style="dim")
        show_list("To improve this:", list(_better(engine)))
        console.print()
    show_list("THESE REPLICAS DIFFER:", different, style="bold red")


def _rows(probed: ProbedEngine) -> Iterator[tuple[str, str]]:
    found = probed.probe_result
    root = f" (from {found.root})" if found.root and found.root != found.model else ""
    context = f"{found.max_model_len} tokens" if found.max_model_len else "unknown"
    yield "server", found.server or "unknown"
    yield "model", f"{found.model}{root}"
    yield "context", context
    yield "mode", f"{found.mode}: {_MODES[found.mode]}"
    yield "tool calls", _short(found.tools)
    yield "reasoning", "parsed by the engine" if found.reasoning_parser else "not parsed"
    yield "logprobs", _LOGPROBS[found.logprobs]
    yield "weight versions", "for each token" if found.weight_versions else "not reported"
    yield "pause, resume", _short(found.pausable)
    yield "metrics", _short(found.metrics)
    yield "tokenizer", str(probed.tokenizer or "not found")
    if probed.template_kwargs:
        yield "template variables", orjson.dumps(probed.template_kwargs).decode()
    with_tools = ", also with tools" if found.tools else ""
    stitching = f"yes: prompts rendered here match the engine's{with_tools}"
    yield "stitching", stitching if probed.not_stitched is None else f"no: {probed.not_stitched}"


def _better(probed: ProbedEngine) -> Iterator[str]:
    reasons = probed.probe_result.reasons
    for reason in dict.fromkeys(reasons.values()):
        names = [_BETTER[name] for name, why in reasons.items() if why == reason]
        yield f"{', '.join(names)}: {reason}"
