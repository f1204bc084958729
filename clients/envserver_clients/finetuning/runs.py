"""Runs one training: from rows to a folder that is ready for the hub.

    OUTPUT/README.md, metrics.jsonl, training.json, and the adapter or the model
    OUTPUT/.work     rows as tokens, and checkpoints; removed at the end

Invariants: `kill -9` at any moment loses at most the steps since the last checkpoint, and the same
command continues to the same weights. metrics.jsonl has one line for each step, even after a kill.
`training.json` appears last.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
from envserver_records import ConfigError, ConflictError, InputError
from envserver_records.files import replace_file
from envserver_records.tasks import Json
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PrinterCallback,
    TrainerCallback,
)
from transformers.utils.logging import disable_progress_bar

from envserver_clients.training.metrics import JsonLines, read_lines

from .card import CardFacts, base_name, card_of
from .conversation import Part, digest_of
from .examples import Encoder, Example, ExampleCounts, written
from .heldout import PREFIX, HeldOut
from .settings import FinetuneSettings

MEASURED: Final = "heldout_loss"
_LEFT_OUT = ("total_flos", "num_tokens", "train_runtime", "train_samples_per_second")
_SHOWN = ("loss", "mean_token_accuracy", "rewards/accuracies", "eval_loss")
_MOST_APART = {True: 0.05, False: 1e-3}
"""Maximum mean difference of log-probabilities: in bfloat16, and otherwise."""


def check_apart(model: Any, packed: Any, *, half: bool) -> None:
    """Compares the first packed row with its rows alone, in one forward pass each.

    TRL gives position ids that start again with each row, and no attention mask. transformers'
    attention keeps rows apart by these; state spaces and linear attention may not: ConfigError.
    `packed`: the data set of TRL's trainer, with `seq_lengths`.
    """
    row = next((row for row in packed if len(row["seq_lengths"]) > 1), None)
    if row is None:
        return
    difference = packed_difference(model, row["input_ids"], row["seq_lengths"], half=half)
    if not difference <= _MOST_APART[half]:
        raise ConfigError(
            f"--packing does not fit this model: packed rows see each other (log-probabilities "
            f"differ by {difference:.3g} on average from those of the rows alone).",
            hint="Leave --packing out.",
        )


def packed_difference(model: Any, ids: Sequence[int], lengths: Sequence[int], *, half: bool) -> Any:
    """The mean absolute difference of the tokens' log-probabilities, packed and alone.

    `ids`: T token ids of a packed row. `lengths`: those of its rows; their sum is T.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([list(ids)], device=device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=half):
            together = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
            alone = [
                model(input_ids=part, use_cache=False).logits[0]
                for part in tokens.split(list(lengths), dim=1)
            ]
    finally:
        model.train(was_training)
    total, start = 0.0, 0
    for logits, length in zip(alone, lengths, strict=True):
        targets = tokens[0, start + 1 : start + length, None]
        mine, other = (
            scores[: length - 1].float().log_softmax(-1).gather(-1, targets)
            for scores in (together[start : start + length], logits)
        )
        total += float((mine - other).abs().sum())
        start += length
    return total / max(len(ids) - len(lengths), 1)


class Reporting(TrainerCallback):  # type: ignore[misc]  # a class of a library without types
    """Writes metrics.jsonl and shows the bar, from the `step` of a checkpoint on."""

    def __init__(self, path: Path, step: int, name: str, console: Console) -> None:
        self._lines = JsonLines(path, step)
        self._evaluated = {line["step"] for line in self._lines.kept if "eval_loss" in line}
        self._measured = {line["step"] for line in self._lines.kept if MEASURED in line}
        self._name = name
        self._begun = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._begun = time.monotonic()
        self._bar.start()
        self._task = self._bar.add_task(
            self._name, total=state.max_steps, completed=state.global_step, note=""
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        numbers = {name: value for name, value in (logs or {}).items() if name not in _LEFT_OUT}
        if "train_loss" in numbers:
            return  # the summary at the end, which covers this start only
        if "eval_loss" in numbers and state.global_step in self._evaluated:
            return  # killed between this line and the end
        line = {"step": state.global_step, **numbers}
        line["seconds"] = round(time.monotonic() - self._begun, 3)
        self._lines.write(line)
        note = " ".join(f"{name} {numbers[name]:.3f}" for name in _SHOWN if name in numbers)
        if self._task is not None:
            self._bar.update(self._task, note=note)

    def measure(self, step: int, measured: Callable[[], dict[str, float]]) -> None:
        """Writes the measures of held-out rows at a step, unless they are there already."""
        if step not in self._measured:
            self._lines.write({"step": step, **measured()})

    def close(self) -> None:
        self._bar.stop()
        self._lines.close()


S = TypeVar("S", bound=FinetuneSettings)

DONE: Final = "training.json"
_WORK: Final = ".work"
_STARTED: Final = "started.json"
_METRICS: Final = "metrics.jsonl"
_ADAPTER: Final = "adapter_config.json"
_STATE: Final = "trainer_state.json"
_LIBRARIES: Final = ("trl", "transformers", "peft", "torch", "datasets")
_NEWER: Final = ("load_in_4bit", "packing")
"""Settings that trainings of earlier versions did not have."""
_NOT_OF_THE_RESULT: Final = frozenset(
    {
        *("output", "data", "overwrite", "preset", "merged", "threads", "device", "base_model"),
        *("license", "keep_checkpoints", "checkpoint_every", "log_every", "validate_every"),
        *("tool", "whole", "model", "check_calls"),
    }
)


@dataclass(frozen=True)
class TrainerData:
    """The parts of a trainer, besides its settings; `folder`: for its checkpoints."""

    tokenizer: Any
    train: Any
    validation: Any
    folder: Path
    callbacks: Sequence[TrainerCallback] = ()


@dataclass(frozen=True)
class Method(Generic[S]):
    """The differences between supervised and preference training.

    `examples` fills the counts. `trainer` creates TRL's trainer. `heldout` measures on validation
    rows, before and after the training.
    """

    name: str
    columns: Sequence[str]
    examples: Callable[[S, Sequence[Path], Encoder, ExampleCounts], Iterator[Example]]
    trainer: Callable[[S, TrainerData], Any]
    last_only: Callable[[S], bool] = lambda settings: False
    heldout: Callable[[S, Sequence[Path], Encoder, Any], HeldOut] | None = None


def prepare(settings: FinetuneSettings) -> None:
    disable_progress_bar()  # it would show one per file for short reads
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


class Training(Generic[S]):
    """Trains one model on one part of the data."""

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
        """Starts or continues the training, unless it is already done.

        Raises ConflictError: `output` contains another training or other files. InputError: a row
        is wrong, or no row is left. ConfigError: model and settings do not fit together.
        """
        facts = self._facts()
        if self._is_done(facts):
            shutil.rmtree(self._work, ignore_errors=True)
            self._console.print(f"{self._output}: already done.", soft_wrap=True, highlight=False)
            return
        self._work.mkdir(parents=True, exist_ok=True)
        _write(self._work / _STARTED, facts)
        tokenizer, encoder = self._encoder()
        counts = ExampleCounts()
        train = self._data(self._part.train, encoder, counts, "train")
        if train is None:
            raise InputError(
                f"There is nothing to learn from: none of {counts.rows} rows is left.",
                hint=f"Longer than --max-length: {counts.dropped_too_long}; without an answer of "
                f"the assistant: {counts.dropped_nothing_to_train}.",
            )
        validation = None
        if self._part.validation:
            validation = self._data(self._part.validation, encoder, ExampleCounts(), "validation")
        heldout = None
        if validation is not None and self._method.heldout is not None:
            heldout = self._method.heldout(
                self._settings, self._part.validation, encoder, tokenizer
            )
        trainer = self._trained(tokenizer, train, validation, heldout)
        self._finish(trainer, tokenizer, facts, counts)

    def _facts(self) -> Json:
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

    def _is_done(self, facts: Json) -> bool:
        """Whether the folder contains the result; empties it with --overwrite."""
        names = {path.name for path in self._output.iterdir()} if self._output.exists() else set()
        if names <= {_WORK} and not (self._work / _STARTED).exists():
            return False
        done, started = self._output / DONE, self._work / _STARTED
        ours = next((path for path in (done, started) if path.is_file()), None)
        if ours is None:
            raise ConflictError(
                f"{self._output} contains other files.", hint="Use another --output."
            )
        earlier = json.loads(ours.read_text(encoding="utf-8"))
        # Written before a setting existed, it had the setting's default.
        earlier["settings"] = self._defaults() | earlier.get("settings", {})
        if all(earlier.get(name) == value for name, value in facts.items()):
            return ours is done
        if ours is started and _last_whole(self._work / "checkpoints") is None:
            shutil.rmtree(self._work)  # nothing is lost
            return False
        if not self._settings.overwrite:
            other = ", ".join(_differences(earlier, facts))
            raise ConflictError(
                f"{self._output} contains another training: {other} differ.",
                hint="Use another --output, or start again with --overwrite.",
            )
        shutil.rmtree(self._output)
        return False

    def _defaults(self) -> Json:
        kinds = type(self._settings).model_fields
        return {name: kinds[name].default for name in _NEWER if name in kinds}

    def _encoder(self) -> tuple[Any, Encoder]:
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(self._settings.model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._settings.model} cannot be loaded: {error}") from error
        try:
            ends = GenerationConfig.from_pretrained(self._settings.model).eos_token_id
        except OSError:
            ends = None  # the model does not have that file
        known = [] if ends is None else [ends] if isinstance(ends, int) else ends
        last_only = self._method.last_only(self._settings)
        return tokenizer, Encoder(tokenizer, ends=frozenset(known), last_only=last_only)

    def _data(
        self, paths: Sequence[Path], encoder: Encoder, counts: ExampleCounts, name: str
    ) -> Any:
        examples = self._method.examples(self._settings, paths, encoder, counts)
        return written(examples, self._method.columns, self._work / f"{name}.arrow")

    def _trained(self, tokenizer: Any, train: Any, validation: Any, heldout: HeldOut | None) -> Any:
        checkpoints = self._work / "checkpoints"
        last = _last_whole(checkpoints)
        step = int(last.name.rpartition("-")[2]) if last else 0
        reporting = Reporting(self._output / _METRICS, step, self._name, self._console)
        try:
            data = TrainerData(tokenizer, train, validation, checkpoints, [reporting])
            trainer = self._method.trainer(self._settings, data)
            trainer.remove_callback(PrinterCallback)  # it would print each line of metrics
            if "seq_lengths" in trainer.train_dataset.column_names:
                check_apart(trainer.model, trainer.train_dataset, half=trainer.args.bf16)
            if heldout is not None:
                reporting.measure(0, lambda: heldout.measure(trainer.model))
            trainer.train(resume_from_checkpoint=str(last) if last else None)
            if validation is not None:
                trainer.evaluate()
            if heldout is not None:
                reporting.measure(trainer.state.global_step, lambda: heldout.measure(trainer.model))
        finally:
            reporting.close()
        return trainer

    def _finish(self, trainer: Any, tokenizer: Any, facts: Json, counts: ExampleCounts) -> None:
        made = self._work / "made"
        shutil.rmtree(made, ignore_errors=True)
        model = trainer.accelerator.unwrap_model(trainer.model)
        _save(model, tokenizer, made, self._settings, facts["base"])
        done = {
            **facts,
            "counts": counts.as_dict(),
            "results": self._results(),
            "heldout": self._heldout(),
            "versions": {name: version(name) for name in _LIBRARIES},
        }
        about = CardFacts(
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
        return {
            name: value
            for name, value in found.items()
            if not _is_time(name) and not name.startswith(PREFIX)
        }

    def _heldout(self) -> dict[str, list[float]]:
        """Each measure of held-out rows before and after the training."""
        lines = [line for line in read_lines(self._output / _METRICS) if MEASURED in line]
        if not lines:
            return {}
        first, last = lines[0], lines[-1]
        names = [name for name in last if name.startswith(PREFIX) and name in first]
        return {name.removeprefix(PREFIX): [first[name], last[name]] for name in names}


_TOLD: Final = (
    *("method", "base", "tool", "settings", "counts", "results", "heldout", "data", "versions"),
)


def _is_time(name: str) -> bool:
    return name == "seconds" or name.endswith(("_runtime", "_per_second"))


def _differences(earlier: Json, now: Json) -> list[str]:
    names = [name for name in now if name != "settings" and earlier.get(name) != now[name]]
    before, after = earlier.get("settings", {}), now["settings"]
    return names + [name for name in after if before.get(name) != after[name]]


def _last_whole(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint; removes one that a kill left incomplete. TRL writes the
    trainer's state last."""
    found = sorted(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    while found:
        try:
            json.loads((found[-1] / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            shutil.rmtree(found.pop())
        else:
            return found[-1]
    return None


def _save(model: Any, tokenizer: Any, folder: Path, settings: FinetuneSettings, base: str) -> None:
    """Saves what engines and transformers load: the model, or only the adapter (PEFT)."""
    if settings.lora:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        config = json.loads((folder / _ADAPTER).read_text(encoding="utf-8"))
        _write(folder / _ADAPTER, {**config, "base_model_name_or_path": base})
        if not settings.merged:
            return
        if settings.load_in_4bit:
            model = _on_whole_base(settings.model, folder)
        model, folder = model.merge_and_unload(), folder / "merged"
    was = AutoConfig.from_pretrained(settings.model).dtype
    if isinstance(was, torch.dtype):
        model = model.to(was)  # its original type, though it was trained in float32
    model.config.use_cache = True
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _on_whole_base(base: str, adapter: Path) -> Any:
    """Loads the adapter on the base's own weights: 4-bit ones would be merged with their error."""
    from peft import PeftModel

    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(whole, adapter)


def _write(path: Path, value: Json) -> None:
    replace_file(path, json.dumps(value, indent=1) + "\n", sync=False)
