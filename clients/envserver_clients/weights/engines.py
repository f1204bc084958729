"""Controls one engine over HTTP, or several engines together. The paths are vLLM's;
`envserver_local` has them, too.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import httpx
from envserver_records import (
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    EnvserverError,
    InputError,
)
from envserver_records.http_errors import without_page
from envserver_records.servers import ServersClient
from envserver_records.tasks import Json

#     EnvserverError
#     ├── EngineError              an engine failed; detail: engines (which ones), phase
#     │   ├── EngineUnavailable    it does not answer, or was restarted meanwhile: publish again
#     │   ├── EngineTimeout        a phase exceeded its time limit
#     │   ├── EngineRefused        it was started without a required option; the hint says which
#     │   ├── EngineGarbage        its answer cannot be read
#     │   └── WeightsMismatch      its logprobs differ from the trainer's
#     ├── WeightsNotSaved          the files could not be written; no engine was changed
#     └── ConflictError            the server is already at a higher version

_MOST_TOKENS: Final = 512
"""More tokens prove nothing more, and the agents wait for the forward pass."""


class WeightsMismatch(EngineError):
    """`detail`: version, old_version, engines, difference, tolerance, token (the worst one)."""

    kind = "weights_mismatch"


class WeightsNotSaved(EnvserverError):
    """`detail`: folder, full (whether the disk is full)."""

    kind, status = "weights_not_saved", 507


@dataclass(frozen=True)
class PromptCheck:
    """The logprobs that the engine must compute.

    Args:
        prompt_ids, completion_ids: any text that both can score, such as a row just trained on.
        logprobs: the trainer's logprob of each completion token at temperature 1, with the
            published weights.
        tolerance: maximum difference of one token's logprob. In float32 1e-3 is far above rounding;
            in bfloat16 rounding alone causes about 0.1.

    Raises InputError: there is nothing to compare, or not one logprob for each token.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float]
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if not (self.prompt_ids and self.completion_ids):
            raise InputError("A check needs a prompt and at least one completion token.")
        if len(self.completion_ids) != len(self.logprobs):
            raise InputError(
                f"A check has {len(self.completion_ids)} tokens and {len(self.logprobs)} logprobs."
            )

    @property
    def size(self) -> int:
        """The number of compared tokens, without the last of several: the engine samples one more
        token, and the text may already fill its context."""
        return min(_MOST_TOKENS, max(1, len(self.completion_ids) - 1))

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.completion_ids[: self.size]]

    def widest(self, found: Sequence[float]) -> tuple[float, int]:
        """The largest difference from the engine's logprobs of the completion, and its token's
        index; NaN counts as infinitely far."""
        pairs = zip(self.logprobs[: self.size], found, strict=True)
        far = [abs(own - engines) for own, engines in pairs]
        sized = [math.inf if math.isnan(distance) else distance for distance in far]
        worst = max(sized)
        return worst, sized.index(worst)


def matched(
    check: PromptCheck, found: Sequence[float], what: str, hint: str, version: int, old: int | None
) -> float:
    """The largest difference of the engine's logprobs from the trainer's; `old`: the last correct
    version. Raises WeightsMismatch: it is too large."""
    difference, token = check.widest(found)
    if difference > check.tolerance:
        raise WeightsMismatch(
            f"Its logprobs for {what} differ from the trainer's: "
            f"by {difference:.3g} at token {token}; {check.tolerance:g} is allowed.",
            hint=hint,
            version=version,
            old_version=old,
            difference=difference,
            tolerance=check.tolerance,
            token=token,
        )
    return difference


T = TypeVar("T")
_RESET_PAUSE_SECONDS: Final = 0.2
_IN_USE = re.compile(r"^vllm:lora_requests_info\{(?P<labels>[^}]*)\} (?P<at>\S+)$", re.MULTILINE)
_ADAPTERS = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')
_STARTED_WITH: Final = (
    "Start vLLM with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls, for LoRA with --enable-lora"
    " and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: see envserver_clients/weights/README.md."
)
_STARTED_FOR_TRANSFER: Final = (
    "Start vLLM with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config: see "
    "envserver_clients/weights/README.md."
)
_MARGIN_SECONDS: Final = 10.0
"""The engine's own limit comes first, with its reason."""
CHANGING: Final = "changing"
"""Name of weights between two versions."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds for each phase, per engine.

    Args:
        reach: until the engine answers.
        drain: until the agents' calls end at the server; then they are aborted and repeated.
        pause: until the engine's other work ends.
        load: until the engine has read the new weights from disk.
        reset: until nothing uses the prefix cache.
        check: one forward pass, queued behind running calls.
        other: requests that take no time.
        transfer: until an engine has received one bucket.
    """

    reach: float = 10.0
    drain: float = 120.0
    pause: float = 120.0
    load: float = 900.0
    reset: float = 60.0
    check: float = 120.0
    other: float = 30.0
    transfer: float = 60.0


def root_of(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


class EngineControl:
    """Controls the engine at `url` (with or without `/v1`)."""

    def __init__(self, url: str, timeouts: Timeouts, api_key: str = "") -> None:
        self.url = root_of(url)
        self._timeouts = timeouts
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = ServersClient(self.url, headers=headers)

    def close(self) -> None:
        self._http.close()

    def reach(self) -> None:
        self._ask("GET", "/health", "reach", self._timeouts.reach)

    def pause(self, mode: Literal["abort", "wait", "keep"]) -> None:
        """Stops sampling until `resume`. Idempotent."""
        self._post("/pause", "pause", self._timeouts.pause, params={"mode": mode})

    def resume(self) -> None:
        self._post("/resume", "resume", self._timeouts.other)

    def reload(self, method: str, folder: Path) -> None:
        """Loads the weights in `folder`, a path as the engine sees it."""
        body = {"method": method, "kwargs": {"weights_path": str(folder)}}
        self._post("/collective_rpc", "load", self._timeouts.load, json=body)

    def must_know(self, method: str) -> None:
        """Raises EngineRefused: the engine's workers do not have the method."""
        try:
            self._post("/collective_rpc", "reach", self._timeouts.reach, json={"method": method})
        except EngineUnavailable:
            raise
        except EngineError as error:
            raise EngineRefused("Its workers cannot load weights.", hint=_STARTED_WITH) from error

    def reset_prefix_cache(self, *, of_kept_calls: bool) -> None:
        """Drops what was computed with other weights.

        `of_kept_calls`: also for paused calls, which compute it again when they continue.
        """
        params = {"reset_running_requests": "true"} if of_kept_calls else {}
        give_up = time.monotonic() + self._timeouts.reset
        while True:
            answer = self._post("/reset_prefix_cache", "reset", self._timeouts.reset, params=params)
            if answer.get("success", True):
                return
            if time.monotonic() > give_up:
                raise EngineTimeout(
                    "Running calls use its prefix cache.",
                    hint="Something else uses this engine: stop it, or set in_flight to keep.",
                )
            time.sleep(_RESET_PAUSE_SECONDS)

    def name_weights(self, name: str) -> None:
        """The engine reports the name with each token."""
        self._post(
            "/update_weight_version", "name", self._timeouts.other, json={"new_version": name}
        )

    def weights(self) -> str:
        """The name of its weights; a restarted engine has a name that is not ours."""
        return str(self._ask("GET", "/weight_info", "name", self._timeouts.other)["weight_version"])

    def world_size(self) -> int:
        """The number of the engine's ranks that take weights."""
        return int(self._ask("GET", "/get_world_size", "reach", self._timeouts.reach)["world_size"])

    def init_weight_transfer(self, about: Json) -> None:
        """Connects the engine to a trainer that waits at the address in `about`.

        Raises EngineRefused: it was started without `--weight-transfer-config`.
        """
        path, seconds = "/init_weight_transfer_engine", self._timeouts.transfer + _MARGIN_SECONDS
        try:
            self._post(path, "connect", seconds, json={"init_info": about})
        except EngineError as error:
            if "eight transfer not configured" in error.message:
                raise EngineRefused(error.message, hint=_STARTED_FOR_TRANSFER) from error
            raise

    def start_weight_update(self) -> None:
        """Begins to take weights; ends first what a failed update left half done: until then the
        engine cannot start another one, or would join the old half and the new."""
        if self.weights() == CHANGING:
            try:
                self._finish_weight_update({})
            except EngineError:  # it is not open: it ended with its failure
                self._start_weight_update()
                self._finish_weight_update({})
        self.name_weights(CHANGING)
        self._start_weight_update()

    def update_weights(self, about: Json) -> None:
        """Receives one bucket; returns when it is loaded."""
        seconds = self._timeouts.transfer + _MARGIN_SECONDS
        self._post("/update_weights", "send", seconds, json={"update_info": about})

    def finish_weight_update(self, name: str) -> None:
        self._finish_weight_update({"weight_version": name})

    def _start_weight_update(self) -> None:
        self._post("/start_weight_update", "send", self._timeouts.other)

    def _finish_weight_update(self, body: Json) -> None:
        self._post("/finish_weight_update", "send", self._timeouts.load, json=body)

    def checksums(self) -> dict[str, str]:
        """The SHA-256 of each of its parameters, by the engine's names."""
        body = {"action": "checksum"}
        answer = self._post("/weight_checker", "compare", self._timeouts.load, json=body)
        return {str(name): str(digest) for name, digest in answer.get("checksums", {}).items()}

    def load_adapter(self, name: str, folder: Path) -> None:
        """Replaces an adapter of that name."""
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        self._post("/v1/load_lora_adapter", "load", self._timeouts.load, json=body)

    def unload_adapter(self, name: str) -> None:
        """Removes `name` for new calls; running calls finish."""
        body = {"lora_name": name}
        self._post("/v1/unload_lora_adapter", "unload", self._timeouts.other, json=body)

    def models(self) -> list[str]:
        """The names of its models, including adapters."""
        listed = self._ask("GET", "/v1/models", "list", self._timeouts.other)
        return [str(card["id"]) for card in listed["data"]]

    def adapters_in_use(self) -> set[str]:
        """The adapters that running or waiting calls need, as the engine last reported; engines
        that do not report it keep needed adapters by themselves."""
        response = self._response("GET", "/metrics", "list", self._timeouts.other)
        newest = max(
            _IN_USE.finditer(response.text), key=lambda found: float(found["at"]), default=None
        )
        if newest is None:
            return set()
        names = ",".join(_ADAPTERS.findall(newest["labels"]))
        return {name.strip() for name in names.split(",")} - {""}

    def logprobs(self, check: PromptCheck, model: str | None) -> list[float]:
        """The engine's logprobs for the tokens of `check`; `model` None: the first that it
        serves."""
        body = {
            "model": model or self.models()[0],
            "prompt": check.ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        answer = self._post("/v1/completions", "check", self._timeouts.check, json=body)
        try:
            scored = answer["choices"][0]["prompt_logprobs"][-check.size :]
            ids = check.ids[-check.size :]
            return [
                float(entry[str(token)]["logprob"])
                for token, entry in zip(ids, scored, strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineGarbage(f"It returned no prompt_logprobs: {error!r}.") from error

    def _post(self, path: str, phase: str, seconds: float, **more: Any) -> Json:
        return self._ask("POST", path, phase, seconds, **more)

    def _ask(self, method: str, path: str, phase: str, seconds: float, **more: Any) -> Json:
        response = self._response(method, path, phase, seconds, **more)
        if "json" not in response.headers.get("content-type", ""):
            return {}
        try:
            answer = response.json()
        except ValueError as error:
            raise EngineGarbage(f"Its answer to {path} is not JSON: {error}.") from error
        return answer if isinstance(answer, dict) else {}

    def _response(
        self, method: str, path: str, phase: str, seconds: float, **more: Any
    ) -> httpx.Response:
        timeout = httpx.Timeout(seconds, connect=min(seconds, self._timeouts.reach))
        try:
            response = self._http.request(method, path, timeout=timeout, **more)
        except httpx.ConnectTimeout as error:
            raise EngineUnavailable(f"It does not answer: {error!r}.") from error
        except httpx.TimeoutException as error:
            raise EngineTimeout(
                f"{phase} took longer than {seconds:g} s.",
                hint=f"Allow more with Timeouts({phase}=...), or look at the engine's log.",
            ) from error
        except httpx.TransportError as error:
            raise EngineUnavailable(f"It does not answer: {error!r}.") from error
        if response.is_success:
            return response
        raise self._refusal(path, response)

    def _refusal(self, path: str, response: httpx.Response) -> EngineError:
        status = response.status_code
        said = f"HTTP {status} to {path}: {without_page(response.text)[:500]}"
        if status == 404 and path != "/v1/completions":
            return EngineRefused(said, hint=_STARTED_WITH, status=status)
        if status < 500:
            return EngineRefused(said, status=status)
        if status == 503 or path == "/health" or not self._is_well():
            return EngineUnavailable(said, hint="Its supervisor should restart it.")
        return EngineError(said, hint="See the engine's log.", status=status)

    def _is_well(self) -> bool:
        # vLLM closes a connection on which it failed: a kept one would look like a dead engine.
        try:
            return httpx.get(
                f"{self.url}/health", headers=self._http.headers, timeout=self._timeouts.reach
            ).is_success
        except httpx.HTTPError:
            return False


def together(
    engines: Sequence[EngineControl], phase: str, step: Callable[[EngineControl], T]
) -> dict[str, T]:
    """Runs `step` for all engines at once; returns the results by url.

    Raises EngineError: at least one failed; `detail["engines"]` names them. A permanent failure
    takes precedence over one that a retry may solve.
    """
    done, failed = attempt(engines, step)
    if failed:
        raise joined(failed, len(engines), phase)
    return done


def attempt(
    engines: Sequence[EngineControl], step: Callable[[EngineControl], T]
) -> tuple[dict[str, T], dict[str, EngineError]]:
    """Runs `step` for all engines at once; returns results and failures by url."""
    done: dict[str, T] = {}
    failed: dict[str, EngineError] = {}
    if not engines:
        return done, failed
    with ThreadPoolExecutor(len(engines)) as pool:
        for engine, running in [(engine, pool.submit(step, engine)) for engine in engines]:
            try:
                done[engine.url] = running.result()
            except EngineError as error:
                failed[engine.url] = error
    return done, failed


def joined(failed: Mapping[str, EngineError], of: int, phase: str) -> EngineError:
    first = min(failed.values(), key=lambda error: isinstance(error, EngineUnavailable))
    which = "; ".join(f"{url}: {error.message}" for url, error in failed.items())
    how_many = "The engine failed" if of == 1 else f"{len(failed)} of {of} engines failed"
    detail = first.detail | {"engines": list(failed), "phase": phase}
    return type(first)(f"{how_many} at {phase}: {which}", hint=first.hint, **detail)


def controls(urls: str | Collection[str], timeouts: Timeouts, api_key: str) -> list[EngineControl]:
    listed = [urls] if isinstance(urls, str) else list(urls)
    return [EngineControl(url, timeouts, api_key) for url in listed]
