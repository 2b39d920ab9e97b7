"""The Triton kernels without a GPU, where Triton is installed (`pip install triton`): compiled for cards, and interpreted.

On a GPU tests/trainer/modeling/{test_attention,test_losses}.py and tests/trainer/pipeline/test_sums.py run them as they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
]


def compiled(
    function: Any, constants: dict[str, Any], types: dict[str, str], capability: int, **options: int
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = function.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(function, signature, {(names.index(n),): value for n, value in constants.items()})
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("width", "wide"), [(128, True), (128, False), (80, True), (64, False)])
@pytest.mark.parametrize("together", [1, 4])
def test_attention_compiles(capability: int, width: int, wide: bool, together: int) -> None:
    from trainer.kernels import anchor_attention as kernels

    tensors = dict.fromkeys(["Q", "KEYS", "VALUES", "CK", "CV", "OUT", "DO", "DQ", "DK", "DV"], "*bf16")
    types = tensors | {"LSE": "*fp32", "DELTA": "*fp32", "first": "*i32", "last": "*i32", "scale": "fp32"}
    functions = (kernels._forward, kernels._queries, kernels._context_keys, kernels._own_keys)
    room = 227 if capability == 90 else 163  # KiB of shared memory that a program may have
    tilings = kernels.WIDE if wide and capability == 90 else kernels.NARROW
    for function, tiling in zip(functions, tilings, strict=True):
        constants = {"K": 16, "G": 4, "D": width, "BD": 128 if width > 64 else 64}
        constants |= {"BM": tiling.queries, "BN": tiling.keys}
        if function is kernels._context_keys:
            constants |= {"BA": 512, "HEADS": together}
            types = types | (dict.fromkeys(["DK", "DV"], "*fp32") if together == 1 else {})
        made = compiled(
            function, constants, types, capability, num_warps=tiling.warps, num_stages=tiling.stages
        )
        assert made.metadata.shared <= room << 10
        types = types | {"DK": "*bf16", "DV": "*bf16"}


@pytest.mark.parametrize("capability", [80, 90])
def test_cross_entropy_compiles(capability: int) -> None:
    from trainer.kernels import cross_entropy as kernel

    types = {"LOGITS": "*bf16", "LABELS": "*i64", "VALID": "*i1", "CE": "*fp32", "HIT": "*i1", "OUT": "*bf16"}
    absent: dict[str, Any] = {"SCALE": None, "OWN": None}
    constants = {"BLOCK": kernel.BLOCK, "MOST": 0}
    compiled(kernel._row, constants | absent, types, capability, num_warps=kernel.WARPS)
    if capability >= 90:  # e4m3 is not below 8.9
        types |= {"OUT": "*fp8e4nv", "SCALE": "*fp32", "OWN": "*fp32"}
        compiled(kernel._row, constants | {"MOST": 448}, types, capability, num_warps=kernel.WARPS)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("norm", [False, True])
def test_rotation_compiles(capability: int, width: int, norm: bool) -> None:
    from trainer.kernels import decoder as kernels

    types = {"X": "*bf16", "OUT": "*bf16", "COS": "*bf16", "SIN": "*bf16", "eps": "fp32"}
    types |= {"QUERY": "*bf16", "KEY": "*bf16"} if norm else {}
    constants = {"HALF": width // 2, "WIDTH": 64, "NORM": norm}
    constants |= {"TOKENS": kernels.TOKENS, "TOGETHER": kernels.TOGETHER}
    absent: dict[str, Any] = {} if norm else {"QUERY": None, "KEY": None}
    compiled(kernels._rotate, constants | absent, types, capability, num_warps=kernels.WARPS)


@pytest.mark.parametrize("block", [512, 16384, 32768])
def test_swiglu_compiles(block: int) -> None:
    from trainer.kernels import decoder as kernels

    types = {"BOTH": "*bf16", "OUT": "*fp8e4nv", "SCALE": "*fp32"}
    compiled(kernels._swiglu, {"MOST": 448.0, "BLOCK": block}, types, 90, num_warps=32)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_sums_compile(count: int, dtype: str) -> None:
    from trainer.kernels import sums as kernel

    types = {"OUT": "*fp32"} | {f"P{n}": dtype for n in range(count)}
    absent = {f"P{n}": None for n in range(count, kernel.AT_ONCE)}
    constants = {"COUNT": count, "BLOCK": kernel.BLOCK}
    compiled(kernel._sum, constants | absent, types, 80, num_warps=kernel.WARPS)


INTERPRETED = """
import torch
import torch.nn.functional as F
from tests.trainer.pipeline.sums import in_pairs
from trainer.kernels import anchor_attention, cross_entropy, decoder, sums
from trainer.kernels.cross_entropy import cross_entropy_
from trainer.modeling import attention, losses
from trainer.modeling.decoder import rotate
from trainer.modeling.drafter import RMSNorm

def turn(b, s, h, kv, d, each, norm):
    "Whether one rotation serves all rows or each has its own."
    projected = torch.randn(b, s, (h + 2 * kv) * d)
    angles = torch.rand(b if each else 1, 1, s, d // 2).repeat(1, 1, 1, 2)
    norms = RMSNorm(d, 1e-3), RMSNorm(d, 1e-3)
    for part in norms:
        torch.nn.init.normal_(part.weight)
    gains = tuple(part.weight.detach() for part in norms) if norm else None
    got = decoder.rotate(projected, h, kv, angles.cos(), angles.sin(), gains, 1e-3)
    query, keys, _ = projected.unflatten(-1, (-1, d)).split((h, kv, kv), 2)
    if norm:
        query, keys = norms[0](query), norms[1](keys)
    wanted = rotate(torch.cat((query, keys), 2).transpose(1, 2), (angles.cos(), angles.sin())).transpose(1, 2)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)

def attend(b, h, kv, a, k, s, d, kind, together):
    anchor_attention.heads_together = lambda device, programs, heads: heads if together else 1
    parts = [torch.randn(b, n, heads, d, requires_grad=True) for n, heads in ((a*k, h), (a*k, kv), (a*k, kv), (s, kv), (s, kv))]
    last = torch.rand(b, s).argsort(-1)[:, :a].sort(-1).values
    first = last // 20 * 20 if kind == "packed" else torch.zeros_like(last)
    if kind == "random":
        last = torch.randint(-1, s + 1, (b, a))
        first = torch.randint(0, s, (b, a)).clamp(max=last.clamp(min=0))
    mask = attention.AnchorMask(first.int(), last.int())
    out = attention.fused(*parts, *mask)[0]
    wanted = attention.dense_attention(*(part.transpose(1, 2) for part in parts), mask).transpose(1, 2)
    slope = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, parts, slope)]
    for x, y in zip(got, [wanted, *torch.autograd.grad(wanted, parts, slope)]):
        assert (x - y).norm() < 1e-4 * y.norm(), (kind, b, h, kv, a, k, s, d)

torch.manual_seed(0)
for sizes in ((1, 9, 4, 2, 16), (2, 5, 3, 1, 24), (3, 3, 8, 8, 6)):
    for each in (False, True):
        for norm in (False, True):
            turn(*sizes, each, norm)
for width in (16, 100):
    both, out, scale = 3 * torch.randn(5, 2 * width), torch.empty(5, width), torch.empty(5, 1)
    both[3] = 0
    decoder._swiglu[(5,)](both, out, scale, width, MOST=448.0, BLOCK=128)  # not rounded
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(out * scale, F.silu(gate) * up)
    torch.testing.assert_close(out.abs().amax(-1), torch.tensor([448.0] * 3 + [0.0, 448.0]))
for count in (*range(1, 10), 16, 17, 70):
    parts = [10.0 ** (n % 7) * torch.randn(5000) for n in range(count)]
    out = torch.full((5001,), torch.nan)
    sums.sum_in_pairs(out[:5000], parts)
    assert torch.equal(out[:5000], in_pairs(parts)) and out[5000].isnan()
for kind in ("sorted", "packed", "random"):
    attend(1, 4, 2, 10, 16, 100, 16, kind, kind == "sorted")
    attend(2, 2, 1, 9, 7, 70, 24, kind, kind != "sorted")
    attend(1, 2, 2, 40, 1, 40, 16, kind, False)
for v in (17, 9001, 33000):
    logits, labels, valid = 3 * torch.randn(7, v), torch.randint(v, (7,)), torch.arange(7) != 1
    labels[0], labels[2], labels[3] = logits[0].argmax(), 3, 9
    logits[2:4, [3, 9]] = 50.0
    logits[4, v // 2 :], labels[4], labels[5] = 200.0, v - 1, 0
    logits[5:, : v // 2] = -torch.inf  # tokens that are ruled out
    labels[6] = v - 1
    wide = logits.clone().requires_grad_()
    wanted = F.cross_entropy(wide, labels, reduction="none") * valid
    (slope,) = torch.autograd.grad(wanted.sum(), wide)
    hits = (logits.argmax(-1) == labels) & valid
    scale, own, others = *torch.empty(2, 7), torch.empty_like(logits)  # not rounded: the interpreter does it wrongly
    got = *cross_entropy._run(logits.clone(), labels, valid, others, scale, own, 448), others, scale[:, None], own
    for x, y in zip(got, losses.cross_entropy_fp8(logits, labels, valid)):
        narrow = y.dtype == torch.float8_e4m3fn
        torch.testing.assert_close(x.float(), y.float(), atol=2**-10 if narrow else 1e-6, rtol=1/15 if narrow else 1e-5)
    ce, hit = cross_entropy_(logits, labels, valid)
    torch.testing.assert_close(ce, wanted.detach())
    torch.testing.assert_close(logits, slope, atol=1e-6, rtol=1e-5)
    assert torch.equal(hit, hits) and hit[:4].tolist() == [True, False, True, False]
"""


def test_interpreted_kernels_are_the_plain_functions() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
