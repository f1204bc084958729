"""Transfers LoRA adapters: each version is a separate model, such as `policy@17`.

Nothing is paused: the server uses the new name as soon as it knows the version, and running calls
finish with the adapter that they began with. Invariants: a name means one adapter; adapters that
calls need, or may ask for, stay loaded and keep their files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from envserver_records import EngineError

from .engines import EngineControl, PromptCheck, WeightsMismatch, together
from .push import FolderPush, Phases, Published, Save

log = logging.getLogger(__name__)

_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


class Lora(FolderPush):
    """Transfers adapters to vLLM with `--enable-lora`, or to the local engine; see `WeightPush` and
    `FolderPush`.

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
        with self._lock:
            mended = []
            for engine in self._engines:
                with suppress(EngineError):
                    there = set(engine.models())
                    lost = [one for one in self._loaded if self._model(one) not in there]
                    for version in reversed(lost):  # the current version first
                        self._load(engine, version, self._loaded[version])
                    if lost:
                        log.warning("%s lost versions %s; they are loaded again", engine.url, lost)
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
                f"Its logprobs for {self._model(version)} differ from the trainer's: "
                f"by {difference:.3g} at token {token}; {check.tolerance:g} is allowed.",
                hint=f"It is not published; {'nothing' if old is None else self._model(old)} is "
                "served as before. Compare the engine's base model and dtype with the trainer's, "
                "and lora_alpha, rank and layers with the engine's.",
                version=version,
                old_version=old,
                difference=difference,
                tolerance=check.tolerance,
                token=token,
            )
        return difference

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
        kept = set(sorted(one for one in self._loaded if one <= version)[-self._keep :])
        needed = set(kept)
        try:
            for engine in self._engines:
                needed |= self._unload_from(engine, kept)
        except EngineError as error:
            # An engine may still need any of the files.
            log.warning("old adapters stay until the next version: %s", error)
            return
        self._loaded = {one: path for one, path in self._loaded.items() if one in needed}
        self._folders.keep(needed)

    def _unload_from(self, engine: EngineControl, kept: set[int]) -> set[int]:
        """Unloads adapters that are not in `kept` and that no call needs; returns those in use."""
        there = {int(found[1]) for found in map(self._named.fullmatch, engine.models()) if found}
        used = engine.adapters_in_use()
        busy = {one for one in there | set(self._loaded) if self._model(one) in used}
        for version in sorted(there - kept - busy):
            engine.unload_adapter(self._model(version))
        return busy
