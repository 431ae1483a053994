"""Rows of files as conversations, pairs and judgements."""

import json

import pytest

from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.chat.conversations import (
    drop_nulls,
    read_conversation,
    read_judgement,
    read_pair,
)

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
SYSTEM, BAD = {"role": "system", "content": "Rhyme."}, {"role": "assistant", "content": "Hu"}
CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
PARTS = {"content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}

ROWS = {
    "messages": ({"messages": [USER, ANSWER], "prompt": "other"}, [USER, ANSWER], None, 0),
    "null keys": ({"messages": [USER | {"name": None}, ANSWER]}, [USER, ANSWER], None, 0),
    "parts": ({"messages": [USER | PARTS, ANSWER]}, [USER, ANSWER], None, 0),
    "tool calls": ({"messages": [USER, CALLS | {"content": None}]}, [USER, CALLS], None, 0),
    "sharegpt": (
        {"conversations": SHAREGPT, "system": "Rhyme.", "tools": json.dumps(TOOLS)},
        *([SYSTEM, USER, ANSWER], TOOLS, 0),
    ),
    "text": ({"prompt": "Hi", "completion": "Ho"}, [USER, ANSWER], None, 1),
    "prompt of messages": (
        {"prompt": [SYSTEM, USER], "completion": [ANSWER], "tools": TOOLS},
        *([SYSTEM, USER, ANSWER], TOOLS, 2),
    ),
    "alpaca": (
        {"instruction": "Say.", "input": "Hi", "output": "Ho"},
        *([USER | {"content": "Say.\n\nHi"}, ANSWER], None, 1),
    ),
    "no input": ({"instruction": "Hi", "input": "", "output": "Ho"}, [USER, ANSWER], None, 1),
}


@pytest.mark.parametrize(("row", "messages", "tools", "size"), ROWS.values(), ids=ROWS)
def test_each_form_of_a_row_gives_its_conversation(row, messages, tools, size):
    assert read_conversation(row) == (messages, tools, size)


VIDEO = {"type": "video", "path": "a.mp4"}
WRONG = {
    "no form": ({"text": "Hi"}, "Expected columns messages or conversations"),
    "not a list": ({"messages": "Hi"}, "messages='Hi'. Expected a list of messages"),
    "no messages": ({"messages": []}, "messages=[]. Expected a list of messages"),
    "no object": ({"messages": [3]}, "messages[0]=3. Expected an object"),
    "role": ({"messages": [{"role": "asistant"}]}, "Did you mean 'assistant'"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content=None. Expected text"),
    "video": ({"messages": [USER | {"content": [VIDEO]}]}, f"content={VIDEO}. Expected text"),
    "train": ({"messages": [USER, ANSWER | {"train": 1}]}, "messages[1].train=1"),
    "calls": ({"messages": [USER, ANSWER | {"tool_calls": ["f"]}]}, "messages[1].tool_calls"),
    "tools": ({"messages": [USER], "tools": "{"}, "tools='{'"),
    "output": ({"instruction": "Hi", "output": 3}, "output=3. Expected text"),
}


@pytest.mark.parametrize(("row", "message"), WRONG.values(), ids=WRONG)
def test_malformed_row_is_an_error_that_names_the_value(row, message):
    with pytest.raises(BadRecordError) as error:
        read_conversation(row)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Ho", "rejected": "Hu"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": BAD},
        {"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, BAD]},
    ],
    ids=["text", "messages", "whole conversations"],
)
def test_each_form_of_a_pair_gives_the_same_conversations(row):
    assert read_pair(row) == (([USER, ANSWER], None, 1), ([USER, BAD], None, 1))
    with pytest.raises(BadRecordError, match="where the answers differ"):
        read_pair({"chosen": [USER, ANSWER], "rejected": [SYSTEM, ANSWER]})


@pytest.mark.parametrize(("label", "expected"), [(True, True), (0, False)])
def test_judgement_is_of_the_last_answer(label, expected):
    messages = [SYSTEM, USER, ANSWER]
    assert read_judgement({"messages": messages, "label": label}) == ((messages, None, 2), expected)
    with pytest.raises(BadRecordError, match="label=None"):
        read_judgement({"messages": messages})


def test_arguments_of_a_call_in_a_table_are_its_own():
    arrow = pytest.importorskip("pyarrow")
    calls = [{"function": {"name": key, "arguments": {key: 1}}} for key in ("a", "b")]
    rows = [{"messages": [USER, {"role": "assistant", "tool_calls": [call]}]} for call in calls]
    table = arrow.Table.from_pylist(rows)
    assert table.to_pylist() != drop_nulls(table.to_pylist()) == rows
