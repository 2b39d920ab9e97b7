"""Errors as people see them."""

import io

from dflashctl.errors import DflashError
from dflashctl.render.errors import lines
from dflashctl.render.terminal import Terminal


def shown(error, columns=60):
    return lines(error, Terminal(io.StringIO(), columns=columns))


def test_what_where_and_fix_each_have_their_line():
    error = DflashError("no such host", where="hosts.toml:14", hint="correct it\nor leave it out")
    assert shown(error) == [
        "error: no such host",
        "  hosts.toml:14",
        "  fix: correct it",
        "       or leave it out",
    ]
    assert shown(DflashError("no")) == ["error: no"]


def test_long_parts_are_wrapped_below_their_beginning():
    words = "word " * 30
    made = shown(DflashError(words, where=words, hint=words))
    assert max(map(len, made)) <= 60
    assert [line.split("word")[0] for line in made] == [
        *("error: ", "       ", "       "),
        *("  ", "    ", "    "),
        *("  fix: ", "       ", "       "),
    ]


def test_a_path_is_never_cut():
    path = "/a" * 80
    assert f"  {path}" in shown(DflashError("no", where=path))


def test_remote_words_are_made_harmless():
    made = shown(DflashError("a\x1b[31mb", where="c\x07", hint="d\u202e"))
    assert made == ["error: ab", "  c\\x07", "  fix: d\\u202e"]
