"""python -m trainer: help without imports, usage, and how errors end."""

from __future__ import annotations

import errno
import importlib
import json
import subprocess
import sys

import pytest

from trainer import evaluate
from trainer.__main__ import COMMANDS, main
from trainer.runtime import cache


def test_help_names_every_command_and_imports_nothing_heavy():
    code = (
        "import sys; from trainer.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(*({'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)) or ['light'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"\n    {name} " in run.stdout for name in COMMANDS)
    assert run.stdout.splitlines()[-1] == "light"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_help(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: python -m trainer {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "plan", "bench"])
def test_commands_that_compile_name_the_cache_first(name, monkeypatch):
    used = []
    monkeypatch.setattr(cache, "use", lambda: used.append(name))
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert used == [name]


@pytest.mark.parametrize("argv", [[], ["prepar"], ["--frobnicate"], ["prepare"]])
def test_wrong_usage_exits_2(argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_a_python_without_what_training_needs_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "trainer.export", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    assert main(["export", "--help"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {sys.executable} has no torch: type this with the Python that trains")
    assert said.count("\n") == 1


def test_errors_go_to_stderr_and_exit_1(tmp_path, capsys):
    where = tmp_path / "nowhere"
    assert main(["prepare", "--tokenizer", str(where), "--output", str(tmp_path / "out"), "x.jsonl"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "error: the tokenizer can't be read: no such folder or file",
        f"  {where}",
        "  fix: name the target: its folder (Hugging Face layout) or its GGUF file",
    ]


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/out"), 1, "error: /out: Permission denied\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_what_goes_wrong_outside_is_no_traceback(raised, code, said, monkeypatch, capsys):
    """Also while the command's module, and PyTorch with it, is imported: that takes seconds."""

    def fails(*_):
        raise raised

    monkeypatch.setattr(evaluate, "run", fails)
    assert main(["evaluate", "--target", "a", "--drafter", "b", "--prompts", "c"]) == code
    assert capsys.readouterr().err == said
    if code == 130:
        monkeypatch.setattr(importlib, "import_module", fails)
        assert main(["evaluate"]) == code
        assert capsys.readouterr().err == said


def test_an_error_of_our_own_keeps_its_traceback(monkeypatch):
    def fails(*_):
        raise OSError("the handle is invalid")

    monkeypatch.setattr(evaluate, "run", fails)
    with pytest.raises(OSError, match="handle"):
        main(["evaluate", "--target", "a", "--drafter", "b", "--prompts", "c"])


def test_prepare_takes_a_bundled_target_and_says_how_to_use_what_it_made(tmp_path, capsys):
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    out = tmp_path / "out"
    argv = ["prepare", "--tokenizer", "bundled:tiny/target", "--output", str(out), "--jobs", "1"]
    assert main([*argv, str(tmp_path / "chat.jsonl")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f'[data] path = "{out}"')
