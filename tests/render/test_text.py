"""Remote text made harmless, measured and broken into lines."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl.render.text import crop, harmless, pad, width, wrap


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[1;1Hx", "x"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$r\x1b\\x", "x"),
        ("\x1bcx", "x"),
        ("\x9b2J", "\\x9b2J"),
        ("a\x07b", "a\\x07b"),
        ("\x1b", "\\x1b"),
        (" 10%\r 50%\r100%\r\n", "100%"),
        ("a\tb", "a   b"),
        ("\u202egnp", "\\u202egnp"),
        ("a\u2028b", "a\\u2028b"),
        ("\ud800", "\\ud800"),
        ("模型 é \u0301", "模型 é \u0301"),
    ],
)
def test_harmless(given, shown):
    assert harmless(given) == shown


@given(st.text())
def test_harmless_text_holds_nothing_that_a_terminal_obeys(value):
    shown = harmless(value)
    kinds = {unicodedata.category(c) for c in shown} - {"Cf"}
    assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
    assert {c for c in shown if unicodedata.category(c) == "Cf"} <= {"\u200d", "\u00ad"}


@pytest.mark.parametrize(("value", "columns"), [("abc", 3), ("模型", 4), ("e\u0301", 1), ("", 0)])
def test_width_is_what_a_terminal_takes(value, columns):
    assert width(value) == columns


@given(st.text(alphabet=st.sampled_from("ab 1.模é\u0301")), st.integers(1, 20))
def test_crop_fits_and_marks_what_it_cut(value, columns):
    cut = crop(value, columns)
    assert width(cut) <= columns
    assert cut == value or (cut.endswith("…") and value.startswith(cut[:-1]))


@pytest.mark.parametrize(
    ("value", "columns", "shown"),
    [
        ("grad 0.81", 8, "grad …"),
        ("lr 6.0e-04 x", 10, "lr …"),
        ("of 60,000 steps", 6, "of …"),
        ("at 1,200, more", 9, "at 1,200…"),
        ("cuda:12", 7, "cuda:12"),
        ("123456", 4, "…"),
    ],
)
def test_crop_never_cuts_within_a_number(value, columns, shown):
    assert crop(value, columns) == shown


@given(st.text(alphabet=st.sampled_from("ab 模")), st.integers(0, 20), st.booleans())
def test_pad_fills(value, columns, right):
    assert width(pad(value, columns, right)) == max(columns, width(value))


@given(
    st.lists(st.text(alphabet="abc", min_size=1, max_size=9), min_size=1, max_size=12), st.integers(20, 40)
)
def test_wrap_keeps_every_word_and_fits(words, columns):
    lines = wrap(" ".join(words), columns, "    ", "head  ")
    assert " ".join(lines).removeprefix("head  ").split() == words
    assert all(width(line) <= columns for line in lines)
    assert lines[0].startswith("head  ")
    assert all(line.startswith("    ") for line in lines[1:])


def test_wrap_never_parts_a_number_from_its_unit():
    assert wrap("last sign of life 23 min ago", 22) == ["last sign of life", "23 min ago"]


def test_wrap_never_parts_a_command():
    again = "dflashctl stop a-1 && dflashctl launch --resume a-1"
    assert wrap(again, 30) == ["dflashctl stop a-1 &&", "dflashctl launch --resume a-1"]
    assert wrap("see dflashctl logs a-1 -n 200; dflashctl status says more of it", 36) == [
        "see dflashctl logs a-1 -n 200;",
        "dflashctl status says more of it",
    ]


def test_wrap_leaves_a_long_word_whole():
    assert wrap("see /a/very/long/path here", 10) == ["see", "/a/very/long/path", "here"]
