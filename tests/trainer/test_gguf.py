"""What a GGUF file needs is named in full, before a loader names the first of it; a damaged one is refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from trainer.data.errors import DataError
from trainer.data.tokenizer import load_tokenizer
from trainer.modeling import ModelError
from trainer.modeling.target import load_config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The first bytes of a GGUF file."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.mark.parametrize("absent", [("gguf", "accelerate"), ("accelerate",)])
def test_what_is_not_installed_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, absent: tuple[str, ...]
) -> None:
    find = importlib.util.find_spec
    ours = {name: None if name in absent else find("json") for name in ("gguf", "accelerate")}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: ours[name] if name in ours else find(name, *_)
    )
    command = f"{sys.executable} -m pip install {' '.join(absent)}"
    with pytest.raises(DataError, match="a GGUF file needs packages that are not installed") as tokenizer:
        load_tokenizer(file)
    assert (tokenizer.value.where, tokenizer.value.hint) == (str(file), command)
    with pytest.raises(ModelError) as target:
        load_config(file)
    assert str(target.value) == f"{file}: a GGUF file needs packages that are not installed: {command}"


def test_a_damaged_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.gguf.lacking", lambda: "")
    with pytest.raises(DataError, match="the tokenizer can't be read: ") as caught:
        load_tokenizer(file)
    assert caught.value.where == str(file)
    with pytest.raises(ModelError, match=r"model\.gguf: can't be loaded"):
        load_config(file)
