"""Every layout written is read back as the same function."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer import export as module
from trainer.config import DrafterSection
from trainer.export import LAYOUTS, add_arguments, export, load_drafter, run
from trainer.modeling import ModelError
from trainer.modeling.drafter import Drafter, DrafterConfig
from trainer.modeling.target import Target


@pytest.fixture
def target(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=9, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def checkpoint(tmp_path: Path, target: Path) -> Path:
    config = DrafterConfig.for_target(
        Qwen3Config.from_pretrained(target), DrafterSection(block_size=4, mask_token_id=39)
    )
    folder = tmp_path / "step-00000010"
    folder.mkdir()
    (folder / "drafter.json").write_text(json.dumps(config.to_zlab()))
    save_file(Drafter(config, seed=5).state_dict(), folder / "drafter.safetensors")
    return folder


def logits(drafter: Drafter, target: Path) -> torch.Tensor:
    drafter = drafter.float()
    model = Target.load(target, "cpu", "float32", drafter.config.target_layer_ids)
    ids = torch.randint(2, 38, (2, 20), generator=torch.Generator().manual_seed(1))
    anchors = torch.tensor([[3, 11], [7, 15]])
    block = torch.full((2, 2, 4), 39)
    block[..., 0] = ids.gather(1, anchors)
    with torch.no_grad():
        context = drafter.fuse(model.features(ids))
        valid = torch.ones_like(anchors, dtype=torch.bool)
        return drafter(context, model.embedding[block], anchors, valid) @ model.head.T


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_explained(layout: str) -> None:
    assert f"\n{layout} " in str(module.__doc__)
    page = Path(module.__file__).parents[1] / "docs/method.md"
    assert f"| `{layout}` |" in page.read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_logits_after_the_round_trip(
    tmp_path: Path, target: Path, checkpoint: Path, layout: str
) -> None:
    config, original = load_drafter(checkpoint)
    export(checkpoint, tmp_path / "full", layout, "float32", target)
    export(checkpoint, tmp_path / "half", layout, "bfloat16", target)
    read, exact = load_drafter(tmp_path / "full")
    assert read == config
    expected = logits(original, target)
    assert torch.equal(logits(exact, target), expected)
    _, half = load_drafter(tmp_path / "half")
    assert half.fc.weight.dtype == torch.bfloat16
    assert half.inv_freq.dtype == torch.float32
    assert torch.equal(half.inv_freq, original.inv_freq)
    rounded = Drafter(config)
    rounded.load_state_dict({n: t.bfloat16() for n, t in original.state_dict().items()})
    assert torch.equal(logits(half, target), logits(rounded, target))
    torch.testing.assert_close(logits(half, target), expected, atol=0.05, rtol=0.05)


def test_zlab_layout(tmp_path: Path, checkpoint: Path) -> None:
    names = export(checkpoint, tmp_path / "out")
    state = load_file(tmp_path / "out/model.safetensors")
    assert len(names) == len(state) == 58
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["dflash_config"] == {"mask_token_id": 39, "target_layer_ids": [1, 2, 4, 5, 6]}
    assert (raw["block_size"], raw["dtype"], raw["num_target_layers"]) == (4, "bfloat16", 9)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", checkpoint.name, "target"]
    assert (tmp_path / "out/model.safetensors").stat().st_mode == (
        tmp_path / "out/config.json"
    ).stat().st_mode


def test_speculators_layout(tmp_path: Path, target: Path, checkpoint: Path) -> None:
    export(checkpoint, tmp_path / "out", "speculators", "bfloat16", target)
    state = load_file(tmp_path / "out/model.safetensors")
    assert len(state) == 60
    embedding = Target.load(target, "cpu", "bfloat16", (1,)).embedding
    assert torch.equal(state["embed_tokens.weight"], embedding)
    assert torch.equal(state["lm_head.weight"], embedding), "tied in this target"
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["aux_hidden_state_layer_ids"] == [2, 3, 5, 6, 7], "counted one higher than z-lab's"
    assert raw["speculators_model_type"] == "dflash"
    assert raw["sample_from_anchor"] is False
    assert raw["transformer_layer_config"]["layer_types"] == ["full_attention"] * 5
    methods = raw["speculators_config"]["proposal_methods"]
    assert methods == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert raw["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    with pytest.raises(ModelError, match="name it with --target"):
        export(checkpoint, tmp_path / "other", "speculators")


def test_speculators_files_of_others_need_not_tell_the_targets_depth(
    tmp_path: Path, target: Path, checkpoint: Path
) -> None:
    export(checkpoint, tmp_path / "out", "speculators", "bfloat16", target)
    path = tmp_path / "out/config.json"
    raw = json.loads(path.read_text())
    del raw["transformer_layer_config"]["num_target_layers"]
    path.write_text(json.dumps(raw))
    assert load_drafter(tmp_path / "out")[0] == load_drafter(checkpoint)[0]


def test_weights_named_with_a_model_prefix_are_read(tmp_path: Path, checkpoint: Path) -> None:
    export(checkpoint, tmp_path / "out")
    weights = tmp_path / "out/model.safetensors"
    save_file({f"model.{n}": t for n, t in load_file(weights).items()}, weights)
    assert load_drafter(tmp_path / "out")[0] == load_drafter(checkpoint)[0]


def test_a_runs_folder_means_its_newest_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    for step in (90, 100):
        shutil.copytree(checkpoint, tmp_path / f"run/checkpoints/step-{step:08}")
    (tmp_path / "run/checkpoints/step-00000090/drafter.json").unlink()
    (tmp_path / "run/checkpoints/.tmp-step-00000110").mkdir()
    assert load_drafter(tmp_path / "run")[0] == load_drafter(checkpoint)[0]


def test_faults_are_named(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="no drafter in it"):
        load_drafter(tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        load_drafter(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="something already"):
        export(checkpoint, checkpoint)
    weights = checkpoint / "drafter.safetensors"
    state = load_file(weights)
    save_file({n: t for n, t in state.items() if n != "fc.weight"} | {"d2t": torch.zeros(3)}, weights)
    with pytest.raises(ModelError, match=r"lacks fc\.weight; has d2t, which is not this drafter's"):
        load_drafter(checkpoint)
    save_file({**state, "fc.weight": torch.zeros(32, 32)}, weights)
    with pytest.raises(ModelError, match=r"fc\.weight as \[32, 32\] instead of \[32, 160\]"):
        load_drafter(checkpoint)
    weights.write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match="can't be read"):
        load_drafter(checkpoint)
    raw = json.loads((checkpoint / "drafter.json").read_text())
    (checkpoint / "drafter.json").write_text(json.dumps({**raw, "architectures": ["DominoDraftModel"]}))
    with pytest.raises(ModelError, match=f"{checkpoint.name}: .*only DFlashDraftModel"):
        load_drafter(checkpoint)
    (checkpoint / "drafter.json").write_text("{")
    with pytest.raises(ModelError, match="can't be read"):
        load_drafter(checkpoint)


def test_a_failed_export_leaves_nothing(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="out: can't be written"):
        export(checkpoint, checkpoint / "drafter.json/out")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.export.save_file", full)
    with pytest.raises(ModelError, match=r"out: can't be written: .*No space"):
        export(checkpoint, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == [checkpoint.name, "target"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"draft_vocab_size": 20}, "reduced draft vocabulary"),
        ({"speculators_model_type": "dspark"}, "only dflash"),
        ({"target_hidden_size": 99}, "target_hidden_size"),
    ],
)
def test_other_speculators_are_refused(
    tmp_path: Path, target: Path, checkpoint: Path, change: dict[str, object], message: str
) -> None:
    export(checkpoint, tmp_path / "out", "speculators", "bfloat16", target)
    path = tmp_path / "out/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelError, match=message):
        load_drafter(tmp_path / "out")


def test_the_command_says_what_it_wrote(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--checkpoint", str(checkpoint), "--output", str(tmp_path / "a/b")])) == 0
    assert capsys.readouterr().out.startswith("Exported 58 tensors in bfloat16 (zlab layout): ")
