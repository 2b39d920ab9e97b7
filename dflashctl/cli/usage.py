"""Usage errors as people see them: typer's own words, and where an option goes that was typed before its command."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from typing import Any

from dflashctl.render.terminal import stderr
from dflashctl.render.text import harmless, wrap


def show(error: Any, args: Sequence[str]) -> None:
    """Print it to stderr. error: a ClickException, of click or of typer. args: the words behind `dflashctl`."""
    said = io.StringIO()
    error.show(file=said)
    terminal = stderr()
    terminal.print([*said.getvalue().splitlines(), *_fix(error, args, terminal.columns)])


def _fix(error: Any, args: Sequence[str], columns: int) -> list[str]:
    """The line as it should be, where the option that is none of `dflashctl` itself is one of a command."""
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if name is None or context is None or context.parent is not None:
        return []
    commands = context.command.commands
    having = [word for word, command in commands.items() if name in _options(command)]
    if not having:
        return []
    for at, word in enumerate(args):
        if word in commands and _holds_only(_options(commands[word]), args[:at]):
            line = shlex.join(["dflashctl", word, *args[:at], *args[at + 1 :]])
            return wrap(f"options go behind the command: {harmless(line)}", columns, "       ", "  fix: ")
    return wrap(f"it goes behind a command that has it: {', '.join(having)}", columns, "       ", "  fix: ")


def _options(command: Any) -> dict[str, Any]:
    """The options of a command by each of their names."""
    return {name: option for option in command.params for name in option.opts if name.startswith("-")}


def _holds_only(options: dict[str, Any], words: Sequence[str]) -> bool:
    """Whether the words are such options, each with its value, and nothing else."""
    left = list(words)
    while left:
        word = left.pop(0)
        long = word.startswith("--")
        name, attached = (word.partition("=")[::2]) if long else (word[:2], word[2:])
        if name not in options:
            return False
        if options[name].is_flag:
            if attached:
                left.insert(0, "--" if long else f"-{attached}")  # -fn 5; a flag takes no value
        elif not attached:
            if not left:
                return False
            left.pop(0)
    return True
