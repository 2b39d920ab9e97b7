"""Variables for the trainer: which source wins, and what is refused without repeating a value."""

from pathlib import Path

import pytest
import typer

from dflashctl.cli import environment
from dflashctl.errors import ConfigError


def test_a_typed_variable_wins_over_the_file_and_a_bare_name_is_taken_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_HERE", "here")
    file = tmp_path / "env"
    file.write_text("# a comment\n\nA=file\nB=file=with='quo\x1c\u2028tes'\nFROM_HERE\nEMPTY=\n")
    assert environment.read(["A=typed", "C=1=2"], file) == {
        "A": "typed",
        "B": "file=with='quo\x1c\u2028tes'",
        "FROM_HERE": "here",
        "EMPTY": "",
        "C": "1=2",
    }
    assert environment.read([], None) == {}


def test_what_is_refused_names_the_place_and_keeps_the_secret(tmp_path: Path) -> None:
    file = tmp_path / "env"
    for line in ("9BAD=s3cret", "TOKEN s3cret", "TOKEN: s3cret", "s3cret-", "TOKEN=s3cret\0"):
        file.write_text(f"GOOD=1\n{line}\n")
        with pytest.raises(ConfigError) as caught:
            environment.read([], file)
        assert caught.value.where == f"{file}:2"
        assert "s3cret" not in caught.value.message + caught.value.hint
        with pytest.raises(typer.BadParameter) as usage:
            environment.read([line], None)
        assert "s3cret" not in usage.value.message
