"""LoRA adapters: each version is a model of its own, `policy@17`, beside those before it.

In: a version and how to save its adapter. Out: engines that answer to its name. Nothing is paused:
the server asks for the new name from the moment that it knows of the version, and calls that are at
the engine go on with the adapter that they began with. What holds: a name means one adapter; an
adapter that calls need, or may ask for, is neither unloaded nor its files removed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from envserver_records import EngineError

from .check import PromptCheck
from .engines import EngineControl, together
from .errors import WeightsMismatch
from .folders import Save
from .push import Phases, Published, PushBase

log = logging.getLogger(__name__)

_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


class Lora(PushBase):
    """To vLLM with `--enable-lora`, or to the local engine; see `WeightPush` and `PushBase`.

    Args:
        name: what stands before the version. The server is started with
            `--openai.model_name 'policy@{version}'`.
        keep: so many of the last versions stay loaded, so that a call which waited long before it
            was sent still finds the one that it asks for.
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
        """What every engine should have, by version."""

    def publish(self, version: int, save: Save, check: PromptCheck | None = None) -> Published:
        """See `WeightPush`."""
        with self._lock:
            phases = Phases()
            with phases.phase("reach"):
                self._server_takes(version)
                together(self._engines, "reach", EngineControl.reach)
            with phases.phase("save"):
                folder = self._folders.save(version, save, _FILES)
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
            differences = [one for one in found.values() if one is not None]
            return Published(
                version,
                self._model(version),
                folder,
                tuple(engine.url for engine in self._engines),
                max(differences, default=None),
                phases.seconds,
            )

    def restore(self) -> list[str]:
        """See `WeightPush`."""
        with self._lock:
            mended = []
            for engine in self._engines:
                with suppress(EngineError):
                    there = set(engine.models())
                    lost = [one for one in self._loaded if self._model(one) not in there]
                    for version in reversed(lost):  # what is asked for now comes first
                        self._load(engine, version, self._loaded[version])
                    if lost:
                        log.warning("%s lost versions %s and has them again", engine.url, lost)
                        mended.append(engine.url)
            return mended

    def _model(self, version: int) -> str:
        return f"{self._name}@{version}"

    def _load(self, engine: EngineControl, version: int, folder: Path) -> None:
        engine.load_adapter(self._model(version), self._seen(folder))

    def _checked(
        self, engine: EngineControl, version: int, check: PromptCheck | None
    ) -> float | None:
        if check is None:
            return None
        difference, token = check.widest(engine.logprobs(check, self._model(version)))
        if difference > check.tolerance:
            old = max((one for one in self._loaded if one != version), default=None)
            raise WeightsMismatch(
                f"It computes other logprobs than the trainer for {self._model(version)}: "
                f"{difference:.3g} apart at token {token}, {check.tolerance:g} is allowed.",
                hint=f"Nobody asks for it; {'nothing' if old is None else self._model(old)} is "
                "served as before. Compare the engine's base model and dtype with the trainer's, "
                "and lora_alpha, rank and layers with what the engine knows.",
                version=version,
                old_version=old,
                difference=difference,
                tolerance=check.tolerance,
                token=token,
            )
        return difference

    def _take_back(self, version: int) -> None:
        """A version that is not published is loaded nowhere; one that was before is as it was."""
        before = self._loaded.get(version)

        def back(engine: EngineControl) -> None:
            if before is not None:
                self._load(engine, version, before)
            elif self._model(version) in engine.models():
                engine.unload_adapter(self._model(version))

        self._quietly(f"take {self._model(version)} back", back)

    def _unload_old(self, version: int) -> None:
        """Adapters that nobody can ask for any more go, their files with them."""
        kept = set(sorted(one for one in self._loaded if one <= version)[-self._keep :])
        needed = set(kept)
        try:
            for engine in self._engines:
                needed |= self._unload_from(engine, kept)
        except EngineError as error:
            # An engine may have to read any of the files still.
            log.warning("old adapters stay until the next version: %s", error)
            return
        self._loaded = {one: path for one, path in self._loaded.items() if one in needed}
        self._folders.keep(needed)

    def _unload_from(self, engine: EngineControl, kept: set[int]) -> set[int]:
        """Unloads what is not in `kept` and what no call needs; what calls need still."""
        there = {int(found[1]) for found in map(self._named.fullmatch, engine.models()) if found}
        used = engine.adapters_in_use()
        busy = {one for one in there | set(self._loaded) if self._model(one) in used}
        for version in sorted(there - kept - busy):
            engine.unload_adapter(self._model(version))
        return busy
