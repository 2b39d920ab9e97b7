"""Lines of chat JSONL to messages, or the reason why not: of rows to learn from, and of prompts to answer."""

from __future__ import annotations

import json
from typing import Any

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that data sets give an assistant's thoughts."""

Message = dict[str, str]
"""{"role": system | user | assistant, "content": text}, and "reasoning_content" where an assistant has thoughts."""


class RowError(Exception):
    """A row that can't be used.

    Args:
        reason: a word or two that rows are counted by.
        detail: what exactly is wrong with this one.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def parse_row(line: bytes) -> list[Message]:
    """Messages of a row to learn from: as `messages_of`, at least one of them an assistant's. Raises RowError."""
    messages = messages_of(parse_object(line))
    if all(m["role"] != "assistant" for m in messages):
        raise RowError("no assistant turn", "nothing to learn from")
    return messages


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises RowError."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", f"byte {error.start}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise RowError("not JSON", str(error) or "nested too deeply") from None
    if not isinstance(row, dict):
        raise RowError("not an object", f"the line is {_kind(row)}")
    return row


def messages_of(row: dict[str, Any]) -> list[Message]:
    """Messages of a row: `messages` of role and content, or `conversations` of from and value.

    An optional system message comes first, then user and assistant take turns. Content is text or a list of text parts.
    Raises RowError.
    """
    if "messages" in row:
        key, role_key, text_key = "messages", "role", "content"
    elif "conversations" in row:
        key, role_key, text_key = "conversations", "from", "value"
    else:
        raise RowError("no messages", "neither `messages` nor `conversations`")
    if not isinstance(row[key], list):
        raise RowError("wrong type", f"`{key}` is {_kind(row[key])}, not a list")
    if not row[key]:
        raise RowError("no messages", f"`{key}` is empty")
    messages = [_message(m, f"{key}[{i}]", role_key, text_key) for i, m in enumerate(row[key])]
    _check_order(messages)
    return messages


def prompt_of(row: dict[str, Any]) -> list[Message]:
    """Messages to answer: `prompt` text, else `messages_of` up to and with the last user turn. Raises RowError."""
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": _filled(row["prompt"], "prompt")}]
    if not {"messages", "conversations"} & row.keys():
        raise RowError("no prompt", "a row needs `messages`, `conversations` or `prompt`")
    messages = messages_of(row)
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise RowError("no prompt", "no user turn to answer")
    return messages


def _message(raw: Any, where: str, role_key: str, text_key: str) -> Message:
    if not isinstance(raw, dict):
        raise RowError("wrong type", f"`{where}` is {_kind(raw)}, not an object")
    name = raw.get(role_key)
    if not isinstance(name, str):
        raise RowError("wrong type", f"`{where}.{role_key}` is {_kind(name)}, not text")
    role = ROLES.get(name.lower())
    if role is None:
        raise RowError("unknown role", f"`{where}.{role_key}` is {name!r}; known: {', '.join(ROLES)}")
    if raw.get("tool_calls") or raw.get("function_call"):  # the latter in older data
        raise RowError("tool calls", f"`{where}` calls tools, and only text is learned from")
    message = {"role": role, "content": _filled(raw.get(text_key), f"{where}.{text_key}")}
    thoughts = next((raw[key] for key in REASONING if raw.get(key)), None)
    if role == "assistant" and thoughts is not None:
        message["reasoning_content"] = _text(thoughts, f"{where}.{REASONING[0]}")
    return message


def _filled(content: Any, where: str) -> str:
    text = _text(content, where)
    if not text.strip():
        raise RowError("empty message", f"`{where}` has no text")
    return text


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        text = content
    elif isinstance(content, list):
        for i, part in enumerate(content):
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise RowError("wrong type", f"`{where}[{i}]` is not a text part")
        text = "".join(part["text"] for part in content)
    else:
        raise RowError("wrong type", f"`{where}` is {_kind(content)}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError("not UTF-8", f"`{where}` holds half of a surrogate pair") from None
    return text


def _check_order(messages: list[Message]) -> None:
    roles = [m["role"] for m in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    for i, role in enumerate(turns):
        expected = "assistant" if i % 2 else "user"
        if role != expected:
            at = i + len(roles) - len(turns)
            raise RowError("role order", f"message {at} is {role} where {expected} should be")


def _kind(value: Any) -> str:
    if value is None:
        return "missing or null"
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), type(value).__name__)
