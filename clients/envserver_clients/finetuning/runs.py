"""One training: from rows to a folder that can go to the hub as it is.

    OUTPUT/README.md, metrics.jsonl, training.json, and the adapter or the model
    OUTPUT/.work     rows as tokens, and checkpoints; gone when all is done

What holds: `kill -9` at any moment loses at most the steps since the last checkpoint, and the same
command goes on to the same weights. `training.json` is there only when everything else is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from envserver_records import ConfigError, ConflictError, InputError
from envserver_records.files import replace_file
from rich.console import Console

from envserver_clients.training.metrics import read_lines

from .card import About, base_name, card_of
from .data import Part, digest_of
from .examples import Counts, Example, written
from .reporting import Reporting
from .settings import Settings
from .tokens import Encoder

S = TypeVar("S", bound=Settings)

DONE: Final = "training.json"
_WORK: Final = ".work"
_STARTED: Final = "started.json"
_METRICS: Final = "metrics.jsonl"
_ADAPTER: Final = "adapter_config.json"
_STATE: Final = "trainer_state.json"
_LIBRARIES: Final = ("trl", "transformers", "peft", "torch", "datasets")
_NOT_OF_THE_RESULT: Final = frozenset(
    {
        *("output", "data", "overwrite", "preset", "merged", "threads", "device", "base_model"),
        *("license", "keep_checkpoints", "checkpoint_every", "log_every", "validate_every"),
        *("tool", "whole", "model"),
    }
)


@dataclass(frozen=True)
class Method(Generic[S]):
    """What supervised and preference training do differently.

    Args:
        name: sft or dpo.
        columns: of the data set.
        examples: rows of these files as examples; fills the counts.
        trainer: makes TRL's trainer.
        last_only: train only the last turn.
    """

    name: str
    columns: Sequence[str]
    examples: Callable[[S, Sequence[Path], Encoder, Counts], Iterator[Example]]
    trainer: Callable[..., Any]
    last_only: Callable[[S], bool] = lambda settings: False


def prepare(settings: Settings) -> None:
    """Torch as the settings want it."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one a file, for files that are read in no time
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


class Training(Generic[S]):
    """One model that is made of one part of the data.

    Args:
        settings: all of them.
        part: the rows.
        output: the folder of this model.
    """

    def __init__(
        self, settings: S, method: Method[S], part: Part, output: Path, console: Console
    ) -> None:
        self._settings = settings
        self._method = method
        self._part = part
        self._output = output
        self._work = output / _WORK
        self._console = console
        self._name = f"{base_name(settings.model, settings.base_model)}-{method.name}" + (
            f"-{part.tool}" if part.tool else ""
        )

    def run(self) -> None:
        """Trains, or goes on, or sees that all is done.

        Raises:
            ConflictError: `output` holds another training, or other things.
            InputError: a row is wrong, or none is left.
            ConfigError: model and settings do not go together.
        """
        facts = self._facts()
        if self._is_done(facts):
            shutil.rmtree(self._work, ignore_errors=True)
            self._console.print(f"{self._output}: done already.", soft_wrap=True, highlight=False)
            return
        self._work.mkdir(parents=True, exist_ok=True)
        _write(self._work / _STARTED, facts)
        tokenizer, encoder = self._encoder()
        counts = Counts()
        train = self._data(self._part.train, encoder, counts, "train")
        if train is None:
            raise InputError(
                f"There is nothing to learn from: of {counts.rows} rows none is left.",
                hint=f"Longer than --max-length: {counts.dropped_too_long}; with nothing of the "
                f"assistant: {counts.dropped_nothing_to_train}.",
            )
        validation = None
        if self._part.validation:
            validation = self._data(self._part.validation, encoder, Counts(), "validation")
        trainer = self._trained(tokenizer, train, validation)
        self._finish(trainer, tokenizer, facts, counts)

    def _facts(self) -> dict[str, Any]:
        """What decides the result."""
        settings = self._settings
        chosen = settings.model_dump(mode="json", exclude=set(_NOT_OF_THE_RESULT))
        chosen["learning_rate"] = settings.rate
        paths = (*self._part.train, *self._part.validation)
        base = base_name(settings.model, settings.base_model)
        return {
            "method": self._method.name,
            "base": base,
            "tool": self._part.tool,
            "settings": chosen,
            "data": digest_of(paths),
        }

    def _is_done(self, facts: dict[str, Any]) -> bool:
        """Looks at what is in the folder; empties it where that was asked for."""
        names = {path.name for path in self._output.iterdir()} if self._output.exists() else set()
        if names <= {_WORK} and not (self._work / _STARTED).exists():
            return False
        done, started = self._output / DONE, self._work / _STARTED
        ours = next((path for path in (done, started) if path.is_file()), None)
        if ours is None:
            raise ConflictError(
                f"{self._output} holds something else.", hint="Name another --output."
            )
        earlier = json.loads(ours.read_text(encoding="utf-8"))
        if all(earlier.get(name) == value for name, value in facts.items()):
            return ours is done
        if ours is started and _last_whole(self._work / "checkpoints") is None:
            shutil.rmtree(self._work)  # nothing would be lost
            return False
        if not self._settings.overwrite:
            other = ", ".join(_differences(earlier, facts))
            raise ConflictError(
                f"{self._output} holds another training: {other} differ.",
                hint="Name another --output, or begin anew with --overwrite.",
            )
        shutil.rmtree(self._output)
        return False

    def _encoder(self) -> tuple[Any, Encoder]:
        from transformers import AutoTokenizer, GenerationConfig

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(self._settings.model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._settings.model} cannot be loaded: {error}") from error
        try:
            ends = GenerationConfig.from_pretrained(self._settings.model).eos_token_id
        except OSError:
            ends = None  # a model without that file
        known = [] if ends is None else [ends] if isinstance(ends, int) else ends
        last_only = self._method.last_only(self._settings)
        return tokenizer, Encoder(tokenizer, ends=frozenset(known), last_only=last_only)

    def _data(self, paths: Sequence[Path], encoder: Encoder, counts: Counts, name: str) -> Any:
        examples = self._method.examples(self._settings, paths, encoder, counts)
        return written(examples, self._method.columns, self._work / f"{name}.arrow")

    def _trained(self, tokenizer: Any, train: Any, validation: Any) -> Any:
        from transformers import PrinterCallback

        checkpoints = self._work / "checkpoints"
        last = _last_whole(checkpoints)
        step = int(last.name.rpartition("-")[2]) if last else 0
        reporting = Reporting(self._output / _METRICS, step, self._name, self._console)
        try:
            trainer = self._method.trainer(
                self._settings, tokenizer, train, validation, checkpoints, [reporting]
            )
            trainer.remove_callback(PrinterCallback)  # it would print each line of metrics
            trainer.train(resume_from_checkpoint=str(last) if last else None)
            if validation is not None:
                trainer.evaluate()
        finally:
            reporting.close()
        return trainer

    def _finish(self, trainer: Any, tokenizer: Any, facts: dict[str, Any], counts: Counts) -> None:
        made = self._work / "made"
        shutil.rmtree(made, ignore_errors=True)
        model = trainer.accelerator.unwrap_model(trainer.model)
        _save(model, tokenizer, made, self._settings, facts["base"])
        done = {
            **facts,
            "counts": counts.as_dict(),
            "results": self._results(),
            "versions": {name: version(name) for name in _LIBRARIES},
        }
        about = About(
            name=self._name,
            license=self._settings.license,
            **{key: done[key] for key in _TOLD},
        )
        (made / "README.md").write_text(card_of(about), encoding="utf-8")
        for path in sorted(made.iterdir()):
            place = self._output / path.name
            if place.is_dir():
                shutil.rmtree(place)
            path.replace(place)
        if self._settings.keep_checkpoints:
            (self._work / "checkpoints").replace(self._output / "checkpoints")
        _write(self._output / DONE, done)
        shutil.rmtree(self._work)

    def _results(self) -> dict[str, float]:
        """The last value of each number in metrics.jsonl."""
        found: dict[str, float] = {}
        for line in read_lines(self._output / _METRICS):
            found.update(line)
        return {name: value for name, value in found.items() if not _is_time(name)}


_TOLD: Final = ("method", "base", "tool", "settings", "counts", "results", "data", "versions")


def _is_time(name: str) -> bool:
    return name == "seconds" or name.endswith(("_runtime", "_per_second"))


def _differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names of what is not the same."""
    names = [name for name in now if name != "settings" and earlier.get(name) != now[name]]
    before, after = earlier.get("settings", {}), now["settings"]
    return names + [name for name in after if before.get(name) != after[name]]


def _last_whole(checkpoints: Path) -> Path | None:
    """The newest checkpoint; one that was torn by a kill is removed. The trainer's state is what
    TRL writes last."""
    found = sorted(checkpoints.glob("checkpoint-*"), key=lambda one: int(one.name[11:]))
    while found:
        try:
            json.loads((found[-1] / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            shutil.rmtree(found.pop())
        else:
            return found[-1]
    return None


def _save(model: Any, tokenizer: Any, folder: Path, settings: Settings, base: str) -> None:
    """What engines and transformers load: the model, or the adapter alone (PEFT)."""
    import torch
    from transformers import AutoConfig

    if settings.lora:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        config = json.loads((folder / _ADAPTER).read_text(encoding="utf-8"))
        _write(folder / _ADAPTER, {**config, "base_model_name_or_path": base})
        if not settings.merged:
            return
        model, folder = model.merge_and_unload(), folder / "merged"
    was = AutoConfig.from_pretrained(settings.model).dtype
    if isinstance(was, torch.dtype):
        model = model.to(was)  # as it came, though it was trained in float32
    model.config.use_cache = True
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write(path: Path, value: dict[str, Any]) -> None:
    replace_file(path, json.dumps(value, indent=1) + "\n", sync=False)
