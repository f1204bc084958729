"""One engine's own controls over HTTP, and several engines asked together.

In: what is wanted of it. Out: its answer, or an `EngineError` that names engine and phase. The
paths are vLLM's, which `envserver.models.local` has too.
"""

from __future__ import annotations

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
)

from .check import PromptCheck

Json = dict[str, Any]
T = TypeVar("T")
_RESET_PAUSE_SECONDS: Final = 0.2
_IN_USE = re.compile(r"^vllm:lora_requests_info\{(?P<labels>[^}]*)\} (?P<at>\S+)$", re.MULTILINE)
_ADAPTERS = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')
_STARTED_WITH: Final = (
    "Start vLLM with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls, for LoRA with --enable-lora"
    " and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1: envserver_clients/weights/README.md has the lines."
)


@dataclass(frozen=True)
class Timeouts:
    """Seconds for each phase, at each engine.

    Args:
        reach: whether it answers at all.
        drain: for the agents' calls to end, at the server; then they are aborted, and asked again.
        pause: for whatever else the engine works on.
        load: new weights from the disk.
        reset: until nothing holds the prefix cache any more.
        check: one forward pass, behind the calls that go on.
        other: everything that takes no time.
    """

    reach: float = 10.0
    drain: float = 120.0
    pause: float = 120.0
    load: float = 900.0
    reset: float = 60.0
    check: float = 120.0
    other: float = 30.0


class EngineControl:
    """The engine at `url` (with or without `/v1`).

    Args:
        api_key: what it was started with as `--api-key`; "": none.
    """

    def __init__(self, url: str, timeouts: Timeouts, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeouts = timeouts
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers)

    def close(self) -> None:
        """Ends its connections."""
        self._http.close()

    def reach(self) -> None:
        """
        Raises:
            EngineUnavailable: it does not answer, or says that it is not well.
        """
        self._ask("GET", "/health", "reach", self._timeouts.reach)

    def pause(self, mode: Literal["abort", "wait", "keep"]) -> None:
        """No token is sampled until `resume`; again is fine."""
        self._post("/pause", "pause", self._timeouts.pause, params={"mode": mode})

    def resume(self) -> None:
        """It samples again; twice is fine."""
        self._post("/resume", "resume", self._timeouts.other)

    def reload(self, method: str, folder: Path) -> None:
        """Takes the weights in `folder`, which it sees under this path."""
        body = {"method": method, "kwargs": {"weights_path": str(folder)}}
        self._post("/collective_rpc", "load", self._timeouts.load, json=body)

    def must_know(self, method: str) -> None:
        """
        Raises:
            EngineRefused: its workers know no such method.
        """
        try:
            self._post("/collective_rpc", "reach", self._timeouts.reach, json={"method": method})
        except EngineUnavailable:
            raise
        except EngineError as error:
            raise EngineRefused(
                "Its workers do not know how to take weights.", hint=_STARTED_WITH
            ) from error

    def reset_prefix_cache(self, *, of_kept_calls: bool) -> None:
        """Forgets what was computed with other weights.

        Args:
            of_kept_calls: of those that are frozen too: they compute it anew when they go on.
        """
        params = {"reset_running_requests": "true"} if of_kept_calls else {}
        give_up = time.monotonic() + self._timeouts.reset
        while True:
            answer = self._post("/reset_prefix_cache", "reset", self._timeouts.reset, params=params)
            if answer.get("success", True):
                return
            if time.monotonic() > give_up:
                raise EngineTimeout(
                    "Calls hold on to its prefix cache.",
                    hint="Something else asks this engine: end it, or let in_flight be keep.",
                )
            time.sleep(_RESET_PAUSE_SECONDS)

    def name_weights(self, name: str) -> None:
        """From now on it says of each token that these weights sampled it."""
        self._post(
            "/update_weight_version", "name", self._timeouts.other, json={"new_version": name}
        )

    def weights(self) -> str:
        """The name of its weights; one that was just started has another than any of ours."""
        return str(self._ask("GET", "/weight_info", "name", self._timeouts.other)["weight_version"])

    def load_adapter(self, name: str, folder: Path) -> None:
        """Loads a LoRA adapter under `name`; what had this name is replaced."""
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        self._post("/v1/load_lora_adapter", "load", self._timeouts.load, json=body)

    def unload_adapter(self, name: str) -> None:
        """Nobody can ask for `name` any more; who has asked is answered still."""
        body = {"lora_name": name}
        self._post("/v1/unload_lora_adapter", "unload", self._timeouts.other, json=body)

    def models(self) -> list[str]:
        """Names that can be asked for, adapters among them."""
        listed = self._ask("GET", "/v1/models", "list", self._timeouts.other)
        return [str(card["id"]) for card in listed["data"]]

    def adapters_in_use(self) -> set[str]:
        """Names of adapters that calls at the engine wait for or sample with, as it counted last;
        engines that do not say keep what their calls need by themselves."""
        response = self._response("GET", "/metrics", "list", self._timeouts.other)
        newest = max(
            _IN_USE.finditer(response.text), key=lambda found: float(found["at"]), default=None
        )
        if newest is None:
            return set()
        names = ",".join(_ADAPTERS.findall(newest["labels"]))
        return {name.strip() for name in names.split(",")} - {""}

    def logprobs(self, check: PromptCheck, model: str | None) -> list[float]:
        """What it computes for the tokens of `check`.

        Args:
            model: the name to ask for; None: the one that it serves first.
        """
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
            raise EngineGarbage(f"It gave no prompt_logprobs: {error!r}.") from error

    def _post(
        self,
        path: str,
        phase: str,
        seconds: float,
        *,
        json: Json | None = None,
        params: Mapping[str, str] | None = None,
    ) -> Json:
        return self._ask("POST", path, phase, seconds, json=json, params=params)

    def _ask(self, method: str, path: str, phase: str, seconds: float, **more: Any) -> Json:
        response = self._response(method, path, phase, seconds, **more)
        if "json" not in response.headers.get("content-type", ""):
            return {}
        try:
            answer = response.json()
        except ValueError as error:
            raise EngineGarbage(f"Its answer to {path} is no JSON: {error}.") from error
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
                hint=f"Allow more by Timeouts({phase}=...), or look at the engine's log.",
            ) from error
        except httpx.TransportError as error:
            raise EngineUnavailable(f"It does not answer: {error!r}.") from error
        if response.is_success:
            return response
        raise self._refusal(path, response)

    def _refusal(self, path: str, response: httpx.Response) -> EngineError:
        status = response.status_code
        said = f"HTTP {status} to {path}: {response.text[:500]}"
        if status == 404 and path != "/v1/completions":
            return EngineRefused(said, hint=_STARTED_WITH, status=status)
        if status < 500:
            return EngineRefused(said, status=status)
        if status == 503 or path == "/health" or not self._is_well():
            return EngineUnavailable(said, hint="It is started again by whoever watches it.")
        return EngineError(said, hint="Its log says more.", status=status)

    def _is_well(self) -> bool:
        try:
            return self._http.get("/health", timeout=self._timeouts.reach).is_success
        except httpx.HTTPError:
            return False


def together(
    engines: Sequence[EngineControl], phase: str, step: Callable[[EngineControl], T]
) -> dict[str, T]:
    """What `step` gives for each engine, by its url; all are asked at once, and waited for.

    Raises:
        EngineError: at least one failed; `detail["engines"]` says which, and one that asking again
            does not mend comes before one that it may.
    """
    done: dict[str, T] = {}
    failed: dict[str, EngineError] = {}
    with ThreadPoolExecutor(len(engines)) as pool:
        for engine, running in [(engine, pool.submit(step, engine)) for engine in engines]:
            try:
                done[engine.url] = running.result()
            except EngineError as error:
                failed[engine.url] = error
    if failed:
        raise _joined(failed, len(engines), phase)
    return done


def _joined(failed: Mapping[str, EngineError], of: int, phase: str) -> EngineError:
    first = min(failed.values(), key=lambda error: isinstance(error, EngineUnavailable))
    which = "; ".join(f"{url}: {error.message}" for url, error in failed.items())
    how_many = "The engine failed" if of == 1 else f"{len(failed)} of {of} engines failed"
    detail = first.detail | {"engines": list(failed), "phase": phase}
    return type(first)(f"{how_many} at {phase}: {which}", hint=first.hint, **detail)


def controls(urls: str | Collection[str], timeouts: Timeouts, api_key: str) -> list[EngineControl]:
    """One for each engine."""
    listed = [urls] if isinstance(urls, str) else list(urls)
    return [EngineControl(url, timeouts, api_key) for url in listed]
