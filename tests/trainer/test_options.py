"""Converters of options."""

import argparse

import pytest

from trainer.options import add_template_options, at_least, counts


@pytest.mark.parametrize(
    ("low", "text", "value"), [(0, "0", 0), (1, "12", 12), (0.0, "0.5", 0.5), (0.0, "1e3", 1000.0)]
)
def test_numbers_keep_the_type_of_their_bound(low, text, value):
    got = at_least(low)(text)
    assert (got, type(got)) == (value, type(low))


@pytest.mark.parametrize(
    ("low", "text"), [(1, "0"), (0, "-1"), (0, "0.5"), (0.0, "nan"), (0.0, "inf"), (1, "x")]
)
def test_numbers_below_not_finite_or_none_at_all_are_refused(low, text):
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        at_least(low)(text)


def test_template_arguments_are_json_where_they_can_be():
    parser = argparse.ArgumentParser()
    add_template_options(parser, "as you like")
    words = [word for pair in ("a=false", "b=x=y", "c=3", "d=") for word in ("--template-argument", pair)]
    assert parser.parse_args(words).template_argument == [("a", False), ("b", "x=y"), ("c", 3), ("d", "")]
    assert parser.parse_args([]).template_argument == []
    for wrong in ("a", "=1", "a b=1", "1a=1"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--template-argument", wrong])


def test_counts_are_a_list_of_whole_numbers_from_one_up():
    assert counts("1") == [1]
    assert counts("4,1,2") == [4, 1, 2]
    for text in ("x", "1,", "", "1.5", "2;3"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a list of whole numbers, such as 1,2,4"):
            counts(text)
    with pytest.raises(argparse.ArgumentTypeError, match="0 is not a number from 1 up"):
        counts("1,0")
