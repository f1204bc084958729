"""The work of `envserver verify`: compares delivered groups with what the engine computes now.
Every row is checked by itself. Comparable rows, or a sample of them, are scored again by the
engine. Each row is compared, or counted under a reason, or named in a finding.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any, Final

import msgspec
from envserver_records.errors import ConfigError, EngineError, EngineUnavailable, UsageError
from envserver_records.waiting import cancel_and_wait

from ..models.engine import Engine
from ..rollouts.audit import (
    AuditedRow,
    AuditResult,
    Difference,
    Rescorer,
    Totals,
    audit_row,
    share_of,
)
from ..rollouts.audit import why_not_comparable as why_not
from ..rollouts.stream import aside
from ..settings.config import OpenAIConfig, SimConfig
from .delivered import Delivery, FileSource, Finding, ServerSource, Source
from .engines import SIMULATED, started
from .run_settings import VerifySettings

_MOST_FINDINGS: Final = 100
_MOST_WORST: Final = 10

Progress = Callable[[int, int, float | None], None]
"""Called with the groups read, the rows compared, and the share of the input that was read."""


class Sample(msgspec.Struct, frozen=True):
    """Selects rows to compare: a share of them, a number, or all."""

    share: float = 1.0
    count: int | None = None


def parse_sample(text: str | None) -> Sample:
    """Parses a sample: `1%` and `0.01` are a share, `20` is a number of rows, None is all."""
    if text is None:
        return Sample()
    try:
        if text.isdecimal() and int(text) > 0:
            return Sample(count=int(text))
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1 or text.isdecimal():
        raise ConfigError(
            f"--sample: {text!r} is neither a share (1% or 0.01) nor a number of rows (20)."
        )
    return Sample(share=share)


class Report:
    def __init__(self, tolerance: float, version: int) -> None:
        self.version = version
        self.groups = 0
        self.rows = 0
        self.unsealed = 0
        self.totals = Totals(tolerance)
        self.not_compared: Counter[str] = Counter()
        self.tokens_not_compared: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self._worst: list[tuple[float, int, Difference]] = []

    @property
    def worst(self) -> list[Difference]:
        """The token that differs most in each of the rows that differ most, worst first."""
        return [difference for _, _, difference in sorted(self._worst, reverse=True)]

    @property
    def verdict(self) -> str:
        """`exact`, `within_tolerance`, `wrong`, or `nothing_compared`."""
        if self.kinds:
            return "wrong"
        if not self.totals.rows:
            return "nothing_compared"
        return "exact" if self.totals.exact == self.totals.tokens else "within_tolerance"

    def add_delivery(self, delivery: Delivery) -> None:
        self.groups += 1
        self.rows += delivery.size
        self.unsealed += delivery.unsealed
        self.not_compared.update(delivery.not_compared)
        self.tokens_not_compared.update(delivery.tokens_not_compared)
        for finding in delivery.findings:
            self.add_finding(finding)

    def leave_out(self, row: AuditedRow, reason: str) -> None:
        self.not_compared[reason] += 1
        self.tokens_not_compared[reason] += len(row.trained)

    def add_outcome(self, row: AuditedRow, outcome: AuditResult) -> None:
        if outcome.refused:
            self.add_finding(_about(row, "refused", outcome.refused))
        elif outcome.comparison is None:
            self.leave_out(row, outcome.not_compared)
        else:
            within = self.totals.add(outcome.comparison)
            worst = outcome.comparison.worst()
            if worst.difference:
                self._keep(worst)
            if not within:
                words = (
                    f"token {worst.token} was recorded with the logprob {worst.recorded:.6g}, "
                    f"the engine says {worst.again:.6g}"
                )
                self.add_finding(_about(row, "logprobs_differ", words, worst.position))

    def add_failure(self, row: AuditedRow, error: EngineError) -> None:
        self.add_finding(_about(row, error.kind, str(error)))

    def add_finding(self, finding: Finding) -> None:
        self.kinds[finding.kind] += 1
        if len(self.findings) < _MOST_FINDINGS:
            self.findings.append(finding)

    def facts(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "groups": self.groups,
            "rows": self.rows,
            "groups_without_digest": self.unsealed,
            "policy_version": self.version,
            "compared": self.totals.facts(),
            "not_compared": dict(self.not_compared),
            "tokens_not_compared": dict(self.tokens_not_compared),
            "findings_by_kind": dict(self.kinds),
            "findings": [msgspec.structs.asdict(finding) for finding in self.findings],
            "worst": [msgspec.structs.asdict(difference) for difference in self.worst],
        }

    def _keep(self, difference: Difference) -> None:
        # The count after the size keeps the order of rows that differ equally.
        entry = (abs(difference.difference), -self.totals.rows, difference)
        if len(self._worst) < _MOST_WORST:
            heapq.heappush(self._worst, entry)
        else:
            heapq.heappushpop(self._worst, entry)


def _about(row: AuditedRow, kind: str, message: str, position: int | None = None) -> Finding:
    return Finding(
        kind=kind,
        message=message,
        line=row.line,
        group_id=row.group_id,
        rollout_id=row.rollout_id,
        row=row.number,
        position=position,
    )


async def verify(
    source: Source,
    engine: Engine,
    settings: VerifySettings,
    progress: Progress = lambda groups, rows, share: None,
) -> Report:
    sample, version = parse_sample(settings.sample), settings.policy_version
    if version is None:
        version = await aside(source.newest_version)
    report = Report(settings.tolerance, version)
    rescorer = Rescorer(engine)
    await rescorer.context()  # report an engine that does not answer before reading anything

    def tell(share: float | None = None) -> None:
        progress(report.groups, report.totals.rows, share)

    async def compare(rows: AsyncIterator[AuditedRow]) -> None:
        while True:
            async with taking:
                row = await anext(rows, None)
            if row is None:
                return
            try:
                report.add_outcome(row, await audit_row(rescorer, row))
            except EngineUnavailable:
                raise
            except EngineError as error:
                report.add_failure(row, error)
            tell()

    taking = asyncio.Lock()
    async with aclosing(_chosen(source, report, sample, settings.seed, tell)) as rows:
        workers = [asyncio.create_task(compare(rows)) for _ in range(settings.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            await cancel_and_wait(*workers)
    return report


async def _chosen(
    source: Source, report: Report, sample: Sample, seed: int, tell: Callable[[float | None], None]
) -> AsyncGenerator[AuditedRow]:
    """Yields the rows to compare; counts all others in `report`.
    To sample a number of rows, all comparable rows are read first and those with the lowest shares
    kept, so that the choice does not depend on the order of the rows."""
    kept: list[tuple[float, int, AuditedRow]] = []
    seen = 0
    deliveries = source.deliveries()
    while (delivery := await aside(lambda: next(deliveries, None))) is not None:
        report.add_delivery(delivery)
        tell(delivery.end / source.size if source.size else None)
        for row in delivery.rows:
            seen += 1
            share = share_of(seed, f"{row.group_id or row.line}\0{row.number}")
            if reason := why_not(row, report.version):
                report.leave_out(row, reason)
            elif sample.count is not None:
                heapq.heappush(kept, (-share, seen, row))
                if len(kept) > sample.count:
                    report.leave_out(heapq.heappop(kept)[-1], "not_sampled")
            elif share < sample.share:
                yield row
            else:
                report.leave_out(row, "not_sampled")
    for _, _, row in sorted(kept, key=lambda entry: entry[1]):
        yield row


async def verify_source(
    settings: VerifySettings, on_progress: Progress = lambda groups, rows, share: None
) -> tuple[Report, str]:
    """Also returns the name of the model that scored."""
    parse_sample(settings.sample)  # raises what is wrong with it before anything is opened
    async with AsyncExitStack() as stack:
        source: FileSource | ServerSource
        if settings.source.startswith(("http://", "https://")):
            source = stack.enter_context(ServerSource(settings.source))
        else:
            source = FileSource(Path(settings.source), digests=settings.digests)
        openai = await stack.enter_async_context(
            started(settings.model, settings.openai, settings.engine)
        )
        engine = await stack.enter_async_context(_engine(settings, openai))
        report = await verify(source, engine, settings, on_progress)
        return report, await engine.model_name()


def _engine(settings: VerifySettings, openai: OpenAIConfig) -> Engine:
    if settings.model == SIMULATED:
        from envserver_local.simulated.engine import SimEngine

        return SimEngine(SimConfig(latency_seconds=0))
    from ..models.openai import OpenAIEngine

    if openai.server_type != "vllm":
        raise UsageError("Only an engine that gives prompt_logprobs (vllm) can verify.")
    return OpenAIEngine(openai)
