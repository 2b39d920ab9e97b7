"""The frozen target: hidden states after chosen layers for training, whole forward passes for evaluation."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer import gguf
from trainer.modeling import ModelError, documents, fp8
from trainer.modeling.decoder import DecoderLayer

# from_pretrained changes process-wide defaults while it runs, such as the dtype of new tensors
_LOADING = threading.Lock()

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


PLAIN_DECODERS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Families whose layers need nothing but the hidden states, positions and rotation: they can be run one by one."""


def layer_forward(
    layer: DecoderLayer,
    before: Tensor,
    added: Tensor,
    rotary: tuple[Tensor, Tensor],
    mask: documents.Mask = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`DecoderLayer.forward` as a function, which workers compile."""
    return layer(before, added, rotary, mask)


class _AllCaptured(Exception):
    """Raised by the hook of the last layer that is read: nothing behind it is wanted."""


@dataclass
class _Capture:
    """What the hooks of one forward collect; one a call, so that threads don't meet."""

    stop: bool
    states: dict[int, Tensor] = field(default_factory=dict)


_capture: ContextVar[_Capture | None] = ContextVar("capture", default=None)


class Target:
    """A causal language model of Hugging Face's, with hooks on the layers that the drafter reads.

    Attributes:
        model: the `PreTrainedModel`, in eval mode, without gradients.
        config: its configuration (the text part).
        layer_ids: 0-based; id i is read after layer i, before any final norm.
        by_layer: whether `features` runs the layers one by one, through `run_layer`; else the whole decoder does.
        plain_layers: what runs then, up to the last layer that is read.
        run_layer: `layer_forward`, or a compiled copy of it that a worker puts here.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int], path: Path | None = None) -> None:
        """Raises ModelError when the model's layers can't be found or an id is not one of them."""
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        self.path = path
        self.layer_ids = tuple(layer_ids)
        self._decoder = model.get_decoder()
        layers = _find_layers(self._decoder, self.config.num_hidden_layers)
        wrong = [i for i in self.layer_ids if not 0 <= i < len(layers)]
        if wrong or not self.layer_ids:
            raise ModelError(f"target layer ids {list(self.layer_ids)} must lie in 0..{len(layers) - 1}")
        last = max(self.layer_ids)
        for i in sorted(set(self.layer_ids)):
            layers[i].register_forward_hook(_hook(i, i == last))
        head = model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise ModelError(
                "the target's output head must be one matrix without a bias: a drafter is served with that"
            )
        self.head: Tensor = head.weight.detach()
        """`[V, D]`; where the model ties them, the same memory as the embedding."""
        self.embedding: Tensor = _embedding_table(model.get_input_embeddings())
        """`[V, D]`."""
        names = inspect.signature(self._decoder.forward).parameters
        self.by_layer = _is_plain(self._decoder, self.config)
        self.plain_layers = [DecoderLayer(layer) for layer in layers[: last + 1]] if self.by_layer else []
        self.run_layer = layer_forward
        self.cache_argument = "cache" if "cache" in names else "past_key_values"
        """The name of the forward's cache argument; it changed within transformers 5."""

    @classmethod
    def load(
        cls, path: str | Path, device: str | torch.device, dtype: str | torch.dtype, layer_ids: Sequence[int]
    ) -> Target:
        """Load from a local folder in Hugging Face layout, or a GGUF file. Never downloads.

        Args:
            path: the folder or the `.gguf` file.
            device: where to run.
            dtype: a torch dtype or its name; "auto": bfloat16 on CUDA, float32 elsewhere.
            layer_ids: layers to read, 0-based.

        Raises:
            ModelError: nothing there, damaged, or not a causal language model.
        """
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # a run's log is made of lines
        path, device = Path(path), torch.device(device)
        dtype = resolve_dtype(dtype, device)
        with _LOADING, _explained(path):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **_source(path), dtype=dtype, output_loading_info=True
            )
            model, found = loaded
        faults = [n for key in ("missing_keys", "mismatched_keys", "error_msgs") for n in found.get(key, ())]
        if faults:  # Hugging Face would leave random numbers there and warn
            raise ModelError(
                f"{path}: lacks weights, or has them in another shape: {sorted(map(str, faults))[:4]}"
            )
        return cls(model.to(device), layer_ids, path)

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    def features(
        self, input_ids: Tensor, lengths: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the chosen layers, side by side; later layers and the head don't run.

        Rows are padded on the right. Attention is causal, so the features of real tokens don't depend on
        the padding and no mask is needed; the features of padding are set to zero when `lengths` is given.

        Args:
            input_ids: `[B, S]`.
            lengths: real tokens a row, `[B]`.
            starts: where each token's document begins in its row, `[B, S]`; None: one document a row.

        Returns:
            `[B, S, F*D]`, in the order of `layer_ids`.

        Raises:
            ModelError: several documents a row, for a target that does not run `by_layer`.
        """
        capture = _Capture(stop=True)
        if self.by_layer:
            self._run_layers(input_ids, starts, capture)
        elif starts is not None:
            raise ModelError(f"{type(self.model).__name__} can't read several documents in a row")
        else:
            with torch.inference_mode(), _capturing(capture), contextlib.suppress(_AllCaptured):
                self._decoder(input_ids=input_ids, use_cache=False)
        features = self._joined(capture)
        if lengths is not None:
            padding = torch.arange(input_ids.shape[1], device=input_ids.device) >= lengths[:, None]
            features.masked_fill_(padding[..., None], 0)
        return features

    @torch.no_grad()
    def _run_layers(self, input_ids: Tensor, starts: Tensor | None, capture: _Capture) -> None:
        """Up to the last layer that is read. Nothing here asks the device for a value, as the decoder's own
        forward does when it looks for packed rows: so it can be captured in a CUDA graph."""
        hidden = self._decoder.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        mask = None
        if starts is not None:
            positions, mask = positions - starts, documents.document_mask(starts)
        rotary = self._decoder.rotary_emb(hidden, positions)
        rotary = (rotary[0][:, None], rotary[1][:, None])
        added = torch.zeros_like(hidden)
        for index, layer in enumerate(self.plain_layers):
            entered, hidden, added = self.run_layer(layer, hidden, added, rotary, mask)
            if index - 1 in self.layer_ids:
                capture.states[index - 1] = entered
        capture.states[len(self.plain_layers) - 1] = hidden + added

    def to_fp8(self) -> None:
        """From now on compute `features` in 8 bits, by copies of the weights; `step` stays as it is. Raises ModelError
        where it can't be done."""
        require_plain("runtime.fp8_target", self.by_layer)
        sides = (side for layer in self.plain_layers for side in layer.widths)
        fp8.require("runtime.fp8_target", self.device, self.dtype, sides)
        self.plain_layers = [layer.in_fp8() for layer in self.plain_layers]

    def step(self, input_ids: Tensor, cache: Any, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """One forward of the whole model behind what `cache` holds, which it extends.

        Args:
            input_ids: `[B, n]`.
            cache: from `new_cache`.
            last_only: logits of the last token only.

        Returns:
            logits `[B, n or 1, V]` and features `[B, n, F*D]`.
        """
        capture = _Capture(stop=False)
        with _capturing(capture):
            out = self.model(
                input_ids=input_ids,
                use_cache=True,
                logits_to_keep=int(last_only),
                **{self.cache_argument: cache},
            )
        return out.logits, self._joined(capture)

    def new_cache(self) -> Any:
        """An empty key-value cache that can be cropped.

        Every layer keeps all positions, sliding ones too; their mask hides what is out of the window.

        Raises ModelError for a target whose state can't be rolled back (recurrent, linear attention).
        """
        from transformers import DynamicCache

        kinds = set(getattr(self.config, "layer_types", None) or ())
        beyond = sorted(kinds - {"full_attention", "sliding_attention"})
        if beyond or getattr(self.model, "_is_stateful", False):
            raise ModelError(
                f"{type(self.model).__name__} has layers whose state can't be rolled back after a rejected draft"
                + (f" ({', '.join(beyond)})" if beyond else "")
                + "; it can be trained against, not evaluated here"
            )
        return DynamicCache()

    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a generation, from the generation config and the model's."""
        found: set[int] = set()
        for config in (getattr(self.model, "generation_config", None), self.config):
            value = getattr(config, "eos_token_id", None)
            if value is not None:
                found.update(value if isinstance(value, (list, tuple)) else [value])
        return frozenset(found)

    def _joined(self, capture: _Capture) -> Tensor:
        # outside inference mode on purpose: an inference tensor can't be saved for the drafter's backward
        with torch.no_grad():
            return torch.cat([capture.states[i] for i in self.layer_ids], -1)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """A dtype, its name, or "auto" (bfloat16 on CUDA, float32 elsewhere)."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[dtype]


def load_config(path: str | Path) -> Any:
    """A target's `PreTrainedConfig`, without its weights. Raises ModelError."""
    from transformers import AutoConfig

    with _explained(Path(path)):
        return AutoConfig.from_pretrained(**_source(Path(path)))


def can_pack(config: Any) -> bool:
    """Whether a target of that configuration can read several documents in a row: whether it is run by layers.

    Looks at the model that the configuration makes, without memory for its weights. Raises ModelError.
    """
    from transformers import AutoModelForCausalLM

    if config.get_text_config().model_type not in PLAIN_DECODERS:
        return False  # before a model of many parts is made
    with _explained(Path(config.name_or_path)), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return _is_plain(model.get_decoder(), model.config.get_text_config())


def require_plain(setting: str, by_layer: bool) -> None:
    """Raise ModelError, which names the setting, for a target that does not run `by_layer`."""
    if not by_layer:
        raise ModelError(
            f"{setting} needs a {'/'.join(sorted(PLAIN_DECODERS))} model with full attention, which the target is not. "
            "Leave it out, or set it to false"
        )


def _source(path: Path) -> dict[str, Any]:
    """How from_pretrained is told of a folder or a GGUF file. Raises ModelError when neither is there, or can't be read."""
    if gguf.is_gguf(path):
        if command := gguf.lacking():
            raise ModelError(f"{path}: a GGUF file needs packages that are not installed: {command}")
        return {
            "pretrained_model_name_or_path": str(path.parent),
            "gguf_file": path.name,
            "local_files_only": True,
        }
    if not path.exists():
        raise ModelError(f"{path}: no such model folder")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: not a model folder (no config.json in it) and not a .gguf file")
    return {"pretrained_model_name_or_path": str(path), "local_files_only": True}


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what the loaders raise over a damaged model, of whatever library, into a ModelError."""
    try:
        yield
    except (ModelError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        text = str(error).strip().splitlines()
        raise ModelError(
            f"{path}: can't be loaded: {type(error).__name__}: {text[0] if text else ''}"
        ) from error


@contextlib.contextmanager
def _capturing(capture: _Capture) -> Iterator[None]:
    token = _capture.set(capture)
    try:
        yield
    finally:
        _capture.reset(token)


def _hook(index: int, is_last: bool) -> Any:
    def keep(module: nn.Module, args: Any, output: Any) -> None:
        capture = _capture.get()
        if capture is None:
            return
        capture.states[index] = output[0] if isinstance(output, tuple) else output
        if is_last and capture.stop:
            raise _AllCaptured

    return keep


def _find_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The decoder's list of layers: its only list of that length, whatever it is called."""
    found = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise ModelError(
            f"can't find the {count} layers of {type(decoder).__name__}: hidden states can't be read"
        )
    return found[0]


def _is_plain(decoder: nn.Module, config: Any) -> bool:
    """Whether `layer_forward` over the layers is the decoder's own forward: full attention, by SDPA (which is causal
    without a mask; others need one), and a rotation that doesn't depend on the length."""
    return (
        config.model_type in PLAIN_DECODERS
        and getattr(config, "_attn_implementation", None) == "sdpa"
        and set(getattr(config, "layer_types", None) or ("full_attention",)) == {"full_attention"}
        and not getattr(config, "sliding_window", None)
        and getattr(getattr(decoder, "rotary_emb", None), "rope_type", "")
        in ("default", "linear", "llama3", "yarn")
    )


def _embedding_table(module: Any) -> Tensor:
    """The vectors that ids turn into, `[V, D]`: the weight itself, unless the model scales it."""
    weight = module.weight
    if type(module) is nn.Embedding:
        return weight.detach()
    with torch.no_grad():
        return module(torch.arange(weight.shape[0], device=weight.device))
