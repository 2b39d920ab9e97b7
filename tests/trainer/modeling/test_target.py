"""Features against Hugging Face's own hidden states, loading, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.trainer.modeling.conftest import qwen3
from trainer.modeling import ModelError
from trainer.modeling.decoder import Projection
from trainer.modeling.target import PLAIN_DECODERS, Target, layer_forward, load_config, resolve_dtype
from trainer.runtime import compile

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(2, 60, (3, 17), generator=torch.Generator().manual_seed(2))


def test_features_are_hidden_states_one_index_on(family: Callable[..., Any], ids: torch.Tensor) -> None:
    model = family().double()  # our layers round otherwise: their products are wider
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    # the last layer is left out: Hugging Face gives its state behind the final norm
    layer_ids = tuple(range(model.config.num_hidden_layers - 1))
    features = Target(model, layer_ids).features(ids)
    for i, part in zip(layer_ids, features.chunk(len(layer_ids), -1), strict=True):
        torch.testing.assert_close(part, states[i + 1], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(features[..., : states[0].shape[-1]], states[0])


def test_the_last_layer_is_read_before_the_final_norm(family: Callable[..., Any], ids: torch.Tensor) -> None:
    model = family()
    last = model.config.num_hidden_layers - 1
    features = Target(model, (last,)).features(ids)
    with torch.no_grad():
        normed = model(ids, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(model.model.norm(features), normed)


def test_layers_behind_the_last_one_and_the_head_do_not_run(
    family: Callable[..., Any], ids: torch.Tensor
) -> None:
    model = family()
    target = Target(model, (1, 3))
    ran: list[str] = []
    for name in ("model.layers.3", "model.layers.4", "model.norm", "lm_head"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    assert target.features(ids).shape == (3, 17, 2 * model.config.hidden_size)
    assert "model.layers.4" not in ran
    assert "lm_head" not in ran
    assert "model.norm" not in ran


def test_right_padding_needs_no_mask(family: Callable[..., Any], ids: torch.Tensor) -> None:
    target = Target(family().double(), (0, 2))
    lengths = torch.tensor([17, 9, 1])
    padded = ids.clone()
    for row, n in enumerate(lengths.tolist()):
        padded[row, n:] = 0
    features = target.features(padded, lengths)
    for row, n in enumerate(lengths.tolist()):
        alone = target.features(ids[row : row + 1, :n])
        torch.testing.assert_close(features[row : row + 1, :n], alone, rtol=1e-9, atol=1e-9)
        assert not features[row, n:].any()


def test_features_can_enter_a_backward(family: Callable[..., Any], ids: torch.Tensor) -> None:
    features = Target(family(), (1,)).features(ids)
    assert not features.is_inference()
    assert not features.requires_grad
    weight = torch.ones(features.shape[-1], requires_grad=True)
    (features @ weight).sum().backward()


def test_threads_with_replicas_and_threads_with_one_target(
    family: Callable[..., Any], ids: torch.Tensor
) -> None:
    shared, expected = Target(family(), (1, 3)), Target(family(), (1, 3)).features(ids)
    wrong: list[str] = []

    def work(target: Target) -> None:
        for _ in range(15):
            if not torch.equal(target.features(ids), expected):
                wrong.append("features")
            with torch.no_grad():
                target.model(ids[:1, :4])  # a whole forward of somebody else's, hooks in place

    targets = [shared, shared, Target(family(), (1, 3))]
    threads = [threading.Thread(target=work, args=(t,)) for t in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_error_inside_the_model_is_not_swallowed(family: Callable[..., Any]) -> None:
    target = Target(family(), (1,))
    with pytest.raises(IndexError):
        target.features(torch.tensor([[10_000]]))


def test_embedding_and_head_tied_and_not(tmp_path: Path, ids: torch.Tensor) -> None:
    for tied in (True, False):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=4, head_dim=8
        )
        config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings = 2, 1, tied
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(tmp_path / str(tied))
        target = Target.load(tmp_path / str(tied), "cpu", "auto", (1,))
        assert target.dtype == torch.float32
        assert target.embedding.shape == target.head.shape == (50, 16)
        assert torch.equal(target.embedding, target.head) is tied
        assert (target.embedding.data_ptr() == target.head.data_ptr()) is tied
        assert torch.equal(target.head, model.lm_head.weight), "a tied head must not stay random"
        cache = target.new_cache()
        logits, features = target.step(ids[:1] % 50, cache)
        assert torch.allclose(logits, model(ids[:1] % 50).logits, atol=1e-5)
        assert torch.allclose(features, target.features(ids[:1] % 50), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_dtype_is_as_asked(tmp_path: Path, family: Callable[..., Any], ids: torch.Tensor, dtype: str) -> None:
    family().save_pretrained(tmp_path)
    target = Target.load(tmp_path, "cpu", dtype, (1,))
    assert target.features(ids).dtype == target.head.dtype == resolve_dtype(dtype, target.device)


def test_missing_and_damaged_models_are_explained(tmp_path: Path, family: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match="nowhere: no such model folder"):
        Target.load(tmp_path / "nowhere", "cpu", "auto", (1,))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_config(tmp_path / "empty")
    broken = tmp_path / "broken"
    family().save_pretrained(broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="broken: can't be loaded"):
        Target.load(broken, "cpu", "auto", (1,))
    weights.unlink()
    with pytest.raises(ModelError, match="can't be loaded"):
        Target.load(broken, "cpu", "auto", (1,))
    (broken / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match="can't be loaded"):
        load_config(broken)


def test_weights_that_lack_tensors_are_refused(tmp_path: Path, family: Callable[..., Any]) -> None:
    """Hugging Face would fill the gap with random numbers and a warning."""
    model = family()
    state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"lacks weights.*layers\.1\.mlp"):
        Target.load(tmp_path, "cpu", "auto", (1,))


def test_layer_ids_out_of_range_are_refused(family: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match=r"\[1, 9\] must lie in 0\.\."):
        Target(family(), (1, 9))


def test_scaled_embedding_is_the_vectors_the_model_uses() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    )
    config.num_key_value_heads, config.head_dim = 1, 8
    model = Gemma3ForCausalLM(config).eval()
    target = Target(model, (1,))
    ids = torch.tensor([[3, 7]])
    assert torch.equal(target.embedding[ids], model.get_input_embeddings()(ids))
    assert not torch.equal(target.embedding, model.get_input_embeddings().weight)


def test_a_state_that_can_not_be_rolled_back_is_refused(family: Callable[..., Any]) -> None:
    model = family()
    target = Target(model, (1,))
    model.config.layer_types = ["linear_attention"] * model.config.num_hidden_layers
    with pytest.raises(ModelError, match=r"can't be rolled back.*linear_attention"):
        target.new_cache()


def test_stop_ids_come_from_both_configs(family: Callable[..., Any]) -> None:
    model = family()
    model.generation_config.eos_token_id = [5, 6]
    assert Target(model, (1,)).stop_ids() == {1, 5, 6}


def plain(kind: str, head_dim: int) -> Any:
    """A model of that family in float64, with biases, where it has any, and norms that are not 1: as a trained one."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": head_dim, "vocab_size": 64, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **shape, sliding_window=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 5)
    return model


@pytest.mark.parametrize("kind", sorted(PLAIN_DECODERS))
def test_plain_families_run_layer_by_layer_and_give_the_decoders_states(kind: str, ids: torch.Tensor) -> None:
    target = Target(plain(kind, 8), (0, 3))
    assert target.by_layer
    by_layer = target.features(ids)
    target.by_layer = False
    torch.testing.assert_close(target.features(ids), by_layer, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", sorted(PLAIN_DECODERS))
def test_plain_families_by_the_kernels(kind: str, ids: torch.Tensor) -> None:
    wanted = Target(plain(kind, 16), (0, 3)).features(ids)
    got = Target(plain(kind, 16).to("cuda", torch.float32), (0, 3)).features(ids.cuda())
    assert float((got.cpu().double() - wanted).abs().max() / wanted.abs().max()) < 5e-3


@pytest.mark.parametrize("kind", sorted(PLAIN_DECODERS))
def test_the_pages_name_each_plain_family(kind: str) -> None:
    for page in ("docs/training.md", "docs/decisions.md"):
        assert kind in (ROOT / page).read_text().lower()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attn_implementation": "eager"}, "eager attention without a mask is not causal"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "depends on the length"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "needs a mask of its own"),
    ],
)  # fmt: skip
def test_others_run_through_their_own_forward(changes: dict[str, Any], why: str, ids: torch.Tensor) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0}
    model = Qwen3ForCausalLM(Qwen3Config(**(shape | changes))).eval()
    target = Target(model, (1,))
    assert not target.by_layer, why
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True).hidden_states[2]
    torch.testing.assert_close(target.features(ids), wanted)


def test_fp8_is_refused_where_it_cannot_be(family: Callable[..., Any]) -> None:
    with pytest.raises(
        ModelError, match=r"fp8_target needs a GPU of compute capability 8.9 or newer, which cpu is not"
    ):
        Target(family(), (1,)).to_fp8()


def test_a_target_in_8_bits_may_be_asked_again() -> None:
    """One that was measured before the run is used in it: its weights are not to be rounded twice."""
    linear = torch.nn.Linear(32, 16)
    once = Projection.of(linear).in_fp8()
    again = once.in_fp8()
    assert torch.equal(again.weight.float(), once.weight.float())
    assert again.scale is not None
    torch.testing.assert_close(
        again.weight.float() * again.scale, linear.weight.detach(), rtol=0.07, atol=1e-3
    )


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device of compute capability 8.9 or newer",
)
@pytest.mark.parametrize("compile_it", [False, True])
def test_fp8_features_are_close(family: Callable[..., Any], ids: torch.Tensor, compile_it: bool) -> None:
    """3 bits of mantissa: each product is off by a few percent, features after two layers by 7 to 9 (what products of the
    rounded numbers in float32 give too)."""
    sizes = {"hidden_size": 96, "intermediate_size": 208, "num_attention_heads": 6, "num_key_value_heads": 2}
    model = family(**sizes, head_dim=16, initializer_range=0.05).to("cuda", torch.bfloat16)
    target = Target(model, (1,))
    exact = target.features(ids.cuda()).float()
    target.to_fp8()
    if compile_it:
        target.run_layer = compile.compiled(layer_forward, 1)
    error = (target.features(ids.cuda()).float() - exact).norm() / exact.norm()
    assert 0.02 < error < 0.15


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp8_needs_sides_of_16() -> None:
    model = qwen3(intermediate_size=56).to("cuda", torch.bfloat16)
    if torch.cuda.get_device_capability() >= (8, 9):
        with pytest.raises(ModelError, match=r"multiples of 16; the target has \[56\]"):
            Target(model, (1,)).to_fp8()
