"""Runs lm-evaluation-harness as a separate process that calls an endpoint in front of the engine.

`<folder>/harness/` has what the harness wrote; each task has a folder with `run.json` and
`samples.jsonl`, as `evaluation.folders` reads them. The engine's key stays in this process; every
call of the harness passes through it and is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from envserver_records.errors import ConfigError, InputError, UsageError
from envserver_records.extras import install_command
from envserver_records.files import replacing_path, storing

from envserver.evaluation.folders import (
    SAMPLES_FILE,
    HarnessRun,
    Harvest,
    RunFile,
    View,
    harvest,
    read_run_file,
)
from envserver.evaluation.report import Counted, Report, Suite
from envserver.export.unified import write_json
from envserver.http.proxy_server import serve_proxy
from envserver.models.engine import Engine, EngineRequest, Json, MeasuredEngine
from envserver.proxy.endpoint import EngineEndpoint
from envserver.proxy.server import Proxy
from envserver.running.engines import SIMULATED, look_at, started
from envserver.running.evaluation_folder import write_report, write_run_file
from envserver.running.prices import pricing_of
from envserver.settings.config import OpenAIConfig

if TYPE_CHECKING:
    from .commands.environments import LmEvalSettings

_CALLS = "calls.json"
_PATHS = {"chat": "chat/completions", "completions": "completions"}
_MODELS = {"chat": "local-chat-completions", "completions": "local-completions"}
_LAST_LINES = 4
_GRACE_SECONDS = 10.0
_UNSAFE = re.compile(r"[^\w+.-]")
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Order:
    """A run of the harness: the settings, and what follows from them."""

    asked: LmEvalSettings
    folder: Path
    python: Path
    counted: Counted = field(default_factory=Counted)

    @property
    def harness(self) -> Path:
        """Folder of the harness's output and of the answers with which a run resumes."""
        name = _UNSAFE.sub("_", "+".join(self.asked.tasks))[:_LONGEST_NAME]
        return self.folder / "harness" / name

    @property
    def settings(self) -> Json:
        """The settings that decide results."""
        names = ("api", "num_fewshot", "limit", "gen_kwargs", "system_instruction")
        facts = {name: getattr(self.asked, name) for name in names}
        return {"harness": {**facts, "args": list(self.asked.args)}}


class Spent(msgspec.Struct):
    """Tokens and seconds of answers, as the engine reports them; seconds are summed."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


class CountingEngine(MeasuredEngine):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.spent = Spent()

    async def post(self, request: EngineRequest) -> Json:
        began = time.perf_counter()
        answer = await super().post(request)
        usage = answer.get("usage") or {}
        self.spent.requests += 1
        self.spent.prompt_tokens += int(usage.get("prompt_tokens") or 0)
        self.spent.completion_tokens += int(usage.get("completion_tokens") or 0)
        self.spent.seconds += time.perf_counter() - began
        return answer


async def check_installed(python: Path) -> None:
    words = ("-c", "import importlib.util as u; raise SystemExit(u.find_spec('lm_eval') is None)")
    try:
        process = await asyncio.create_subprocess_exec(
            str(python),
            *words,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        raise ConfigError(f"--python {python} cannot be run: {error.strerror}.") from error
    if await process.wait():
        raise ConfigError(
            f"lm-evaluation-harness is not installed for {python}.",
            hint=f"{install_command('lm-eval')}, or name a Python that has it: --python PATH.",
        )


async def run_harness(
    order: Order, engine: CountingEngine, *, tell: Callable[[str], object]
) -> list[str]:
    """Runs the harness to its end, files its results and returns the names of its tasks."""
    model = await engine.model_name()
    with _accounts(order.harness / _CALLS, engine.spent) as spent:
        async with _endpoint(engine) as url:
            words = [str(order.python), "-m", "lm_eval", "run", *_words(order, url, model)]
            await _run(words, order.harness / "log.txt", tell)
    found = await asyncio.to_thread(
        harvest, order.harness, metric=order.asked.metric, requests=spent.requests
    )
    documents = sum(harvest.documents for harvest in found)
    before = 0
    for done in found:
        run = HarnessRun(
            task=done.task,
            model=model,
            simulated=order.asked.model == SIMULATED,
            settings=order.settings,
            facts=done.facts,
            prompt_tokens=_share(spent.prompt_tokens, before, done.documents, documents),
            completion_tokens=_share(spent.completion_tokens, before, done.documents, documents),
            seconds=spent.seconds * done.documents / documents,
            documents=done.documents,
            finished_at=time.time(),
        )
        before += done.documents
        _file(order, done, run)
    return [harvest.task for harvest in found]


@contextlib.contextmanager
def _accounts(path: Path, spent: Spent) -> Iterator[Spent]:
    """Adds the counts of earlier runs in `path` to `spent`; writes the totals back on exit."""
    if path.exists():
        try:
            before = msgspec.json.decode(path.read_bytes(), type=Spent)
        except msgspec.DecodeError as error:
            raise InputError(f"{path} cannot be read: {error}.", place=str(path)) from error
        for name in Spent.__struct_fields__:
            setattr(spent, name, getattr(spent, name) + getattr(before, name))
    try:
        yield spent
    finally:
        if spent.requests:
            write_json(path, msgspec.to_builtins(spent))


def _share(total: int, before: int, own: int, everything: int) -> int:
    """Returns the part of a task with `own` of all documents; parts sum up to `total`."""
    return total * (before + own) // everything - total * before // everything


def _file(order: Order, harvest: Harvest, run: HarnessRun) -> None:
    folder = order.folder / harvest.task
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing_path(folder / SAMPLES_FILE, sync=False) as partial:
            shutil.copyfile(harvest.samples, partial)
    write_run_file(folder, RunFile(name=harvest.task, harness=run, counted=order.counted))


def fold_in(folder: Path, tasks: Sequence[str]) -> None:
    """Makes `tasks` parts of the evaluation in `folder`, which may hold others, or none yet."""
    noted = read_run_file(folder) or RunFile()
    parts = list(dict.fromkeys([*noted.parts, *tasks]))
    write_run_file(folder, msgspec.structs.replace(noted, parts=parts))


def _words(order: Order, url: str, model: str) -> list[str]:
    settings = order.asked
    arguments = {
        "model": model,
        "base_url": f"{url}/v1/{_PATHS[settings.api]}",
        "num_concurrent": settings.concurrency,
        "max_retries": 3,
    }
    if settings.api == "chat":
        arguments |= {"tokenized_requests": False}
    elif settings.tokenizer:
        arguments |= {"tokenizer": settings.tokenizer, "tokenizer_backend": "huggingface"}
    else:  # otherwise it looks for the model's name on the hub
        arguments |= {"tokenized_requests": False, "tokenizer_backend": "None"}
    words = ["--model", _MODELS[settings.api]]
    words += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    words += ["--tasks", ",".join(settings.tasks), "--output_path", str(order.harness)]
    words += ["--log_samples", "--use_cache", str(order.harness / "answers")]
    words += ["--apply_chat_template"] if settings.api == "chat" else []
    given = {
        "--num_fewshot": settings.num_fewshot,
        "--limit": None if settings.limit is None else f"{settings.limit:g}",
        "--include_path": settings.include_path,
        "--gen_kwargs": settings.gen_kwargs or None,
        "--system_instruction": settings.system_instruction or None,
    }
    for flag, value in given.items():
        words += [] if value is None else [flag, str(value)]
    return [*words, *settings.args]


@contextlib.asynccontextmanager
async def _endpoint(engine: CountingEngine) -> AsyncIterator[str]:
    proxy = Proxy(engine, endpoint=EngineEndpoint(engine))
    server = await serve_proxy(proxy)
    try:
        yield f"{server.url}/r/{proxy.open_unrecorded()}"
    finally:
        await server.close()


async def _run(words: Sequence[str], log: Path, tell: Callable[[str], object]) -> None:
    """Runs a command whose output goes to `log`; stops it if this process stops."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OPENAI_API_KEY": "none"}
    tell(f"The harness writes to {log}")
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *words, stdout=out, stderr=out, stdin=asyncio.subprocess.DEVNULL, env=environment
        )
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                await _end(process)
    if status:
        last = (await asyncio.to_thread(log.read_text, errors="replace")).splitlines()
        raise ConfigError(
            "lm-evaluation-harness ended with an error:\n" + "\n".join(last[-_LAST_LINES:]),
            hint=f"Its whole output: {log}",
        )


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _GRACE_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


Watch = Callable[[CountingEngine], AbstractAsyncContextManager[None]]
"""Makes a context that is open while the harness runs; the engine has the counts so far."""


async def lm_eval(
    settings: LmEvalSettings, *, tell: Callable[[str], object], watch: Watch
) -> tuple[Path, Report | Suite]:
    if not settings.tasks:
        raise UsageError("Which tasks? For example: envserver lm-eval gsm8k --limit 100.")
    folder = settings.out or Path("runs") / "lm-eval" / time.strftime("%Y%m%d-%H%M%S")
    order = Order(settings, folder, settings.python or Path(sys.executable))
    await asyncio.to_thread(_check_folder, order)
    await check_installed(order.python)
    pricing = pricing_of(settings.prices, settings.model, settings.engine.models_file)
    async with _engine(settings) as engine:
        view = View(pass_at=settings.pass_at, pricing=pricing)
        order = replace(order, counted=view.over(Counted(), await engine.model_name()))
        if settings.overwrite:  # not before the engine answers
            await asyncio.to_thread(shutil.rmtree, order.harness, ignore_errors=True)
        async with watch(engine):
            tasks = await run_harness(order, engine, tell=tell)
    fold_in(folder, tasks)
    return folder, write_report(folder, View())


def _check_folder(order: Order) -> None:
    settings = order.asked
    if settings.resume and settings.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other.")
    if order.harness.exists() and not (settings.resume or settings.overwrite):
        raise ConfigError(
            f"{order.folder} already has {', '.join(settings.tasks)}.",
            hint="Use --resume to continue, or --overwrite to run them again.",
        )


@contextlib.asynccontextmanager
async def _engine(settings: LmEvalSettings) -> AsyncIterator[CountingEngine]:
    async with contextlib.AsyncExitStack() as stack:
        openai = await stack.enter_async_context(
            started(settings.model, settings.openai, settings.engine)
        )
        engine = CountingEngine(_made(settings, openai))
        await stack.enter_async_context(engine)
        await look_at(engine, must_answer=True)
        yield engine


def _made(settings: LmEvalSettings, openai: OpenAIConfig) -> Engine:
    if settings.model == SIMULATED:
        from envserver_local.simulated.engine import SimEngine

        return SimEngine(settings.sim)
    from envserver.models.openai import OpenAIEngine

    return OpenAIEngine(openai)
