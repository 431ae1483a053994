"""Rows of files as conversations, pairs and judgements."""

import json

import pytest

from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.chat.conversations import read_conversation, read_judgement, read_pair

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
SYSTEM = {"role": "system", "content": "Rhyme."}
CALL = {"type": "function", "function": {"name": "now", "arguments": {}}}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]

ROWS = {
    "messages": ({"messages": [USER, ANSWER], "prompt": "other"}, ([USER, ANSWER], None, 0)),
    "null keys": ({"messages": [USER | {"name": None}, ANSWER]}, ([USER, ANSWER], None, 0)),
    "parts": ({"messages": [USER | {"content": PARTS}, ANSWER]}, ([USER, ANSWER], None, 0)),
    "tool calls": (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        ([USER, {"role": "assistant", "tool_calls": [CALL]}], None, 0),
    ),
    "sharegpt": (
        {"conversations": SHAREGPT, "system": "Rhyme.", "tools": json.dumps(TOOLS)},
        ([SYSTEM, USER, ANSWER], TOOLS, 0),
    ),
    "text": ({"prompt": "Hi", "completion": "Ho"}, ([USER, ANSWER], None, 1)),
    "prompt of messages": (
        {"prompt": [SYSTEM, USER], "completion": [ANSWER], "tools": TOOLS},
        ([SYSTEM, USER, ANSWER], TOOLS, 2),
    ),
    "alpaca": (
        {"instruction": "Translate.", "input": "Hi", "output": "Ho", "text": "all"},
        ([{"role": "user", "content": "Translate.\n\nHi"}, ANSWER], None, 1),
    ),
    "alpaca without input": (
        {"instruction": "Hi", "input": "", "output": "Ho"}, ([USER, ANSWER], None, 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("row", "conversation"), ROWS.values(), ids=ROWS)
def test_each_form_of_a_row_gives_its_conversation(row, conversation):
    assert tuple(read_conversation(row)) == conversation


WRONG = {
    "no form": ({"text": "Hi"}, "Expected columns messages or"),
    "not a list": ({"messages": "Hi"}, "messages='Hi'. Expected a list of messages"),
    "no messages": ({"messages": []}, "messages=[]. Expected a list of messages"),
    "no object": ({"messages": [3]}, "messages[0]=3. Expected an object"),
    "role": ({"messages": [{"role": "asistant", "content": ""}]}, "Did you mean 'assistant'"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content=None. Expected text"),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]},
        "messages[0].content={'type': 'image', 'path': 'a.png'}. Expected text",
    ),
    "train": ({"messages": [USER, ANSWER | {"train": 1}]}, "messages[1].train=1"),
    "calls": ({"messages": [USER, ANSWER | {"tool_calls": ["f"]}]}, "messages[1].tool_calls"),
    "tools": ({"messages": [USER], "tools": "{"}, "tools='{'"),
    "output": ({"instruction": "Hi", "output": 3}, "output=3. Expected text"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "message"), WRONG.values(), ids=WRONG)
def test_malformed_row_is_an_error_that_names_the_value(row, message):
    with pytest.raises(BadRecordError) as error:
        read_conversation(row)
    assert message in str(error.value)


BAD = {"role": "assistant", "content": "Hu"}
PAIRS = {
    "text": {"prompt": "Hi", "chosen": "Ho", "rejected": "Hu"},
    "messages": {"prompt": [USER], "chosen": [ANSWER], "rejected": [BAD]},
    "one message": {"prompt": "Hi", "chosen": ANSWER, "rejected": BAD},
    "whole conversations": {"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, BAD]},
}


@pytest.mark.parametrize("row", PAIRS.values(), ids=PAIRS)
def test_each_form_of_a_pair_gives_the_same_conversations(row):
    chosen, rejected = read_pair(row)
    assert tuple(chosen) == ([USER, ANSWER], None, 1)
    assert tuple(rejected) == ([USER, BAD], None, 1)


def test_pair_whose_prompts_differ_is_an_error():
    other = {"role": "user", "content": "Bye"}
    with pytest.raises(BadRecordError, match="where the answers differ"):
        read_pair({"chosen": [USER, ANSWER], "rejected": [other, ANSWER]})


@pytest.mark.parametrize(("label", "expected"), [(True, True), (0, False)])
def test_judgement_is_of_the_last_answer(label, expected):
    conversation, is_good = read_judgement({"messages": [SYSTEM, USER, ANSWER], "label": label})
    assert tuple(conversation) == ([SYSTEM, USER, ANSWER], None, 2)
    assert is_good is expected
    with pytest.raises(BadRecordError, match="label=None"):
        read_judgement({"messages": [USER, ANSWER]})
