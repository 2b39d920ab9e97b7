"""Lines of chat: both layouts, and what is no row is refused with its reason, whatever it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainer.data.chat import RowError, parse_row, prompt_of

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
SYSTEM = {"role": "system", "content": "be good"}


def parse(row):
    return parse_row(json.dumps(row).encode())


def test_both_layouts_give_the_same_messages():
    share = [("system", "be good"), ("human", "hi"), ("gpt", "yes")]
    conversation = {"conversations": [{"from": role, "value": text} for role, text in share], "id": 3}
    assert parse({"messages": [SYSTEM, USER, REPLY]}) == [SYSTEM, USER, REPLY] == parse(conversation)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse({"messages": [USER, {"role": "assistant", "content": parts}]})[1]["content"] == "ab"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_kept(name):
    assert parse(turn(**{name: "hm"}))[1] == {**REPLY, "reasoning_content": "hm"}


def test_a_byte_order_mark_is_no_fault():
    assert parse_row(b"\xef\xbb\xbf" + json.dumps(turn()).encode()) == [USER, REPLY]


def test_a_last_question_without_an_answer_stays():
    assert len(parse({"messages": [USER, REPLY, USER]})) == 3


def turn(**changes):
    return {"messages": [USER, {**REPLY, **changes}]}


BAD = {
    b"\xff{}": ("not UTF-8", "byte 0"),
    b"{": ("not JSON", "line 1"),
    b"": ("not JSON", "Expecting value"),
    b"[" * 100_000: ("not JSON", "recursion|nested"),
    b"[]": ("not an object", "a list"),
    b"{}": ("no messages", "neither"),
    b'{"messages": []}': ("no messages", "empty"),
    b'{"messages": 3}': ("wrong type", "a number"),
    b'{"messages": ["x"]}': ("wrong type", r"messages\[0\]` is text"),
    b'{"messages": [{"content": "x"}]}': ("wrong type", "role` is missing"),
    b'{"messages": [{"role": "judge", "content": "x"}]}': ("unknown role", "judge"),
    b'{"messages": [{"role": "user"}]}': ("wrong type", "content` is missing"),
}
BAD_ROWS = [
    (turn(content=""), "empty message", r"messages\[1\]"),
    (turn(content=" \n"), "empty message", "no text"),
    (turn(content=3), "wrong type", "a number"),
    (turn(content=[{"type": "image_url"}]), "wrong type", r"content\[0\]"),
    (turn(content=["x"]), "wrong type", "text part"),
    (turn(content="\ud800"), "not UTF-8", "surrogate"),
    (turn(tool_calls=[{"name": "f"}]), "tool calls", "calls tools"),
    (turn(function_call={"name": "f"}), "tool calls", "calls tools"),
    ({"messages": [USER]}, "no assistant turn", "nothing"),
    ({"messages": [REPLY]}, "role order", "message 0 is assistant where user"),
    ({"messages": [SYSTEM, USER, USER, REPLY]}, "role order", "message 2 is user where assistant"),
    ({"messages": [USER, REPLY, SYSTEM]}, "role order", "message 2 is system"),
    ({"messages": [USER, REPLY, REPLY]}, "role order", "message 2 is assistant where user"),
]


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:30].decode("ascii", "replace"))
def test_bad_lines(line):
    reason, detail = BAD[line]
    with pytest.raises(RowError, match=detail) as caught:
        parse_row(line)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("row", "reason", "detail"), BAD_ROWS)
def test_bad_rows(row, reason, detail):
    with pytest.raises(RowError, match=detail) as caught:
        parse(row)
    assert caught.value.reason == reason


JSON = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["user", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["messages", "conversations", "prompt", "role", "content", "from", "value"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_anything_is_parsed_or_refused_with_a_reason(value):
    try:
        good = any(m["role"] == "assistant" for m in parse(value))
    except RowError as error:
        good = bool(error.reason and error.detail)
    assert good


def test_a_prompt_is_text_or_a_chat_up_to_its_last_question():
    assert prompt_of({"prompt": "hi", "messages": []}) == [USER]
    assert prompt_of({"prompt": None, **turn()}) == [USER]
    assert prompt_of({"messages": [SYSTEM, USER, REPLY, USER, REPLY]}) == [SYSTEM, USER, REPLY, USER]


@pytest.mark.parametrize(
    ("row", "reason"),
    [({"text": "x"}, "no prompt"), ({"messages": [SYSTEM]}, "no prompt"), ({"prompt": " "}, "empty message")],
)
def test_what_is_no_prompt(row, reason):
    with pytest.raises(RowError) as error:
        prompt_of(row)
    assert error.value.reason == reason


@given(st.dictionaries(st.sampled_from(["messages", "conversations", "prompt"]), JSON))
@example({"prompt": "\ud800"})
def test_any_prompt_is_text_or_refused(row):
    try:
        last = prompt_of(row)[-1]
    except RowError as error:
        good = bool(error.reason and error.detail)
    else:
        good = last["role"] == "user" and bool(last["content"].encode().strip())
    assert good
