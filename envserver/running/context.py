"""Assembles engine, proxy, workers and scorers as `process` and `serve` need them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from envserver_records.errors import ConfigError, EngineError
from envserver_records.extras import install_command
from envserver_records.waiting import cancel_and_wait

from ..environment import AgentRole, Environment, Isolation
from ..harnesses import harness_of
from ..harnesses.installing import installed_place, version_in
from ..http.proxy_server import serve_proxy
from ..judges.server import JudgeServer
from ..models.engine import Engine, MeasuredEngine, PlayedEngine
from ..proxy.bounds import AttemptBounds
from ..proxy.egress import Egress
from ..proxy.egress_rules import EgressRules
from ..proxy.endpoint import EngineEndpoint
from ..proxy.gate import Gate
from ..proxy.hooks import hooks_of
from ..proxy.server import Proxy
from ..registry import absolute, misspelt
from ..rollout_interface import HarnessSpec
from ..rollouts.agents import Demonstrator, seats_of
from ..rollouts.attempt import StalenessMonitor
from ..rollouts.events import Observer
from ..rollouts.group import RolloutContext
from ..rollouts.policy import UntrainedCeiling, rules_of
from ..rollouts.provenance import made_with
from ..rollouts.rewards import roles_of
from ..rollouts.scorer_process import declared_by
from ..rollouts.scoring import ScorerPool
from ..sandbox.attempt_sandboxes import AttemptSandboxes
from ..sandbox.opening import sandboxes_at
from ..sandbox.outer import PLACE
from ..sandbox.source import SandboxSource
from ..sandbox.wire import NAMESPACE_BACKENDS
from ..settings.config import Settings, WorkersConfig
from ..settings.runs import HarnessConfig
from ..settings.server import TelemetryConfig
from ..telemetry.tracing import NO_TRACER, Tracer
from ..tokens.flags import chosen
from ..tools.serving import services_of
from ..workers.local import LocalPool
from ..workers.messages import WorkerSandbox
from .engines import OwnEndpoint, look_at, make_endpoint, make_engine, own_endpoints, started
from .judging import folder_of, judge_of, scorer_processes
from .prices import rollout_prices
from .sandboxes import sandboxes_of, try_sandbox
from .stopping import beside

if TYPE_CHECKING:
    from ..models.fleet import Fleet


@asynccontextmanager
async def tracer_of(config: TelemetryConfig) -> AsyncIterator[Tracer]:
    """Yields a tracer for `config`; without an endpoint it traces nothing and imports nothing."""
    if config.otlp_endpoint is None:
        yield NO_TRACER
        return
    try:
        from ..telemetry.otel import otlp_tracer
    except ImportError as error:
        raise ConfigError(
            f"telemetry.otlp_endpoint needs OpenTelemetry: {error}.",
            hint=install_command("otel"),
        ) from error
    async with otlp_tracer(
        config.otlp_endpoint,
        service_name=config.service_name,
        sample_ratio=config.sample_ratio,
        texts=config.otlp_texts,
    ) as tracer:
        yield tracer


def isolation_of(config: HarnessConfig, environment: Environment) -> Isolation:
    if not config.is_set:
        return environment.isolation
    if type(environment).harness_task is Environment.harness_task:
        raise ConfigError(
            f"The environment {environment.name!r} cannot be used with --agent.",
            hint="It needs the method `harness_task` (envserver/harnesses/README.md shows one); "
            "without --agent its own agent runs.",
        )
    if config.name is not None:
        harness_of(config.name)
    return "dedicated" if config.url is not None else "sandboxed"


def chosen_harness(
    config: HarnessConfig, service: SandboxSource | None
) -> tuple[HarnessSpec | None, str]:
    """Returns the program of a run, and the folder where it is installed here ("": nowhere that
    sandboxes do not see)."""
    if not config.is_set:
        return None, ""
    if config.url is not None:
        return HarnessSpec(name="url", url=config.url, base_url=config.base_url or ""), ""
    if config.command is not None:
        name, version = "command", ""
        folder = str(config.folder.resolve()) if config.folder is not None else ""
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"--agent.folder: there is no folder {folder!r}.")
    else:
        assert config.name is not None
        harness = harness_of(config.name)
        place = installed_place(harness, config.folder)
        name, version, folder = harness.name, version_in(place), str(place)
    inside = service is not None and service.backend in NAMESPACE_BACKENDS
    spec = HarnessSpec(
        name=name,
        version=version,
        command=config.command or "",
        place=PLACE if folder and inside else folder,
        arguments=config.arguments,
        output_bytes=config.output_kb << 10,
    )
    return spec, folder


def identity_of(config: HarnessConfig) -> dict[str, str]:
    harness, _ = chosen_harness(config, None)
    return {} if harness is None else harness.identity()


_log = structlog.get_logger("envserver.egress")


class SharedEngine(msgspec.Struct, frozen=True):
    """The open engine of all rollouts and how it is called; `fleet`: engines that come and go,
    if any."""

    engine: MeasuredEngine
    endpoint: EngineEndpoint
    model: str
    demonstrator: Demonstrator | None
    tracer: Tracer
    judge: JudgeServer | None = None
    fleet: Fleet | None = None


@contextlib.asynccontextmanager
async def shared_engine(
    settings: Settings,
    *,
    need_engine: bool = True,
    need_exact: bool = False,
    gate: Gate | None = None,
    folder: Path | None = None,
) -> AsyncIterator[SharedEngine]:
    """Opens the engine that `settings` name, and the judge; see `rollout_context`."""
    async with contextlib.AsyncExitStack() as stack:
        openai = await stack.enter_async_context(
            started(settings.model, settings.openai, settings.engine)
        )
        sampling, demonstrator = make_engine(settings, openai)
        _check_exact(sampling.exact, need_exact)
        engine = await stack.enter_async_context(MeasuredEngine(sampling))
        tracer = await stack.enter_async_context(tracer_of(settings.telemetry))
        as_started = settings.model_copy(update={"openai": openai})
        endpoint = make_endpoint(as_started, engine, gate=gate)
        fleet = None
        if sampling.kind == "openai":
            from .engine_fleet import fleet_of

            fleet = await stack.enter_async_context(
                fleet_of(as_started, sampling, endpoint, need_exact=need_exact)
            )
        if await look_at(engine, must_answer=need_engine):
            _check_exact((await endpoint.ready()).exact, need_exact)
        judge = await stack.enter_async_context(
            judge_of(settings.judge, folder or folder_of(settings.store))
        )
        model = await engine.model_name()
        yield SharedEngine(engine, endpoint, model, demonstrator, tracer, judge, fleet)


@contextlib.asynccontextmanager
async def rollout_context(
    settings: Settings,
    environment: Environment,
    env_reference: str,
    *,
    observer: Observer = lambda event: None,
    need_engine: bool = True,
    need_exact: bool = False,
    drop_zero_variance: bool = False,
    for_training: bool = False,
    scores_here: bool = False,
    shared: SharedEngine | None = None,
    played: PlayedEngine | None = None,
    is_up: Callable[[str], None] = lambda part: None,
) -> AsyncIterator[RolloutContext]:
    """Starts everything that running rollouts needs.

    Args:
        for_training: `tokens.max_untrained_share` applies.
        scores_here: the caller scores in this process, so no scorer processes are started.
        is_up: called with "workers" and "scorers" as soon as they are up.
        need_engine: the engine must answer now; if False, its model must be set.
    """
    reference = absolute(env_reference)
    _warn_of_misspelt(type(environment))
    roles = roles_of(environment)
    isolation = isolation_of(settings.agent, environment)
    _check_trained(roles, need_exact)
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(
            sandboxes_of(environment, settings.sandbox, isolation)
        )
        harness, folder = chosen_harness(settings.agent, service)
        address = service.address if service is not None else None
        if shared is None:
            shared = await stack.enter_async_context(
                shared_engine(settings, need_engine=need_engine, need_exact=need_exact)
            )
        engine, endpoint, model = shared.engine, shared.endpoint, shared.model
        own = await stack.enter_async_context(
            own_endpoints(settings, environment, roles, engine, endpoint, must_answer=need_engine)
        )
        if need_engine or need_exact:
            await _check_own(own, roles, need_exact)
        sandboxes = await stack.enter_async_context(sandboxes_at(address)) if address else None
        egress = _egress(settings.workers, environment)
        host = trying = None
        if sandboxes is not None and environment.sandbox is not None:
            trying = await stack.enter_async_context(
                beside("try-sandbox", try_sandbox(sandboxes, environment))
            )
            host = await stack.enter_async_context(
                AttemptSandboxes(
                    sandboxes,
                    environment.sandbox,
                    _sandbox_places(settings),
                    images=environment.sandbox_images,
                    egress=egress,
                )
            )
        services = await stack.enter_async_context(services_of(environment))
        proxy = Proxy(
            engine,
            endpoint=endpoint,
            endpoints={name: endpoint.endpoint for name, endpoint in own.items()},
            played=None if played is None else EngineEndpoint(played, tokens=settings.tokens),
            sandboxes=host,
            services=services,
            hooks=hooks_of(environment),
            egress=egress,
            bounds=AttemptBounds.of(settings.workers),
        )
        stack.push_async_callback(proxy.services.close)
        server = await serve_proxy(proxy, port=settings.agent.port)
        stack.push_async_callback(server.close)
        scorer = ScorerPool(
            reference,
            environment.config.model_dump(mode="json"),
            0 if scores_here else _scorers(settings, shared.judge),
            declared=declared_by(environment) if scores_here else None,
            sandbox_address=address,
            judge=shared.judge,
        )
        scorer_is_up = await stack.enter_async_context(_coming_up(scorer))
        workers = LocalPool(
            settings.workers,
            [reference],
            sandbox=_worker_sandbox(
                settings.workers,
                environment.name,
                isolation,
                service,
                server.port,
                # Engines of JavaScript reserve up to hundreds of GB that they never use.
                {} if harness is None else {"shown": folder, "reserved_mb": 1 << 20},
            ),
            listen=server.serve_worker,
        )
        pool = await stack.enter_async_context(workers)
        is_up("workers")
        await scorer_is_up
        is_up("scorers")
        if trying is not None:
            await trying
        yield RolloutContext(
            environment=environment,
            isolation=isolation,
            harness=harness,
            env_reference=reference,
            engine=engine,
            proxy=proxy,
            proxy_url=f"http://127.0.0.1:{server.port}",
            pool=pool,
            scorer=scorer,
            model=model,
            agents=seats_of(
                environment,
                roles,
                model=model,
                sampling=settings.sampling.model_dump(),
                own_models={name: endpoint.model for name, endpoint in own.items()},
            ),
            sampling=settings.sampling,
            rollouts=settings.rollouts,
            actions=chosen(settings.tokens.train, settings.tokens.mask, settings.tokens.drop),
            keep_calls=settings.tokens.keep_calls,
            need_exact=need_exact,
            rules=rules_of(
                settings.rollouts, environment.config, drop_zero_variance=drop_zero_variance
            ),
            observer=observer,
            staleness=StalenessMonitor(
                settings.rollouts.max_staleness
                if settings.rollouts.stale_rollouts == "cancel"
                else None
            ),
            slots=asyncio.Semaphore(_slots(settings, environment, isolation)),
            demonstrator=shared.demonstrator,
            made_with=await asyncio.to_thread(
                made_with,
                environment,
                settings.sampling,
                settings.tokens,
                harness,
            ),
            ceiling=UntrainedCeiling(
                settings.tokens.max_untrained_share if for_training else 1.0,
                settings.tokens.untrained_window_groups,
            ),
            prices=rollout_prices(
                settings,
                model,
                {name: own[name].model if name in own else None for name in roles},
                shared.judge.config if shared.judge is not None else None,
            ),
            tracer=shared.tracer,
        )


@contextlib.asynccontextmanager
async def played_context(
    settings: Settings,
    environment: Environment,
    env_reference: str,
    engine: Engine,
    model: str,
    judge: JudgeServer | None,
    *,
    demonstrator: Demonstrator | None = None,
    unconstrained: bool = False,
    **options: Any,
) -> AsyncIterator[RolloutContext]:
    """A `rollout_context` in which `engine` answers, instead of the one that `settings` name.
    `unconstrained`: what the run allowed agents to constrain, or not, is allowed."""
    allowed = {"constraints": "all"} if unconstrained else {}
    async with MeasuredEngine(engine) as measured:
        endpoint = EngineEndpoint(measured, tokens=settings.tokens.model_copy(update=allowed))
        shared = SharedEngine(measured, endpoint, model, demonstrator, NO_TRACER, judge)
        async with rollout_context(
            settings, environment, env_reference, shared=shared, **options
        ) as context:
            yield context


@functools.cache
def _warn_of_misspelt(kind: type[Environment]) -> None:
    for problem in misspelt(kind):
        structlog.get_logger("envserver.environment").warning("environment.name", hint=problem)


def _egress(config: WorkersConfig, environment: Environment) -> Egress | None:
    if not environment.egress:
        return None
    _log.info("egress", environment=environment.name, hosts=list(environment.egress))
    return Egress(
        EgressRules(environment.egress),
        max_requests=config.max_egress_requests,
        max_bytes=int(config.max_egress_mb * 1_000_000),
    )


def _worker_sandbox(
    config: WorkersConfig,
    name: str,
    isolation: Isolation,
    service: SandboxSource | None,
    port: int,
    of_harness: Mapping[str, Any],
) -> WorkerSandbox | None:
    if isolation != "sandboxed" or service is None:
        return None
    if service.backend == "docker":
        raise ConfigError(
            f"Agents of {name!r} run in the sandbox themselves; workers cannot run in "
            "the backend docker.",
            hint="Use bubblewrap, namespace or landlock: --sandbox.backend auto.",
        )
    return WorkerSandbox(
        backend=service.backend,
        port=port,
        memory_mb=config.memory_mb,
        disk_mb=config.disk_mb,
        private=service.private,
        **of_harness,
    )


def _check_exact(exact: bool, needed: bool) -> None:
    if needed and not exact:
        raise ConfigError(
            "This engine does not return token ids, so its rollouts cannot be used for RL.",
            hint="Use `process` for text data, or an engine such as vLLM; "
            "`envserver models probe` says what is missing.",
        )


def _check_trained(roles: Mapping[str, AgentRole], needed: bool) -> None:
    if needed and roles and not any(role.trained for role in roles.values()):
        raise ConfigError(
            f"No agent is trained: {', '.join(roles)}.",
            hint="Set --env.agents.NAME.trained true for one, or make data with `process`.",
        )


async def _check_own(
    own: Mapping[str, OwnEndpoint], roles: Mapping[str, AgentRole], need_exact: bool
) -> None:
    for name, endpoint in own.items():
        try:
            ready = await endpoint.endpoint.ready()
        except EngineError:
            continue  # it may come up later; where it is needed now, it has been checked before
        if need_exact and roles[name].trained and not ready.exact:
            raise ConfigError(
                f"The engine of the agent {name!r} gives no token ids: it cannot be trained there.",
                hint=f"--env.agents.{name}.trained false leaves its tokens out.",
            )


@contextlib.asynccontextmanager
async def _coming_up(scorer: ScorerPool) -> AsyncIterator[asyncio.Task[ScorerPool]]:
    starting = asyncio.create_task(scorer.__aenter__())
    try:
        yield starting
    finally:
        await cancel_and_wait(starting)
        if not starting.cancelled() and starting.exception() is None:
            await scorer.__aexit__(None, None, None)


def _sandbox_places(settings: Settings) -> int:
    """One is kept free for each scorer, which would otherwise wait for the agents."""
    return max(1, settings.sandbox.concurrent - settings.rollouts.scorer_processes)


def _slots(settings: Settings, environment: Environment, isolation: Isolation) -> int:
    """A rollout that waits for a worker or a sandbox would use up its own time limit."""
    workers = settings.workers
    pooled = workers.processes * workers.rollouts_per_process
    places = pooled if isolation == "pooled" else workers.dedicated
    room = min(settings.rollouts.max_concurrent, places)
    return room if environment.sandbox is None else min(room, _sandbox_places(settings))


def _scorers(settings: Settings, judge: JudgeServer | None) -> int:
    wanted = settings.rollouts.scorer_processes
    return wanted if judge is None else scorer_processes(wanted, judge.config)
