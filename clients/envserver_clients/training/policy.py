"""The learning model: loads it, optionally with LoRA, and saves it for an engine.

Invariants: dropout is off, so the learning policy and the engine compute the same function; trained
weights are float32, whatever the type of computing, because a step of a usual learning rate is lost
in the rounding of bfloat16. Each of several ranks holds a part of all weights, and all ranks call
the same methods at the same time.
"""

from __future__ import annotations

import inspect
import io
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import torch
from envserver_records import ConfigError, InputError
from envserver_records.images import RowImage
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from envserver_clients.records import Row, pixels

from .examples import Example, Padded
from .loss import token_logprobs
from .ranks import Ranks, placed_like, shard, whole

# Two forms are known: a grid of patches for each image (`image_grid_thw`: Qwen2-VL to Qwen3-VL),
# and parts of one size (Idefics3, SmolVLM).

_FILES: Final = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
_BLANK_PIXELS: Final = 64


class Vision:
    """The images' side of a model; its processor needs Pillow. `model`: transformers', before
    LoRA."""

    def __init__(self, source: str, model: Any) -> None:
        from transformers import AutoImageProcessor

        self._source = source
        self._processor: Any = AutoImageProcessor.from_pretrained(source)
        self._token = int(model.config.image_token_id)
        self._has_grids = "image_grid_thw" in _inputs_of(model)
        self._has_types = "mm_token_type_ids" in _inputs_of(model)
        vision = model.config.vision_config
        if self._has_grids:
            self._patches = int(vision.spatial_merge_size) ** 2
        else:
            side = vision.image_size // vision.patch_size
            self._part_tokens = side**2 // model.config.scale_factor**2
        self._sizes: dict[str, tuple[int, tuple[int, ...]]] = {}

    @classmethod
    def of(cls, source: str, model: Any) -> Self | None:
        """None if `model` sees no images, or in a form not known here."""
        takes = _inputs_of(model)
        config = model.config
        if getattr(config, "image_token_id", None) is None or "pixel_values" not in takes:
            return None
        has_parts = "pixel_attention_mask" in takes and hasattr(config, "scale_factor")
        return cls(source, model) if "image_grid_thw" in takes or has_parts else None

    def fits(self, row: Row) -> bool:
        """Whether the processor makes of a row's images the tokens that the row has."""
        images = self.is_image(row.tokens)
        try:
            sizes = [self._size(image) for image in row.images]
        except InputError:
            return False
        return int(images.sum()) == sum(tokens for tokens, _ in sizes) and all(
            int(images[image.offset : image.offset + image.length].sum()) == tokens
            and image.grid in ((), grid)
            for image, (tokens, grid) in zip(row.images, sizes, strict=True)
        )

    def _size(self, image: RowImage) -> tuple[int, tuple[int, ...]]:
        """The number of an image's tokens, and its grid; () where there is none."""
        if image.sha256 not in self._sizes:
            made = pixels(self._processor, [[image]])
            if self._has_grids:
                grid = tuple(made["image_grid_thw"][0].tolist())
                found = int(np.prod(grid)) // self._patches, grid
            else:
                found = made["pixel_values"].shape[1] * self._part_tokens, ()
            self._sizes[image.sha256] = found
        return self._sizes[image.sha256]

    def inputs(
        self, tokens: NDArray[np.int64], rows: Sequence[Sequence[RowImage]], device: torch.device
    ) -> dict[str, Tensor]:
        """The model's inputs beside its tokens [B, T]; empty if no row has images."""
        if not any(rows):
            return {}
        found = pixels(self._processor, rows)
        if self._has_types:
            found["mm_token_type_ids"] = torch.from_numpy(self.is_image(tokens).astype(np.int64))
        return {name: value.to(device) for name, value in found.items()}

    def is_image(self, tokens: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = tokens == self._token
        return found

    def blank(self) -> Example:
        """A row with a white image that teaches nothing."""
        from PIL import Image

        file = io.BytesIO()
        Image.new("RGB", (_BLANK_PIXELS, _BLANK_PIXELS), "white").save(file, "PNG")
        image = RowImage("blank", 1, 1, file.getvalue())
        length, _ = self._size(image)
        tokens = np.array([0, *[self._token] * length, 0, 0], np.int32)
        nothing = np.zeros(len(tokens), np.uint8)
        return Example(
            *(tokens, nothing, nothing.astype(np.float32)),
            advantage=0.0,
            weight=0.0,
            images=(image,),
        )

    def save(self, folder: Path) -> None:
        """Copies the processor's files, which an engine needs beside the weights."""
        from transformers.utils import cached_file

        for name in _FILES:
            found = cached_file(
                self._source,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            if found is not None:
                shutil.copyfile(found, folder / name)


def _inputs_of(model: Any) -> set[str]:
    return set(inspect.signature(type(model).forward).parameters)


_LAYER = re.compile(r"\blayers\.(\d+)\.")
_TOPK = (torch.topk, torch.Tensor.topk)


class Replay:
    """Sends tokens to the experts that the engine chose when it sampled (arXiv 2510.11370).

    Engine and trainer compute the same router logits but for rounding, which is enough to choose
    other experts. Only the choice is replayed: the weights of the chosen experts are the model's
    own, with gradient. transformers' routers choose by one `torch.topk` over all experts: here that
    call returns the recorded choice. Raises ConfigError: the model has no router of a known kind.
    """

    def __init__(self, model: Any) -> None:
        self._chosen: Tensor | None = None
        self._layers = int(model.config.get_text_config().num_hidden_layers)
        self._experts = 0
        for name, module in model.named_modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                self._experts = module.weight.shape[0]
                layer = _LAYER.search(name)
                assert layer is not None, name
                module.forward = self._replayed(module.forward, int(layer[1]))
        if not self._experts:
            raise ConfigError(
                "replay_experts is on, but the model has no router that can be replayed.",
                hint="It needs a mixture-of-experts model whose routers transformers calls "
                "...TopKRouter.",
            )

    def use(self, chosen: NDArray[np.int16] | None, device: torch.device) -> None:
        """Sets the experts of the next forward pass, and of its backward pass.

        `chosen`: [tokens, layers, experts per token]; -1: the router chooses; None: all of them.
        Raises ConfigError: they are of another model.
        """
        self._chosen = None if chosen is None else torch.from_numpy(chosen).to(device).long()
        if chosen is not None and (
            chosen.shape[1] != self._layers or chosen.max(initial=-1) >= self._experts
        ):
            raise ConfigError(
                f"Recorded experts are of {chosen.shape[1]} layers with numbers up to "
                f"{chosen.max()}; the model has {self._layers} layers of {self._experts} experts.",
                hint="The engine serves another model.",
            )

    def _replayed(self, forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def replayed(*args: Any, **kwargs: Any) -> Any:
            if self._chosen is None:
                return forward(*args, **kwargs)
            with _Choosing(self._chosen[:, layer], self._experts):
                return forward(*args, **kwargs)

        return replayed


class _Choosing(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Within it `torch.topk` over `experts` numbers returns the places that are `chosen`."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen = chosen
        self._experts = experts

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        is_choice = func in _TOPK and args[0].shape[-1] == self._experts
        if not is_choice or found.indices.shape != self._chosen.shape:
            return found
        chosen = torch.where(self._chosen >= 0, self._chosen, found.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


Entropy = Literal["none", "measured", "learned"]
"""How much of the entropy is computed: nothing (zeros), its value, or its gradient as well."""

_ROWS: Final = 1024
"""Distributions that are computed in float32 at once."""


@dataclass(frozen=True)
class LoraSettings:
    """A LoRA (arXiv 2106.09685) without dropout; the product of its matrices is scaled by alpha /
    rank.

    `alpha`: None: 2 * rank. `targets`: names of linear layers, separated by commas; `all-linear`:
    all but the last; of a model that sees images those of its language part.
    """

    rank: int
    alpha: float | None = None
    targets: str = "all-linear"


@dataclass(frozen=True)
class Scores:
    """The policy's numbers for the target tokens, float32[B, N].

    Args:
        logprobs: of the distributions that were sampled from, at their temperatures; with gradient.
        as_delivered: without gradient, what the delivered ones are to be compared with: logprobs
            from before the temperature where those are.
        entropy: of these distributions in nats; 0 where nothing is trained.
    """

    logprobs: Tensor
    as_delivered: Tensor
    entropy: Tensor


class Policy:
    """A causal language model of transformers, which may see images.

    Args:
        model: folder or hub id.
        lora: train this instead of all weights.
        dtype: type of computing (autocast), and of weights that are not trained and saved ones.
        keep_reference: keep what `reference_logprobs` needs.
        checkpointed: compute activations again in the backward pass: less memory, more time.
        replay_experts: route tokens to the experts of the batch, see `Replay`.
        ranks: the processes that share the weights; `device` is theirs. Default: this one alone.
    """

    def __init__(
        self,
        model: str,
        *,
        lora: LoraSettings | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        keep_reference: bool = False,
        checkpointed: bool = False,
        replay_experts: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        from transformers import AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # it would show one per step for short writes
        self._source = model
        self._ranks = ranks or Ranks(device=device)
        self.device = self._ranks.device
        self._dtype = dtype
        self.is_lora = lora is not None
        kept = dtype if self.is_lora else torch.float32
        self.model: Any = _model_class(model).from_pretrained(model, dtype=kept)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.vision = Vision.of(model, self.model)
        """None if the model sees no images."""
        self._reference: Any = None
        if lora is not None:
            self.model = _with_lora(self.model, lora)
        elif keep_reference:
            self._reference = type(self.model).from_pretrained(model, dtype=dtype)
            self._reference.eval().requires_grad_(False)
            self._place(self._reference)
        self.model.eval()
        if checkpointed:
            _checkpoint_activations(self.model)
        models = [self.model] if self._reference is None else [self.model, self._reference]
        self._replays = [Replay(each) for each in models] if replay_experts else []
        self._place(self.model)
        self.trained: dict[str, torch.nn.Parameter] = {
            name: value for name, value in self.model.named_parameters() if value.requires_grad
        }
        """The parameters that are trained, by name; this rank's part of each."""

    def _place(self, model: Any) -> None:
        shard(model, self._ranks, self._dtype)
        if not self._ranks.divided:
            model.to(self.device)

    def gather_gradients(self, *, now: bool) -> None:
        """Whether the next backward pass adds up the gradients of all ranks: once per update, after
        its last micro-batch, is enough. Until then each rank holds a whole gradient."""
        if self._ranks.divided:
            self.model.set_requires_gradient_sync(now)

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def blank(self) -> Example | None:
        """A row that each micro-batch without images needs beside it. All ranks collect the weights
        of a layer at once, those that see images too, so all must run them, or none."""
        if self.vision is None or self._ranks.size == 1:
            return None
        return self.vision.blank()

    @property
    def is_recurrent(self) -> bool:
        """Whether layers remember earlier rows of a line, which rows must not share then."""
        return bool(getattr(self.model, "_is_stateful", False))

    def logprobs(self, batch: Padded) -> Tensor:
        """float32[B, N] for the targets from `batch.first` on, with gradient: of the distributions
        that were sampled from, at their temperatures."""
        return self.scores(batch).logprobs

    def scores(self, batch: Padded, *, learn_entropy: bool = False) -> Scores:
        """The same, with what is measured beside it. An entropy with a gradient takes more
        memory."""
        return self._scores(self.model, batch, entropy="learned" if learn_entropy else "measured")

    def reference_logprobs(self, batch: Padded) -> Tensor:
        """The logprobs of the model as it was loaded, without gradient."""
        with torch.no_grad():
            if self.is_lora:
                with self.model.disable_adapter():
                    return self._scores(self.model, batch, entropy="none").logprobs
            return self._scores(self._reference, batch, entropy="none").logprobs

    def _scores(self, model: Any, batch: Padded, *, entropy: Entropy) -> Scores:
        if batch.places is not None:
            return self._packed_scores(model, batch, *batch.places.T, entropy=entropy)
        tokens = torch.from_numpy(batch.tokens).to(self.device)
        targets = tokens[:, batch.first + 1 :]
        # Logits of untrained tokens (a long prompt) would take most of the time and memory.
        keep = targets.shape[1] + 1
        self._replay(batch.experts)
        with self._computing():
            # Padding is on the right, where no token looks; GPUs compute masked attention slowly.
            found = model(tokens, logits_to_keep=keep, use_cache=False, **self._shown(batch))
        trained = torch.from_numpy(batch.mask[:, batch.first :] == 1).to(self.device)
        return _scored(
            found.logits[:, :-1],
            targets,
            trained,
            batch.temperatures[:, batch.first :],
            batch.raw[:, batch.first :],
            entropy=entropy,
        )

    def _shown(self, batch: Padded) -> dict[str, Tensor]:
        """Returns what a model with vision takes beside tokens; positions come from the mask."""
        if self.vision is None:
            return {}
        attention = torch.from_numpy(batch.attention).to(self.device)
        seen = self.vision.inputs(batch.tokens, batch.images, self.device)
        return {"attention_mask": attention, **seen}

    def _packed_scores(
        self,
        model: Any,
        batch: Padded,
        lines: NDArray[np.int64],
        starts: NDArray[np.int64],
        *,
        entropy: Entropy,
    ) -> Scores:
        """Computes short rows in shared lines. Positions that start again at 0 tell transformers
        where a row begins: no row attends to another.

        Logits are computed for trained targets only; other targets have 0 in the result. The first
        token of a row is never a target.
        """
        rows, columns = np.nonzero(batch.attention)
        places = (lines[rows], starts[rows] + columns)
        tokens = np.zeros((lines.max() + 1, places[1].max() + 1), np.int64)
        positions = np.zeros_like(tokens)
        tokens[places], positions[places] = batch.tokens[rows, columns], columns
        chosen = None
        if batch.experts is not None:
            chosen = np.full((*tokens.shape, *batch.experts.shape[2:]), -1, np.int16)
            chosen[places] = batch.experts[rows, columns]
        self._replay(chosen)
        trained = batch.mask == 1
        rows, columns = np.nonzero(trained)
        keep = lines[rows] * tokens.shape[1] + starts[rows] + columns
        targets = torch.from_numpy(batch.tokens[rows, columns + 1][None]).to(self.device)
        with self._computing(), _logits_of(model, torch.from_numpy(keep).to(self.device)):
            found = model(
                torch.from_numpy(tokens).to(self.device),
                position_ids=torch.from_numpy(positions).to(self.device),
                use_cache=False,
            )
        flat = _scored(
            found.logits,
            targets,
            torch.ones_like(targets, dtype=torch.bool),
            batch.temperatures[trained][None],
            batch.raw[trained][None],
            entropy=entropy,
        )
        where = torch.from_numpy(trained[:, batch.first :]).to(self.device)
        empty = torch.zeros(where.shape, device=self.device)
        return Scores(
            *(
                empty.masked_scatter(where, part[0])
                for part in (flat.logprobs, flat.as_delivered, flat.entropy)
            )
        )

    def _replay(self, chosen: NDArray[np.int16] | None) -> None:
        """Sets the experts [lines, tokens, layers, experts per token] of the next forward pass."""
        flat = None if chosen is None else chosen.reshape(-1, *chosen.shape[2:])
        for replay in self._replays:
            replay.use(flat, self.device)

    def _computing(self) -> torch.autocast:
        is_half = self._dtype is not torch.float32
        return torch.autocast(self.device.type, self._dtype if is_half else None, enabled=is_half)

    def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        """The logprob of each token except the first, given those before it."""
        ids = torch.tensor([tokens], device=self.device)
        self._replay(None)
        with self._ranks.together("prompt_logprobs", tokens), torch.no_grad():
            with self._computing():
                logits = self.model(ids, use_cache=False).logits
            found: list[float] = token_logprobs(logits[:, :-1], ids[:, 1:])[0].tolist()
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the whole model (with LoRA the adapter) as (name, tensor), in one fixed order:
        transformers' names, without a second name of tied weights, in the type of computing, on
        this policy's device.

        All ranks put each tensor together. Walk to the end, or close the generator.
        """
        with self._ranks.together("tensors"):
            named = iter(self._named().items())
            try:
                for name, value in named:
                    yield name, self._whole(value)
            finally:
                for _, value in named:
                    self._whole(value)

    def _named(self) -> dict[str, Tensor]:
        if self.is_lora:
            return self.state()
        once = {name for name, _ in self.model.named_parameters()}
        twice = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
        named = self.model.state_dict().items()
        return {name: value for name, value in named if name not in twice}

    def _whole(self, value: Tensor) -> Tensor:
        is_weight = value.is_floating_point() and not self.is_lora
        return whole(value.to(self._dtype) if is_weight else value)

    def state(self) -> dict[str, Tensor]:
        """The trained parameters, for a checkpoint; this rank's part of each."""
        return {name: value.detach() for name, value in self.trained.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises KeyError: the state belongs to another model or other LoRA settings."""
        with torch.no_grad():
            for name, value in self.trained.items():
                value.copy_(placed_like(state[name], value))

    def save(self, folder: Path) -> None:
        """Saves what an engine loads: the model with its tokenizer, or only the LoRA (PEFT)."""
        state = {name: value.cpu() for name, value in self.tensors()}
        self.model.save_pretrained(folder, state_dict=state)
        if self.is_lora:
            return
        about = folder / "config.json"  # transformers writes the type of the weights in memory
        kept = json.loads(about.read_text()) | {"dtype": str(self._dtype).removeprefix("torch.")}
        about.write_text(json.dumps(kept, indent=2))
        self.tokenizer.save_pretrained(folder)
        if self.vision is not None:
            self.vision.save(folder)


def _model_class(model: str) -> Any:
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    sees = type(AutoConfig.from_pretrained(model)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


@contextmanager
def _logits_of(model: Any, places: Tensor) -> Iterator[None]:
    """Lets the model compute logits [1, N, V] of these tokens alone, counted over all lines."""
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, hidden: hidden[0].flatten(0, 1)[places].unsqueeze(0)
    )
    try:
        yield
    finally:
        hook.remove()


def _scored(
    logits: Tensor,
    targets: Tensor,
    trained: Tensor,
    temperatures: np.ndarray[Any, Any],
    raw: np.ndarray[Any, Any],
    *,
    entropy: Entropy,
) -> Scores:
    """The scores of targets [B, N] from logits [B, N, V]."""
    hot = None if (temperatures == 1).all() else torch.from_numpy(temperatures).to(logits.device)
    logprobs = _logprobs(logits, targets, hot)
    as_delivered = logprobs.detach()
    if raw.any():
        before = _logprobs(logits.detach(), targets, None)
        as_delivered = torch.where(
            torch.from_numpy(raw).to(logits.device).bool(), before, as_delivered
        )
    if entropy == "none":
        return Scores(logprobs, as_delivered, torch.zeros_like(as_delivered))
    measured = _entropy(logits if entropy == "learned" else logits.detach(), trained, hot)
    return Scores(logprobs, as_delivered, measured)


def _logprobs(logits: Tensor, targets: Tensor, temperatures: Tensor | None) -> Tensor:
    """`token_logprobs`, some rows at a time: float32 copies of all logits would take most of the
    memory, so the backward pass makes those of each part again."""
    logits, shape = logits.flatten(0, 1), targets.shape
    hot = [None] if temperatures is None else temperatures.flatten().split(_ROWS)
    parts = zip(logits.split(_ROWS), targets.flatten().split(_ROWS), itertools.cycle(hot))
    again = partial(checkpoint, token_logprobs, use_reentrant=False, preserve_rng_state=False)
    compute = again if logits.requires_grad and len(logits) > _ROWS else token_logprobs
    return torch.cat([compute(*part) for part in parts]).view(shape)


def _entropy(logits: Tensor, trained: Tensor, temperatures: Tensor | None) -> Tensor:
    """The entropy of each distribution [B, N], 0 where `trained` is not."""
    found = torch.zeros(trained.shape, device=logits.device)
    for rows in trained.nonzero().split(_ROWS):
        where = (rows[:, 0], rows[:, 1])
        some = logits[where].float()
        if temperatures is not None:
            some = some / temperatures[where].unsqueeze(-1)
        logs = some.log_softmax(-1)
        found[where] = -(logs.exp() * logs).sum(-1)
    return found


def _checkpoint_activations(model: Any) -> None:
    """Turns gradient checkpointing on; what is inside of each layer stays without dropout."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # it is only done in training


def _with_lora(model: Any, lora: LoraSettings) -> Any:
    from peft import LoraConfig, get_peft_model

    targets: str | list[str] = lora.targets
    if targets != "all-linear":
        targets = [name.strip() for name in lora.targets.split(",")]
    text = model.get_decoder()
    decoder = next((name for name, module in model.named_modules() if module is text), "")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
        target_modules=targets,
        # Layers that see images have none: engines take adapters of the language's layers alone.
        exclude_modules=rf"(?!{re.escape(decoder)}\.).*" if decoder else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def tensors(batch: Padded, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Delivered logprobs and mask [B, N] of the targets from `batch.first` on, advantages [B] or
    [B, N], and weights [B]."""
    arrays: tuple[np.ndarray[Any, Any], ...] = (
        batch.logprobs[:, batch.first :],
        batch.mask[:, batch.first :],
        batch.advantages if batch.advantages.ndim == 1 else batch.advantages[:, batch.first :],
        batch.weights,
    )
    first, second, third, fourth = (torch.from_numpy(array).to(device) for array in arrays)
    return first, second, third, fourth
