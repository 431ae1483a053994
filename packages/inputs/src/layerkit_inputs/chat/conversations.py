"""Conversations, preferences and judgements in rows of files.

A row is a dict, of JSON or of a Parquet file. Messages stay the dicts of `transformers`: `role`,
`content`, and where it applies `tool_calls`, `name`, `reasoning_content` and `train`. A row has one
of these forms, the first that fits:

    messages              [{"role": "user", "content": "Hi"}, {"role": "assistant", …}]
    conversations         [{"from": "human", "value": "Hi"}, {"from": "gpt", …}], as in ShareGPT
    prompt, completion    text or messages
    instruction, output   text, as in Alpaca, with an optional `input`

A row may also have `tools` (a list of JSON schemas, or its JSON) and `system` (text). An error
about a row is a `BadRecordError` without owner, to which the caller adds the file and the record.

Content may be a list of parts, of which some are images. A part names its image, as a path or as a
`data:` URI, or else the column `images` (or `image`) names the images in order. With such a column,
`<image>` in a text also stands for an image. Videos and sounds are errors.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from layerkit_inputs.base.errors import BadRecordError

Message = dict[str, Any]
"""A message, with the keys that chat templates read."""
ROLES = ("system", "developer", "user", "assistant", "tool")
FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
"""Columns of each form of a conversation, in the order in which they are tried."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_IMAGE_NAMES = ("image", "image_url", "url", "path")
_UNREAD_COLUMNS = ("video", "videos", "audio", "audios")
IMAGE_MARKER = "<image>"
"""Text that stands for an image of the column of images."""


class Conversation(NamedTuple):
    """Messages, with the tools that the assistant may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools, or None."""
    num_prompt_messages: int = 0
    """Number of messages at the start that are given. Their tokens have no loss."""

    @property
    def images(self) -> list[str]:
        """Path or `data:` URI of the image of each part `{"type": "image"}`, in order."""
        return [part["image"] for part in _parts(self.messages) if part["type"] == "image"]


class PreferencePair(NamedTuple):
    """A better and a worse conversation that continue the same prompt messages."""

    chosen: Conversation
    rejected: Conversation


class Judgement(NamedTuple):
    """A conversation, and whether its answer is good."""

    conversation: Conversation
    label: bool


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a row in one of the forms; see the module.

    Raises:
      BadRecordError: The row has none of the forms, or a value of it has another type.
    """
    row = _without_nulls(row)
    form: Sequence[str] = next((form for form in FORMS if {*form} <= {*row}), ())
    expected = f"columns {' or '.join(map(' and '.join, FORMS))}"
    _check(form, "columns of a conversation", [*row], expected)
    if form == ("instruction", "output"):
        request = [_text(row[name], name) for name in ("instruction", "input") if row.get(name)]
        row = {**row, "prompt": "\n\n".join(request)}
    if len(form) == 2:
        prompt, answer = _read_messages(row, "prompt", role="user"), _read_messages(row, form[1])
        return _with_columns(row, prompt + answer, len(prompt))
    return _with_columns(row, _read_messages(row, form[0], role=None), 0)


def read_pair(row: Mapping[str, Any]) -> PreferencePair:
    """Return the pair of a row with `chosen` and `rejected`, as text or as messages.

    Text, and messages that begin with the assistant, continue `prompt`. Other messages contain the
    prompt: the messages with which both begin.

    Raises:
      BadRecordError: A column is missing, a value has another type, or the prompts differ.
    """
    row = _without_nulls(row)
    chosen, rejected = _read_messages(row, "chosen"), _read_messages(row, "rejected")
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        prompt = _read_messages(row, "prompt", role="user")
        chosen, rejected, size = prompt + chosen, prompt + rejected, len(prompt)
    else:
        last = min(len(chosen), len(rejected)) - 1
        size = next((i for i in range(last) if chosen[i] != rejected[i]), last)
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            role, field = answer[size]["role"], f"{name}[{size}].role"
            _check(role == "assistant", field, role, "the assistant, where the answers differ")
    return PreferencePair(_with_columns(row, chosen, size), _with_columns(row, rejected, size))


def read_judgement(row: Mapping[str, Any]) -> Judgement:
    """Return the judgement of a row: a conversation, and whether its `label` is true (or 1).

    The last assistant turn is judged, unless the row has a prompt and a completion.

    Raises:
      BadRecordError: As `read_conversation`, or the row has no label.
    """
    conversation, label = read_conversation(row), row.get("label")
    _check(label in (0, 1), "label", label, "true (or 1) for a good answer, else false (or 0)")
    size = conversation.num_prompt_messages or len(conversation.messages) - 1
    role = conversation.messages[size]["role"]
    _check(role == "assistant", "messages[-1].role", role, "the assistant, whose answer is judged")
    return Judgement(conversation._replace(num_prompt_messages=size), bool(label))


def drop_nulls(value: Any) -> Any:
    """Return rows of a table without null keys, which the keys of other rows leave in objects.

    So the arguments of a tool call are those of the call, not those of all calls.
    """
    if isinstance(value, Mapping):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def _with_columns(row: Mapping[str, Any], messages: list[Message], size: int) -> Conversation:
    """Return messages with the `tools` and `system` of a row; `size` of them are the prompt."""
    tools, system = row.get("tools"), []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except (ValueError, RecursionError) as error:
            raise BadRecordError(str(error), field="tools", value=tools) from None
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    _check(tools is None or is_list, "tools", tools, "a list of JSON schemas")
    if row.get("system"):
        system = _read_messages(row, "system", role="system")
    for name in _UNREAD_COLUMNS:
        _check(not row.get(name), name, row.get(name), "none. Of media, only images are read")
    messages = _name_images(row, system + messages)
    return Conversation(messages, tools or None, size and size + len(system))


def _parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the parts of all contents that are lists."""
    lists = (content for m in messages if isinstance(content := m.get("content"), list))
    return [part for content in lists for part in content]


def _name_images(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Return messages whose parts of type image all name one: their own, or the column's next."""
    column = row.get("images", row.get("image", []))
    column = column if isinstance(column, list) else [column]
    names = [_image_name(value, f"images[{i}]") for i, value in enumerate(column)]
    split = [_split_markers(message) for message in messages] if names else messages
    count = sum(part == {"type": "image"} for part in _parts(split))
    expected = f"{count}, one for each of the parts of type image without a name"
    _check(count == len(names), "number of images", len(names), expected)
    left = iter(names)
    for message in split if names else ():
        if isinstance(parts := message.get("content"), list):
            message["content"] = [
                {**part, "image": next(left)} if part == {"type": "image"} else part
                for part in parts
            ]
    return split


def _split_markers(message: Message) -> Message:
    """Return a new message with a part of type image in the place of each marker."""
    content = message.get("content")
    if isinstance(content, str) and IMAGE_MARKER in content:
        first, *others = content.split(IMAGE_MARKER)
        parts = [{"type": "text", "text": first}]
        for text in others:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        content = [part for part in parts if part != {"type": "text", "text": ""}]
    return {**message, "content": content} if "content" in message else message


def _read_messages(
    row: Mapping[str, Any], field: str, *, role: str | None = "assistant"
) -> list[Message]:
    """Return the messages of a column: a list of them, one, or a text, which has a role."""
    value = row.get(field)
    if role is not None and isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, Mapping) else value
    expected = "a list of messages" if role is None else "text or a list of messages"
    _check(isinstance(messages, list) and messages, field, value, expected)
    return [_read_message(item, f"{field}[{i}]") for i, item in enumerate(messages or ())]


def _read_message(value: Any, field: str) -> Message:
    _check(isinstance(value, Mapping), field, value, "an object with role and content")
    # Equal messages have equal JSON, by which they are held out.
    message = _without_nulls({"role": None, "content": None, **value})
    if "from" in message and "role" not in message:
        sender = message.pop("from")
        message["role"] = _SHAREGPT_ROLES.get(str(sender), sender)
        message["content"] = message.pop("value", None)
    if message.get("role") not in ROLES:
        raise BadRecordError(field=f"{field}.role", value=message.get("role"), choices=ROLES)
    if "content" in message or not message.get("tool_calls"):
        message["content"] = _content(message.get("content"), f"{field}.content")
    train, calls = message.get("train", False), message.get("tool_calls", [])
    _check(isinstance(train, bool), f"{field}.train", train, "true or false")
    is_list = isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)
    _check(is_list, f"{field}.tool_calls", calls, "a list of objects")
    return message


def _text(content: Any, field: str) -> str:
    """Return a text, or the joined parts of type text of a list."""
    text = _content(content, field)
    _check(isinstance(text, str), field, content, "text, or a list of parts of type text")
    return str(text)


def _content(content: Any, field: str) -> str | list[dict[str, Any]]:
    """Return a text, the joined parts of type text of a list, or parts with images."""
    parts = [_part(part, field) for part in (content if isinstance(content, list) else [content])]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, field: str) -> dict[str, Any]:
    """Return a part `{"type": "text", "text": …}`, or `{"type": "image"}`, maybe with `image`."""
    values = _without_nulls(part) if isinstance(part, Mapping) else {"text": part}
    if values.get("type") in ("image", "image_url"):
        names = [_image_name(values[name], field) for name in _IMAGE_NAMES if name in values]
        return {"type": "image", "image": names[0]} if names else {"type": "image"}
    text = values.get("text")
    # Other types of text are such as `input_text`; a video may have a text as well.
    is_text = isinstance(text, str) and "text" in str(values.get("type", "text"))
    _check(is_text, field, part, "text, or a list of parts of type text or image")
    return {"type": "text", "text": text}


def _image_name(value: Any, field: str) -> str:
    """Return a path or `data:` URI, also that in an object with `url`, `path` or `bytes`."""
    if isinstance(value, Mapping):
        value = _without_nulls(value)
        if isinstance(data := value.get("bytes"), bytes):
            return f"data:;base64,{base64.b64encode(data).decode()}"
        value = value.get("url", value.get("path"))
    is_name = isinstance(value, str) and value and "://" not in value
    _check(is_name, field, value, "the path of an image, or a data: URI. URLs are not read")
    return str(value)


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without the keys that are null, as `transformers` drops them."""
    return {key: item for key, item in value.items() if item is not None}


def _check(condition: Any, field: str, value: Any, expected: str) -> None:
    if not condition:
        raise BadRecordError(field=field, value=value, expected=expected)
