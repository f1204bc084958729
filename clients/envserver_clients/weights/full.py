"""Transfers all weights of a model to engines that reload them from a folder; or LoRA adapters.

Invariants: no token is sampled between the old weights and the new. A failure before the first
engine is changed leaves everything as it was. A later failure leaves all engines (and the server's
calls) paused, so that nothing is sampled with unknown weights, until `publish` is called again and
succeeds.

    reach    every engine answers                              else: nothing changes
    save     write the files                                   else: nothing changes
    drain    the server holds calls (drain, keep, abort)       else: calls continue as before
    pause    every engine stops sampling                       else: calls continue as before
    load     reload, drop the prefix cache, name the weights   else: all stay paused
    check    resume; the name is still ours, the logprobs fit  else: all are paused again
    publish  the server continues with the new version
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from envserver_records import EngineError, EngineUnavailable

from .engines import EngineControl, PromptCheck, matched, together
from .push import FolderPush, InFlight, Phases, Published, Save

log = logging.getLogger(__name__)

PAUSE_MODES: Final[dict[InFlight, Literal["wait", "keep", "abort"]]] = {
    "drain": "wait",
    "keep": "keep",
    "abort": "abort",
}
_FILES: Final = ("config.json", "*.safetensors")


@dataclass(frozen=True)
class _Given:
    version: int
    folder: Path
    check: PromptCheck | None

    @property
    def name(self) -> str:
        return weights_name(self.version)


class _Full(FolderPush):
    """See `FolderPush` for the arguments.

    `in_flight`: what happens to running calls: "drain" (they end first), "keep" (they continue with
    the new weights; each token has its version if the server works with tokens), "abort" (they are
    repeated).
    """

    method: ClassVar[str]
    probe: ClassVar[str] = ""
    """A method that exists where `method` does; "": every engine has `method`."""

    def __init__(
        self,
        engine_url: str | Sequence[str],
        folder: Path,
        *,
        in_flight: InFlight = "drain",
        **settings: Any,
    ) -> None:
        super().__init__(engine_url, folder, **settings)
        self._in_flight: InFlight = in_flight
        self._given: _Given | None = None
        self._old: int | None = None
        self._agreed = False
        """Whether all engines and the server certainly have the same version."""

    def publish(self, version: int, save: Save, check: PromptCheck | None = None) -> Published:
        with self._lock:
            phases = Phases()
            folder = self._saved(version, save, _FILES, phases, self._reach)
            given = _Given(version, folder, check)
            self._stand_still(phases)
            found = self._give(given, phases)
            with phases.phase("publish"):
                if self._server is not None:
                    self._server.resume_calls(version)
                self._agreed = True
            kept = [saved for saved in self._folders.versions() if saved <= version][-self._keep :]
            self._folders.keep(kept)
            return self._published(version, found, phases, folder=folder)

    def _to_restore(self) -> Sequence[EngineControl]:
        return self._engines if self._given is not None and self._agreed else ()

    def _mend(self, engine: EngineControl) -> bool:
        given = self._given
        if given is None or engine.weights() == given.name:
            return False
        log.warning("%s lost version %d", engine.url, given.version)
        self._give_anew(engine, given)
        return True

    def _reach(self, engine: EngineControl) -> None:
        engine.weights()
        if self.probe:
            engine.must_know(self.probe)

    def _give_anew(self, engine: EngineControl, given: _Given) -> None:
        engine.pause("abort")
        _load(engine, self.method, self._seen(given.folder), given.name, kept=False)
        engine.resume()
        try:
            checked(engine, given.version, given.check, old=self._old)
        except EngineError:
            engine.pause("abort")
            raise

    def _stand_still(self, phases: Phases) -> None:
        with phases.phase("drain"):
            self._hold_calls(self._in_flight)
        with phases.phase("pause"):
            mode = PAUSE_MODES[self._in_flight]
            try:
                together(self._engines, "pause", lambda engine: engine.pause(mode))
            except BaseException:
                if self._agreed:
                    self._quietly("resume", EngineControl.resume)
                    if self._server is not None:
                        self._server.resume_calls()
                raise

    def _give(self, given: _Given, phases: Phases) -> dict[str, float | None]:
        """Loads the weights into the paused engines, resumes and checks them; returns the
        difference of each engine."""
        self._agreed = False
        seen, kept = self._seen(given.folder), self._in_flight == "keep"
        try:
            with phases.phase("load"):
                together(
                    self._engines,
                    "load",
                    lambda engine: _load(engine, self.method, seen, given.name, kept=kept),
                )
            with phases.phase("check"):
                together(self._engines, "resume", EngineControl.resume)
                found = together(
                    self._engines,
                    "check",
                    lambda engine: checked(engine, given.version, given.check, old=self._old),
                )
        except BaseException:
            # Kept calls must not continue: what they sampled meanwhile is marked as broken.
            self._quietly("pause", lambda engine: engine.pause("abort"))
            raise
        self._given, self._old = given, given.version
        return found


class LocalFull(_Full):
    """Transfers weights to `python -m envserver_local`."""

    method = "reload_weights"


class VllmFull(_Full):
    """Transfers weights to vLLM with our worker extension (`envserver.models.vllm_extension`).

    On a CPU vLLM's own reload does not change the output layer of models with tied embeddings.
    """

    method = "envserver_reload"
    probe = "envserver_can_reload"


def _load(engine: EngineControl, method: str, folder: Path, name: str, *, kept: bool) -> None:
    engine.reload(method, folder)
    engine.reset_prefix_cache(of_kept_calls=kept)
    engine.name_weights(name)


def checked(
    engine: EngineControl, version: int, check: PromptCheck | None, *, old: int | None
) -> float | None:
    """The largest difference of the engine's logprobs from the trainer's; None: no check.

    `old`: the last correct version. Raises EngineUnavailable: it was restarted meanwhile, with its
    initial weights. WeightsMismatch: they differ too much.
    """
    scored = None if check is None else engine.logprobs(check, None)
    wanted = weights_name(version)
    if (name := engine.weights()) != wanted:
        raise EngineUnavailable(
            f"It has the weights {name!r}, not {wanted!r}: it was restarted meanwhile.",
            hint="Publish again.",
        )
    if check is None or scored is None:
        return None
    hint = (
        f"It is paused; the last correct version is {'none' if old is None else old}. "
        "Compare its dtype and model with the trainer's (see "
        "envserver_clients/weights/README.md), then publish again; to continue without, "
        "POST /resume to the engine."
    )
    return matched(check, scored, f"version {version}", hint, version, old)


def weights_name(version: int) -> str:
    """The name that engines have for the weights of `version`."""
    return f"version-{version}"


_ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


class Lora(FolderPush):
    """Transfers adapters to vLLM with `--enable-lora`, or to the local engine; see `FolderPush`.

    Each version is a separate model, such as `policy@17`. Nothing is paused: the server uses the
    new name as soon as it knows the version, and running calls finish with the adapter that they
    began with. Invariants: a name means one adapter; adapters that calls need, or may ask for, stay
    loaded and keep their files.

    Args:
        name: the model name before the version. Start the server with
            `--openai.model_name 'policy@{version}'`.
        keep: number of last versions that stay loaded, so that calls which waited long before they
            were sent still find their adapter.
    """

    def __init__(
        self,
        engine_url: str | Sequence[str],
        folder: Path,
        name: str = "policy",
        *,
        keep: int = 4,
        **settings: Any,
    ) -> None:
        super().__init__(engine_url, folder, keep=keep, **settings)
        self._name = name
        self._named = re.compile(rf"{re.escape(name)}@(\d+)")
        self._loaded: dict[int, Path] = {}
        """The folders of the adapters that every engine should have, by version."""

    def publish(self, version: int, save: Save, check: PromptCheck | None = None) -> Published:
        with self._lock:
            phases = Phases()
            folder = self._saved(version, save, _ADAPTER_FILES, phases, EngineControl.reach)
            try:
                with phases.phase("load"):
                    together(
                        self._engines, "load", lambda engine: self._load(engine, version, folder)
                    )
                with phases.phase("check"):
                    found = together(
                        self._engines, "check", lambda engine: self._checked(engine, version, check)
                    )
            except BaseException:
                self._take_back(version)
                raise
            self._loaded[version] = folder
            with phases.phase("publish"):
                if self._server is not None:
                    self._server.publish_policy_version(version)
            with phases.phase("unload"):
                self._unload_old(version)
            model = self._model(version)
            return self._published(version, found, phases, model=model, folder=folder)

    def _mend(self, engine: EngineControl) -> bool:
        there = set(engine.models())
        lost = [loaded for loaded in self._loaded if self._model(loaded) not in there]
        for version in reversed(lost):  # the current version first
            self._load(engine, version, self._loaded[version])
        if lost:
            log.warning("%s lost versions %s; they are loaded again", engine.url, lost)
        return bool(lost)

    def _model(self, version: int) -> str:
        return f"{self._name}@{version}"

    def _load(self, engine: EngineControl, version: int, folder: Path) -> None:
        engine.load_adapter(self._model(version), self._seen(folder))

    def _checked(
        self, engine: EngineControl, version: int, check: PromptCheck | None
    ) -> float | None:
        if check is None:
            return None
        old = max((loaded for loaded in self._loaded if loaded != version), default=None)
        hint = (
            f"It is not published; {'nothing' if old is None else self._model(old)} is "
            "served as before. Compare the engine's base model and dtype with the trainer's, "
            "and lora_alpha, rank and layers with the engine's."
        )
        scored = engine.logprobs(check, self._model(version))
        return matched(check, scored, self._model(version), hint, version, old)

    def _take_back(self, version: int) -> None:
        """Unloads a version that was not published; restores one that was published before."""
        before = self._loaded.get(version)

        def back(engine: EngineControl) -> None:
            if before is not None:
                self._load(engine, version, before)
            elif self._model(version) in engine.models():
                engine.unload_adapter(self._model(version))

        self._quietly(f"take {self._model(version)} back", back)

    def _unload_old(self, version: int) -> None:
        kept = set(sorted(loaded for loaded in self._loaded if loaded <= version)[-self._keep :])
        needed = set(kept)
        try:
            for engine in self._engines:
                needed |= self._unload_from(engine, kept)
        except EngineError as error:
            # An engine may still need any of the files.
            log.warning("old adapters stay until the next version: %s", error)
            return
        self._loaded = {loaded: path for loaded, path in self._loaded.items() if loaded in needed}
        self._folders.keep(needed)

    def _unload_from(self, engine: EngineControl, kept: set[int]) -> set[int]:
        """Unloads adapters that are not in `kept` and that no call needs; returns those in use."""
        there = {int(found[1]) for found in map(self._named.fullmatch, engine.models()) if found}
        used = engine.adapters_in_use()
        busy = {known for known in there | set(self._loaded) if self._model(known) in used}
        for version in sorted(there - kept - busy):
            engine.unload_adapter(self._model(version))
        return busy
