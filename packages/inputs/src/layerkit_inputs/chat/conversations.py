"""Conversations, preferences and judgements in rows of files.

A row is a JSON object, or a row of a Parquet file or data set as a dict. Messages stay the dicts of
`transformers`: `role`, `content`, and where it applies `tool_calls`, `name`, `reasoning_content`
and `train`. These forms are read, the first that a row has:

    messages              [{"role": "user", "content": "Hi"}, {"role": "assistant", …}]
    conversations         [{"from": "human", "value": "Hi"}, {"from": "gpt", …}], as in ShareGPT
    prompt, completion    text or messages
    instruction, output   text, as in Alpaca, with an optional `input`

A row may also have `tools` (a list of JSON schemas, or its JSON text), and `system` (text). An
error about a row is a `BadRecordError` without owner; the caller adds the file and the record.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from layerkit_inputs.base.errors import BadRecordError

Message = dict[str, Any]
"""A message, with the keys that chat templates read."""

ROLES = ("system", "developer", "user", "assistant", "tool")
FORMS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
)
"""Columns of each form of a conversation, in the order in which they are tried."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class Conversation(NamedTuple):
    """Messages, with the tools that the assistant may call."""

    messages: list[Message]
    """Messages, at least one."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools, or None."""
    num_prompt_messages: int = 0
    """Number of messages at the start that are given. No token of theirs has loss."""


class PreferencePair(NamedTuple):
    """Two conversations that continue the same prompt."""

    chosen: Conversation
    """The better one."""
    rejected: Conversation
    """The worse one. Its prompt messages and tools are those of `chosen`."""


class Judgement(NamedTuple):
    """A conversation, and whether its completion is good."""

    conversation: Conversation
    label: bool


def conversation_form(columns: Collection[str]) -> tuple[str, ...]:
    """Return the columns that hold the conversation of a row: an element of `FORMS`.

    Raises:
      BadRecordError: The row has none of the forms.
    """
    for form in FORMS:
        if all(name in columns for name in form):
            return form
    forms = " or ".join(map(" and ".join, FORMS))
    raise BadRecordError("no conversation", value=sorted(columns), expected=f"columns {forms}")


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a row in one of the forms; see the module.

    Raises:
      BadRecordError: The row has none of the forms, or a value of it has another type.
    """
    row = _without_nulls(row)
    form = conversation_form(row)
    num_prompt_messages = 0
    if form == ("prompt", "completion"):
        messages = _read_turns(row, "prompt", role="user")
        num_prompt_messages = len(messages)
        messages = messages + _read_turns(row, "completion", role="assistant")
    elif form == ("instruction", "output"):
        request = [_text(row[name], name) for name in ("instruction", "input") if row.get(name)]
        answer = _text(row["output"], "output")
        messages = [_message("user", "\n\n".join(request)), _message("assistant", answer)]
    else:
        messages = _read_turns(row, form[0], role=None)
    system = _read_system(row)
    return Conversation(
        system + messages,
        _read_tools(row),
        num_prompt_messages and num_prompt_messages + len(system),
    )


def read_pair(row: Mapping[str, Any]) -> PreferencePair:
    """Return the pair of a row with `chosen` and `rejected`, as text or as messages.

    Text, and messages that begin with the assistant, continue `prompt`. Other messages contain the
    prompt: the messages with which both begin.

    Raises:
      BadRecordError: A column is missing, a value has another type, or the prompts differ.
    """
    row = _without_nulls(row)
    for name in ("chosen", "rejected"):
        _check(name in row, name, None, "the answer, as text or messages")
    answers = [_read_turns(row, name, role="assistant") for name in ("chosen", "rejected")]
    if all(answer[0]["role"] == "assistant" for answer in answers):
        prompt = _read_turns(row, "prompt", role="user")
        answers = [prompt + answer for answer in answers]
        num_prompt_messages = len(prompt)
    else:
        pairs = zip(*answers, strict=False)
        num_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        num_prompt_messages = min(num_equal, *(len(answer) - 1 for answer in answers))
        for name, answer in zip(("chosen", "rejected"), answers, strict=True):
            role, where = answer[num_prompt_messages]["role"], f"{name}[{num_prompt_messages}].role"
            _check(role == "assistant", where, role, "the assistant, where the answers differ")
    system, tools = _read_system(row), _read_tools(row)
    size = len(system) + num_prompt_messages
    return PreferencePair(*(Conversation(system + answer, tools, size) for answer in answers))


def read_judgement(row: Mapping[str, Any]) -> Judgement:
    """Return the judgement of a row: a conversation, and whether its `label` is true (or 1).

    The last assistant turn is judged, unless the row has a prompt and a completion.

    Raises:
      BadRecordError: As `read_conversation`, or the row has no label.
    """
    conversation, label = read_conversation(row), row.get("label")
    is_label = isinstance(label, bool | int) and label in (0, 1)
    _check(is_label, "label", label, "true (or 1) for a good answer, else false (or 0)")
    if not conversation.num_prompt_messages:
        roles = [message["role"] for message in conversation.messages]
        is_answer = roles[-1] == "assistant"
        _check(is_answer, "messages[-1].role", roles[-1], "the assistant, whose answer is judged")
        conversation = conversation._replace(num_prompt_messages=len(roles) - 1)
    return Judgement(conversation, bool(label))


def _read_turns(row: Mapping[str, Any], field: str, *, role: str | None) -> list[Message]:
    """Return the messages of a column: text of a role, one message, or a list of messages."""
    value = row.get(field)
    if role is not None and isinstance(value, str):
        return [_message(role, value)]
    if isinstance(value, Mapping):
        value = [value]
    expected = "a list of messages" if role is None else "text or a list of messages"
    _check(isinstance(value, list | tuple) and len(value), field, value, expected)
    return [_read_message(message, f"{field}[{i}]") for i, message in enumerate(value)]  # type: ignore


def _read_message(value: Any, field: str) -> Message:
    _check(isinstance(value, Mapping), field, value, "an object with role and content")
    message = _without_nulls(value)
    if "from" in message and "role" not in message:
        sender = message.pop("from")
        message = (
            _message(_SHAREGPT_ROLES.get(sender, sender), message.pop("value", None)) | message
        )
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise BadRecordError(field=f"{field}.role", value=role, choices=ROLES)
    if content is not None or not message.get("tool_calls"):
        message["content"] = _text(content, f"{field}.content")
    train, calls = message.get("train", False), message.get("tool_calls", [])
    _check(isinstance(train, bool), f"{field}.train", train, "true or false")
    is_calls = isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)
    _check(is_calls, f"{field}.tool_calls", calls, "a list of objects")
    return message


def _read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except (ValueError, RecursionError) as error:
            raise BadRecordError(str(error), field="tools", value=tools) from None
    is_tools = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    _check(tools is None or is_tools, "tools", tools, "a list of JSON schemas")
    return tools or None


def _read_system(row: Mapping[str, Any]) -> list[Message]:
    return [_message("system", _text(row["system"], "system"))] if row.get("system") else []


def _message(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _text(content: Any, field: str) -> str:
    """Return a text, or the joined parts of type text of a list."""
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    for text, part in zip(texts, parts, strict=True):
        _check(isinstance(text, str), field, part, "text, or a list of parts of type text")
    return "".join(map(str, texts))


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without the keys that are null, as `transformers` drops them."""
    return {key: item for key, item in value.items() if item is not None}


def _check(condition: Any, field: str, value: Any, expected: str) -> None:
    if not condition:
        raise BadRecordError(field=field, value=value, expected=expected)
