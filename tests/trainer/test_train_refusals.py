"""Whole runs that are refused, or warned: in one line, with exit code 1 and no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.conftest import Start
from tests.trainer.pipeline.runs import arguments, events, write_config
from trainer import train
from trainer.config import resolve
from trainer.data.dataset import DatasetWriter
from trainer.data.tokenizer import fingerprint, load_tokenizer

pytestmark = pytest.mark.usefixtures("no_worker_left")


BAD = {
    "no config": ({}, "no such file"),
    "data missing": ({"data": {"path": "nowhere"}}, "no such dataset"),
    "data empty": ({"target": {"model": "bundled:tiny/target"}, "data": {"path": "empty.jsonl"}}, "empty"),
    "target missing": ({"target": {"model": "nowhere"}}, "no such model folder"),
    "prompts missing": ({"evaluate": {"prompts": "nowhere.jsonl"}}, "nowhere.jsonl"),
    "device absent": ({"devices": {"targets": ["cuda:77"]}}, "`cuda:77` is not there; this machine has"),
    "device nonsense": (
        {"devices": {"drafters": ["gpu0"]}},
        "`devices.drafters[0]` must be cpu, cuda:0, cuda:1",
    ),
    "unknown key": ({"train": {"step": 5}}, "did you mean `train.steps`?"),
    "dtype wrong": ({"runtime": {"drafter_dtype": "float16"}}, "must be auto, float32 or bfloat16"),
    "layers wrong": ({"drafter": {"target_layer_ids": [0, 9]}}, "must rise and lie in 0..3"),
    "resume missing": ({}, "--resume nothing: no such checkpoint"),
}


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.replace(" ", "-"))
def test_bad_input_is_told_in_one_line(
    case: str, tmp_path: Path, parts: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sections, says = BAD[case]
    (tmp_path / "empty.jsonl").write_text("")
    config = write_config(tmp_path / "c.toml", *parts, **sections)
    if case == "no config":
        config.unlink()
    resume = "nothing" if case == "resume missing" else ""
    assert train.run(arguments(config, tmp_path / "run", resume)) == 1
    out, err = capsys.readouterr()
    (failed,) = events(tmp_path / "run", "failed")
    assert says in failed["error"]
    assert says in out
    assert "Traceback" not in out + err


def test_debug_shows_the_traceback(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_DEBUG", "1")
    assert start("run", target={"model": "nowhere"}) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_made(
    tmp_path: Path, parts: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    config = write_config(tmp_path / "c.toml", *parts)
    assert train.run(arguments(config, tmp_path / "file/run")) == 1
    assert "error: --run-dir" in capsys.readouterr().err


def test_a_folder_with_another_run_is_refused(
    tmp_path: Path, parts: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoints would lie beside the new ones, and count as newer where they are further on."""
    (tmp_path / "run/checkpoints/step-00000900").mkdir(parents=True)
    config = write_config(tmp_path / "c.toml", *parts)
    assert train.run(arguments(config, tmp_path / "run")) == 1
    out = capsys.readouterr().out
    assert "holds the checkpoints of an earlier run, up to step 900" in out
    assert "--resume run; to begin anew take another --run-dir" in out


def test_resume_with_another_configuration_is_refused(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("run") == 0
    assert start("other", 1, 1, resume="run", train={"steps": 7}) == 1
    out, err = capsys.readouterr()
    assert "train.steps: 6 in the checkpoint, 7 now" in out
    assert "devices.drafters (count): 2 in the checkpoint, 1 now" in out
    assert "Traceback" not in err


@pytest.mark.parametrize(("recorded", "worker"), [({}, "target-"), ({"max_token_id": 64}, "main")])
def test_tokens_beyond_the_vocabulary_are_told(
    tmp_path: Path, start: Start, recorded: dict[str, Any], worker: str
) -> None:
    """Before anything is loaded where the data says so; else when they come."""
    with DatasetWriter(tmp_path / "other") as writer:
        writer.add(np.full(40, 64, dtype=np.int32), np.array([[5, 40]], dtype=np.int32))
        writer.commit({"sources": ["made"], "tokenizer": "other", "max_length": 128, **recorded})
    assert start("run", data={"path": str(tmp_path / "other")}) == 1
    (failed,) = events(tmp_path / "runs/run", "failed")
    assert "the dataset has token 64, the target's vocabulary ends at 63" in failed["error"]
    assert failed["worker"].startswith(worker)


def test_data_of_another_tokenizer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose ids all exist, but mean something else."""
    tiny = resolve("bundled:tiny/target")
    own = fingerprint(load_tokenizer(tiny))
    for made, told in ((own, 0), ("another", 1)):
        with DatasetWriter(tmp_path / made) as writer:
            writer.add(np.full(40, 9, dtype=np.int32), np.array([[5, 40]], dtype=np.int32))
            meta = {"sources": ["made"], "tokenizer": "/other", "max_length": 128}
            writer.commit({**meta, "tokenizer_fingerprint": made})
        config = write_config(
            tmp_path / "c.toml",
            tiny,
            tmp_path / made,
            drafter={"target_layer_ids": [1, 2]},
            train={"steps": 1},
        )
        assert train.run(arguments(config, tmp_path / "runs" / made)) == 0
        said = "Warning: the data was prepared with another tokenizer (/other) than the target's"
        assert capsys.readouterr().out.count(said) == told
