"""One training step, in the ways that the bench compares, on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.modeling import attention, documents
from trainer.modeling.drafter import Drafter
from trainer.modeling.losses import HeadFP8, block_loss, default_gamma
from trainer.modeling.target import Target, layer_forward
from trainer.optim import FlatParameters, MasterAdamW, adamw_
from trainer.pipeline.backward import draft
from trainer.pipeline.targets import DrafterBatch
from trainer.runtime import compile, graphs
from trainer.runtime.devices import Device
from trainer.workload import Workload, drafter_config, target_config

RATE = 6e-4

VARIANTS = ("plain", "eager", "compiled", "graphs", "fp8", "fp8-head")
CAPTURED = ("graphs", "fp8", "fp8-head")
FP8 = ("fp8", "fp8-head")


Phases = list[tuple[str, Callable[[], object]]]


def compute_dtype(cuda: bool) -> torch.dtype:
    """What a bench computes in."""
    return torch.bfloat16 if cuda else torch.float32


class Bench:
    """A target, a batch and the ways to take one step with them. `step(variant)` makes the phases of one."""

    def __init__(self, work: Workload, device: Device) -> None:
        self.work = work
        self.device = device
        self.dtype = compute_dtype(device.cuda)
        self.shape = drafter_config(work)
        self.target = self._make_target()
        self._layers = self.target.plain_layers
        torch.manual_seed(0)
        self.ids = torch.randint(self.shape.vocab_size - 1, (work.batch, work.sequence), device=device.torch)
        self.batch = self._batch()
        self.host = [t.cpu().pin_memory() if device.cuda else t.clone() for t in self.batch[1:]]
        """The batch as the data's reader leaves it: all but the features."""
        self.state: dict[str, Any] = {}  # what phases leave to later ones
        self.loss = torch.zeros((), device=device.torch)
        self.first_loss: Tensor | None = None
        self.phases: Phases = []
        """What was measured last."""

    def _make_target(self) -> Target:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        with torch.device(self.device.torch):
            model = AutoModelForCausalLM.from_config(
                target_config(self.work.shape), dtype=self.dtype, attn_implementation="sdpa"
            )
        return Target(model, self.shape.target_layer_ids)

    def _batch(self) -> DrafterBatch:
        """Anchors drawn uniformly, sorted; every slot that lies in its document has a label."""
        work, device = self.work, self.device.torch
        starts = torch.arange(work.sequence, device=device) // work.document * work.document
        starts = starts.repeat(work.batch, 1)
        keys = torch.rand(work.batch, work.sequence - 1, device=device)
        anchors = keys.argsort(-1)[:, : work.anchors].sort(-1).values
        slots = anchors[..., None] + torch.arange(1, work.block, device=device)
        end = (starts.gather(1, anchors) + work.document).clamp(max=work.sequence)
        inside = slots < end[..., None]
        labels = self.ids.gather(1, slots.clamp(max=work.sequence - 1).flatten(1)).view_as(slots)
        width = len(self.shape.target_layer_ids) * self.shape.hidden_size
        return DrafterBatch(
            features=torch.zeros(work.batch, work.sequence, width, dtype=self.dtype, device=device),
            tokens=self.ids.gather(1, anchors),
            anchors=anchors,
            valid=torch.ones_like(anchors, dtype=torch.bool),
            lengths=torch.full((work.batch,), work.sequence, device=device),
            starts=starts,
            labels=labels,
            labels_valid=inside,
        )

    def drafter(self) -> Drafter:
        """With the same weights every time, drawn on the device."""
        with torch.device("meta"):
            drafter = Drafter(self.shape)
        drafter = drafter.to_empty(device=self.device.torch).to(self.dtype)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1)
        return drafter

    def step(self, variant: str) -> Phases:
        """The phases of a step, by name, in order; compiled and captured when this returns."""
        return self._plain() if variant == "plain" else self._own(variant)

    def _own(self, variant: str) -> Phases:
        drafter = self.drafter()
        flat = FlatParameters(drafter)
        forward: Callable[..., Tensor] = draft
        update_with = None
        self.target.run_layer = layer_forward
        self.target.plain_layers = self._layers
        head: Tensor | HeadFP8 = self.target.head
        if variant in FP8:
            self.target.plain_layers = [layer.in_fp8() for layer in self._layers]
        if variant == "fp8-head":
            head = HeadFP8(self.target.head)
        if variant != "eager":
            forward, update_with = compile.compiled(draft, 1), compile.compiled(adamw_, 2)
            self.target.run_layer = compile.compiled(layer_forward, 1)
        optimizer = MasterAdamW(flat, update=update_with)
        rate = torch.full((), RATE, device=self.device.torch)
        state = self.state

        def target() -> None:
            packed = (self.batch.starts,) if self.work.documents > 1 else ()
            state["features"] = self.target.features(self.ids, self.batch.lengths, *packed)

        def channel() -> None:
            state["batch"] = self._delivered(state["features"])

        def draft_forward() -> None:
            state["hidden"] = forward(drafter, self.target.embedding, state["batch"])

        def loss() -> None:
            batch = state["batch"]
            state["loss"] = block_loss(state["hidden"], head, batch.labels, batch.labels_valid)
            self.loss = state["loss"].loss.detach()

        def backward() -> None:
            (state.pop("loss").loss).backward()
            flat.gather()
            del state["hidden"]

        def update() -> None:
            optimizer.step(flat.gradients, rate, loss=self.loss)

        phases: Phases = [
            ("target", target), ("channel", channel), ("draft", draft_forward), ("loss", loss), ("backward", backward),
            ("optimizer", update),
        ]  # fmt: skip
        return self.captured(phases) if variant in CAPTURED else phases

    def _delivered(self, features: Tensor) -> DrafterBatch:
        """What a drafter is handed: the features as they are on one device, the rest copied from the host."""
        rest = (tensor.to(self.device.torch, non_blocking=True) for tensor in self.host)
        return DrafterBatch(features, *rest)

    def captured(self, phases: Phases) -> Phases:
        """`phases` as the workers capture them: graphs of the target, of drafter forward, loss and backward, and of the
        update; between them a batch is copied into the tensors that the second one reads."""
        run = dict(phases)

        def learn() -> None:
            for name in ("draft", "loss", "backward"):
                run[name]()

        for _ in range(2):
            for _, function in phases:
                function()
            if self.first_loss is None:
                self.first_loss = self.loss.clone()
        recorder = graphs.Recorder(self.device)
        with compile.WARM_UP:
            target = recorder.capture(run["target"])
            features, self.state["batch"] = self.state["features"], self.batch
            learned, updated = recorder.capture(learn), recorder.capture(run["optimizer"])

        def channel() -> None:
            # a copy first, since the next batch's features come while this one's are read
            graphs.fill(self.batch, self._delivered(features.clone()))

        return [
            ("target", target.replay), ("channel", channel), ("draft+loss+backward", learned.replay),
            ("optimizer", updated.replay),
        ]  # fmt: skip

    def _plain(self) -> Phases:
        drafter = self.drafter()
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        state, work = self.state, self.work
        self.target.run_layer = layer_forward
        starts, packed = self.batch.starts, {}
        if work.documents > 1:
            positions = torch.arange(work.sequence, device=starts.device) - starts
            packed = {"attention_mask": documents.dense_documents(starts), "position_ids": positions}

        @torch.no_grad()
        def target() -> None:
            out = self.target.model(self.ids, output_hidden_states=True, use_cache=False, **packed)
            state["features"] = torch.cat([out.hidden_states[i + 1] for i in self.shape.target_layer_ids], -1)

        def channel() -> None:
            state["batch"] = self._delivered(state["features"])

        def draft_forward() -> None:
            with _dense_attention():
                state["hidden"] = draft(drafter, self.target.embedding, state["batch"])

        def loss() -> None:
            batch = state["batch"]
            logits = state.pop("hidden")[:, :, 1:] @ self.target.head.T
            ce = F.cross_entropy(logits.flatten(0, 2).float(), batch.labels.flatten(), reduction="none")
            slots = torch.arange(work.block - 1, device=ce.device)
            weights = torch.exp(-slots / default_gamma(work.block)) * batch.labels_valid
            state["loss"] = (ce.view_as(weights) * weights).sum() / weights.sum()
            self.loss = state["loss"].detach()

        def backward() -> None:
            state.pop("loss").backward()

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return [
            ("target", target), ("channel", channel), ("draft", draft_forward), ("loss", loss), ("backward", backward),
            ("optimizer", update),
        ]  # fmt: skip


class _dense_attention:
    """While active, the drafter's attention is the dense one on CUDA too."""

    def __enter__(self) -> None:
        self._attend = attention.attend_anchors
        attention.attend_anchors = attention.dense_attention

    def __exit__(self, *error: object) -> None:
        attention.attend_anchors = self._attend
