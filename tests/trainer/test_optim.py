"""The optimizer and the schedule."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer import optim
from trainer.optim import FlatParameters, MasterAdamW, Schedule


def _module(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.LayerNorm(7, bias=False), nn.Linear(7, 5, bias=False), nn.RMSNorm(5), nn.Linear(5, 3, bias=False)
    ).to(dtype)


def _gradients(count: int, size: int, seed: int = 1, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(("weight_decay", "clip"), [(0.0, 0.0), (0.1, 0.0), (0.1, 1.0)])
def test_updates_equal_pytorch(weight_decay: float, clip: float) -> None:
    """In float32 against torch.optim.AdamW parameter by parameter, norms without decay, clipping over all."""
    ours, theirs = _module(), _module()
    flat = FlatParameters(ours)
    adam = MasterAdamW(flat, betas=(0.9, 0.95), weight_decay=weight_decay, clip=clip)
    named = dict(theirs.named_parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() == 2], "weight_decay": weight_decay},
            {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        foreach=False,
    )
    for step, gradient in enumerate(_gradients(20, flat.weights.numel()), 1):
        for name, part in flat.split(gradient).items():
            named[name].grad = part.clone()
        if clip:
            norm = nn.utils.clip_grad_norm_(list(named.values()), clip)
        for group in reference.param_groups:
            group["lr"] = 1e-2 / step
        reference.step()
        assert not adam.step(gradient, 1e-2 / step)
        if clip:
            torch.testing.assert_close(adam.norm, norm)
        for name, view in flat.split(adam.masters).items():
            torch.testing.assert_close(view, named[name].detach(), rtol=2e-6, atol=1e-7)
            assert torch.equal(dict(ours.named_parameters())[name], view)


def _twin(
    w: list[float],
    decays: list[bool],
    gradients: list[list[float]],
    rates: list[float],
    decay: float,
    clip: float,
) -> list[float]:
    """AdamW from its definition, in Python's float64."""
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        norm = math.sqrt(sum(x * x for x in g))
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for i, x in enumerate(g):
            x *= scale
            m[i] = 0.9 * m[i] + 0.1 * x
            v[i] = 0.95 * v[i] + 0.05 * x * x
            w[i] -= rate * decay * w[i] * decays[i]
            w[i] -= rate * (m[i] / (1 - 0.9**t)) / (math.sqrt(v[i] / (1 - 0.95**t)) + 1e-8)
    return w


@settings(max_examples=25)
@given(
    st.integers(1, 8), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.5, 100.0]),
    st.floats(1e-4, 1e-1), st.integers(0, 1000),
)  # fmt: skip
def test_updates_equal_the_definition(steps: int, decay: float, clip: float, peak: float, seed: int) -> None:
    flat = FlatParameters(_module(seed=seed))
    schedule = Schedule(peak, steps, 0.25)
    gradients = _gradients(steps, flat.weights.numel(), seed)
    adam = MasterAdamW(flat, weight_decay=decay, clip=clip)
    decays = [i < flat.decayed for i in range(flat.weights.numel())]
    want = _twin(
        flat.weights.tolist(),
        decays,
        gradients.tolist(),
        [schedule.rate(n) for n in range(1, steps + 1)],
        decay,
        clip,
    )
    for n, gradient in enumerate(gradients, 1):
        adam.step(gradient, schedule.rate(n))
    torch.testing.assert_close(
        adam.masters.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_scale_and_compilation_change_nothing(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient of any dtype, to be multiplied by a scale: as if it had been multiplied before."""
    monkeypatch.setattr(optim, "PIECE", 7)
    compiled = torch.compile(optim.adamw_, backend="aot_eager", dynamic=False, fullgraph=True)
    whole = MasterAdamW(FlatParameters(_module()), weight_decay=0.1, update=compiled)
    pieces = MasterAdamW(FlatParameters(_module()), weight_decay=0.1)
    for gradient in _gradients(5, 62):
        gradient = gradient.to(dtype)
        whole.step(gradient, torch.tensor(1e-2), torch.tensor(0.25))
        pieces.step(gradient.float() * 0.25, 1e-2)
    assert torch.equal(whole.masters, pieces.masters)
    assert torch.equal(whole.norm, pieces.norm)
    torch._dynamo.reset()


def test_matrices_come_first_and_alone_decay() -> None:
    module = _module()
    flat = FlatParameters(module)
    assert list(flat.layout) == ["1.weight", "3.weight", "0.weight", "2.weight"]
    assert flat.decayed == 35 + 15
    adam = MasterAdamW(flat, weight_decay=0.5)
    before = adam.masters.clone()
    adam.step(torch.zeros(62), 0.1)  # decay alone acts
    torch.testing.assert_close(adam.masters[:50], before[:50] * 0.95)
    assert torch.equal(adam.masters[50:], before[50:])


def test_backward_fills_the_flat_gradient() -> None:
    module = _module()
    flat = FlatParameters(module)
    module(torch.randn(4, 7)).square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    for name, part in flat.split(flat.gather()).items():
        assert torch.equal(part, wanted[name])
    assert flat.gradients.count_nonzero() == flat.gradients.numel()
    assert all(p.grad is None for p in module.parameters()), "a later backward starts from nothing"


def test_what_a_backward_completes_first_can_be_gathered_while_it_goes_on() -> None:
    module = _module()
    flat = FlatParameters(module, early=["3.weight"])
    assert list(flat.layout) == ["3.weight", "1.weight", "0.weight", "2.weight"]
    assert (flat.early, flat.decayed) == (15, 35 + 15)
    for step in range(2):
        middle = module[:3](torch.randn(4, 7))
        middle.register_hook(lambda gradient: flat.gather_early())
        module[3](middle).square().sum().backward()
        assert module[3].weight.grad is None
        early = flat.gradients[:15].clone()
        assert early.any()
        flat.gradients[:15] = step
        assert (flat.gather()[:15] == step).all(), "taken once"
        assert flat.gradients.count_nonzero() >= 62 - 15
        assert all(p.grad is None for p in module.parameters())


def test_bfloat16_weights_round_float32_masters() -> None:
    """Steps too small for bfloat16 add up in the masters."""
    flat = FlatParameters(_module(torch.bfloat16))
    adam = MasterAdamW(flat, clip=0)
    start = adam.masters.clone()
    for _ in range(100):
        adam.step(torch.ones(62), 1e-5)
    torch.testing.assert_close(adam.masters, start - 1e-3, rtol=0, atol=1e-5)
    assert flat.weights.dtype == torch.bfloat16
    assert torch.equal(flat.weights, adam.masters.bfloat16())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_gradient_changes_nothing(poison: float) -> None:
    flat, clean = FlatParameters(_module()), FlatParameters(_module())
    adam, reference = MasterAdamW(flat), MasterAdamW(clean)
    gradients = _gradients(4, flat.weights.numel())
    for n, gradient in enumerate(gradients):
        if n == 2:
            poisoned = gradient.clone()
            poisoned[3] = poison
            assert adam.step(poisoned, 1e-2)
            assert adam.step(gradient, 1e-2, loss=torch.tensor(poison))
        for optimizer in (adam, reference):
            optimizer.step(gradient, 1e-2)
    assert torch.equal(adam.masters, reference.masters)
    assert (adam.updates, adam.dropped, reference.dropped) == (4, 2, 0)


def test_latched_everything_after_a_nonfinite_gradient_is_dropped() -> None:
    adam = MasterAdamW(FlatParameters(_module()), latch=True)
    adam.step(torch.full((62,), math.nan), 1e-2)
    before = adam.masters.clone()
    assert not adam.step(torch.ones(62), 1e-2)
    assert torch.equal(adam.masters, before)
    assert adam.dropped == 2


def test_loaded_state_goes_on_bit_for_bit() -> None:
    gradients = _gradients(6, 62)
    whole, first = (
        MasterAdamW(FlatParameters(_module()), weight_decay=0.1),
        MasterAdamW(FlatParameters(_module()), weight_decay=0.1),
    )
    for gradient in gradients:
        whole.step(gradient, 1e-2)
    for gradient in gradients[:3]:
        first.step(gradient, 1e-2)
    state = {kind: {n: t.clone() for n, t in named.items()} for kind, named in first.state()}
    second = MasterAdamW(FlatParameters(_module(seed=9)), weight_decay=0.1)
    second.load(**state, updates=int(first.updates))
    for gradient in gradients[3:]:
        second.step(gradient, 1e-2)
    assert torch.equal(whole.masters, second.masters)
    assert torch.equal(whole.flat.weights, second.flat.weights)
    with pytest.raises(KeyError):
        second.load({})


def test_schedule_is_exact_at_its_ends() -> None:
    schedule = Schedule(6e-4, 1000, 0.04)
    assert schedule.rate(1) == pytest.approx(6e-4 / 40, rel=1e-15)
    assert schedule.rate(40) == 6e-4
    assert schedule.rate(41) < 6e-4
    assert schedule.rate(1000) == pytest.approx(6e-4 * (1 + math.cos(math.pi * 960 / 961)) / 2, rel=1e-15)
    assert 0 < schedule.rate(1000) < 6e-4 / 1e4
    assert Schedule(1.0, 1, 0.04).rate(1) == 1.0
    assert Schedule(1.0, 1, 0.99).rate(1) == 1.0


@given(st.integers(1, 300), st.floats(0, 0.999))
def test_schedule_rises_to_one_peak_and_falls(steps: int, share: float) -> None:
    rates = [Schedule(1.0, steps, share).rate(n) for n in range(1, steps + 1)]
    top = rates.index(max(rates))
    assert rates[top] == 1.0
    falls = [b < a for a, b in itertools.pairwise(rates)]
    assert falls == [n >= top for n in range(steps - 1)]
    assert rates[-1] > 0
