"""Several documents in a row of the target: the mask against a double loop, and features against each document alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.modeling.conftest import VOCAB, llama, qwen3
from trainer.modeling import ModelError, documents
from trainer.modeling.target import Target, can_pack, layer_forward
from trainer.runtime import compile

ROWS = [[11, 1, 20], [40], [3, 3, 30, 4]]  # tokens of each row's documents
S = 40


def packed(rows: list[list[int]], size: int) -> tuple[Tensor, Tensor]:
    """Starts `[B, S]` and lengths `[B]` of rows of documents."""
    starts = torch.empty(len(rows), size, dtype=torch.int64)
    for row, sizes in enumerate(rows):
        begin = 0
        for n in sizes:
            starts[row, begin : begin + n] = begin
            begin += n
        starts[row, begin:] = begin
    return starts, torch.tensor([sum(sizes) for sizes in rows])


STARTS, LENGTHS = packed(ROWS, S)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(2, 60, (3, S), generator=torch.Generator().manual_seed(2))


def alone(target: Target, ids: Tensor) -> Tensor:
    """Features of every document by itself, put together as rows; padding is zero."""
    width = len(target.layer_ids) * target.config.hidden_size
    out = torch.zeros(*ids.shape, width, dtype=target.dtype)
    for row, sizes in enumerate(ROWS):
        begin = 0
        for n in sizes:
            here = slice(begin, begin + n)
            out[row, here] = target.features(ids[row : row + 1, here])[0]
            begin += n
    return out


@given(st.data())
@settings(max_examples=60)
def test_the_mask_is_the_double_loop(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 700))
    rows = []
    for _ in range(data.draw(st.integers(1, 2))):
        longest = data.draw(st.sampled_from([5, 128, 700]))
        sizes = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=8))
        while sum(sizes) > size:
            sizes.pop()
        rows.append(sizes)
    starts, _ = packed(rows, size)
    dense = documents.document_mask(starts)
    assert isinstance(dense, Tensor)
    assert dense.shape == (len(rows), 1, size, size)
    for row, begins in enumerate(starts.tolist()):
        for query in {0, size // 2, size - 1}:
            wanted = [begins[query] <= key <= query for key in range(size)]
            assert dense[row, 0, query].tolist() == wanted


@pytest.fixture(params=["dense", "ranges"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's mask, and the one that CUDA gets (by `dense_attention` here)."""
    if request.param == "ranges":
        monkeypatch.setattr(documents, "document_mask", documents.document_ranges)


@pytest.mark.usefixtures("_way")
def test_packed_features_are_those_of_each_document_alone(family: Callable[..., Any], ids: Tensor) -> None:
    target = Target(family().double(), (1, 3))
    features = target.features(ids, LENGTHS, STARTS)
    torch.testing.assert_close(features, alone(target, ids), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(features, target.features(ids, LENGTHS)), "documents do matter here"


def test_positions_begin_anew_in_each_document(family: Callable[..., Any], ids: Tensor) -> None:
    """Rotations are relative, so features alone would not show it."""
    target = Target(family(), (1,))
    seen: list[Tensor] = []

    def run_layer(layer: Any, before: Tensor, added: Tensor, rotary: Any, *rest: Any) -> Any:
        seen.append(rotary[0][0, 0])
        return layer_forward(layer, before, added, rotary, *rest)

    target.run_layer = run_layer
    target.features(ids, LENGTHS, STARTS)
    positions = torch.tensor([[*range(11), 0, *range(20), *range(8)]])
    wanted, _ = target.model.get_decoder().rotary_emb(torch.zeros(1), positions)
    assert all(torch.equal(cos, wanted[0]) for cos in seen)


@pytest.fixture
def _dynamo_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    yield
    compile.refuse_recompiles(False)
    torch._dynamo.reset()


@pytest.mark.usefixtures("_dynamo_alone", "_way")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_layer_takes_any_documents(ids: Tensor) -> None:
    """One graph for all layers and batches: the mask is data."""
    target = Target(qwen3(), (1, 3))
    expected = target.features(ids, LENGTHS, STARTS)
    target.run_layer = compile.compiled(layer_forward, 1)
    other, lengths = packed([[40], [20, 20], [1, 2]], S)
    target.features(ids, lengths, other)
    compile.refuse_recompiles()
    torch.testing.assert_close(target.features(ids, LENGTHS, STARTS), expected)


def test_whole_forwards_stay_hugging_faces(family: Callable[..., Any], ids: Tensor) -> None:
    """The layers' weights are shared; with a cache, padding or neither the model gives what it gave, bit for bit."""
    plain = family()
    with torch.no_grad():
        wanted = plain(ids, use_cache=False).logits
        keep = (torch.arange(S) < LENGTHS[:, None]).long()
        padded = plain(ids, attention_mask=keep, use_cache=False).logits
    target = Target(family(), (1,))
    assert Target(target.model, (1,)).by_layer
    with torch.no_grad():
        assert torch.equal(target.model(ids, use_cache=False).logits, wanted)
        assert torch.equal(target.model(ids, attention_mask=keep, use_cache=False).logits, padded)
    cache = target.new_cache()
    target.step(ids[:, :30], cache)
    torch.testing.assert_close(target.step(ids[:, 30:], cache)[0], wanted[:, 30:], rtol=1e-4, atol=1e-4)


def test_others_refuse_several_documents(ids: Tensor) -> None:
    model = qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=0, pad_token_id=0)
    target = Target(model, (1,))
    with pytest.raises(ModelError, match="Qwen3ForCausalLM can't read several documents in a row"):
        target.features(ids, LENGTHS, STARTS)


def test_what_can_be_packed_is_what_runs_by_layer() -> None:
    from transformers import Gemma3TextConfig

    for model in (qwen3(), llama(), qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=0)):
        assert can_pack(model.config) is Target(model, (1,)).by_layer
    assert not can_pack(Gemma3TextConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-3), (torch.bfloat16, 5e-2)])
def test_packed_features_on_cuda(dtype: torch.dtype, bound: float) -> None:
    """Compiled and captured, as workers run them: 1,000 tokens, against the CPU's mask in float64."""
    from trainer.runtime import graphs
    from trainer.runtime.devices import Device

    starts, lengths = packed([[300, 1, 400, 200], [1000]], 1000)
    ids = torch.randint(2, 60, (2, 1000), generator=torch.Generator().manual_seed(2))
    wanted = Target(qwen3(head_dim=16).double(), (1, 3)).features(ids, lengths, starts)
    target = Target(qwen3(head_dim=16).to("cuda", dtype), (1, 3))
    target.run_layer = compile.compiled(layer_forward, 1)
    device = Device(torch.device("cuda", 0))
    with device.entered():
        static = (ids.cuda(), lengths.cuda(), starts.cuda())
        got = [target.features(*static)]
        graph = graphs.Recorder(device).capture(functools.partial(target.features, *static))
        whole = (static[0], torch.full_like(static[1], 1000), torch.zeros_like(static[2]))
        graphs.fill(static, whole)
        graph.replay()  # other documents in between
        graphs.fill(static, (ids.cuda(), lengths.cuda(), starts.cuda()))
        got.append(graph.replay().clone())
        device.mark().wait()
    for features in got:
        error = (features.cpu().double() - wanted).abs().max() / wanted.abs().max()
        assert error < bound
