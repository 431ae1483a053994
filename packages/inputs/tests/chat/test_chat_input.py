"""Conversations of files as rows: forms of files, packing, loss, cuts, splits and states."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.chat.chat_input import ChatInput, ChatPrompts
from layerkit_inputs.chat.conversations import read_conversation
from layerkit_inputs.chat.template import load_chat_template
from layerkit_inputs.chat.token_masks import encode_conversation
from layerkit_inputs.testing import laws
from layerkit_inputs.text.tokenizers import ByteTokenizer


def turns(*texts: str, **fields: Any) -> dict[str, Any]:
    """Return a row of messages by user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, **fields}


ROWS = [turns(f"{n} and {n}?", str(2 * n), "Sure?", "Yes" * (n % 5 + 1)) for n in range(40)]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ChatInput]:
    path = write(tmp_path / "chat.jsonl", ROWS)
    fields = {"batch_size": 4, "paths": [str(path)], "chat_template": "zephyr", "seq_length": 160}
    return lambda **options: ChatInput(**{**fields, **options})


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    "fields",
    [
        {"is_training": True},
        pytest.param({"split": "all", "packing": "none"}, marks=pytest.mark.slow),
    ],
)
def test_chat_input_fulfills_the_laws(law, fields, make):
    law(lambda **options: make(**fields, **options))


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_chat_prompts_fulfill_the_laws(law, tmp_path):
    path = write(tmp_path / "chat.jsonl", ROWS)
    fields = {"batch_size": 8, "paths": [str(path)], "chat_template": "zephyr", "split": "all"}
    law(lambda **options: ChatPrompts(**{**fields, "prompt_length": 80, **options}))


def documents_of(batches: list[Any]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return the (labels, weights) of each segment of each row."""
    return [
        (tuple(batch.labels[row][here]), tuple(batch.weights[row][here]))
        for batch in batches
        for row in range(len(batch.ids))
        for number in range(1, batch.segment_ids[row].max(initial=0) + 1)
        for here in [batch.segment_ids[row] == number]
    ]


def test_packed_rows_and_single_rows_have_the_tokens_and_the_loss_of_each_conversation(make):
    template, tokenizer = load_chat_template("zephyr", ByteTokenizer()), ByteTokenizer()
    tokens = [encode_conversation(read_conversation(row), template, tokenizer)[:2] for row in ROWS]
    expected = sorted((tuple(ids[1:]), tuple(loss[1:])) for ids, loss in tokens)
    counts = {}
    blank = ChatInput.blank_batch(ChatInput.HParams.config(seq_length=160), 4)
    assert spec_of(blank) == spec_of(make(is_training=True).get_next())
    for packing in ("first_fit", "none"):
        source = make(split="all", packing=packing)
        batches = [*source.eval_batches()]
        assert sorted(documents_of(batches)) == expected
        counts[packing] = source._num_rows()
        for batch in batches:
            assert not batch.weights[batch.paddings == 1].any()
            starts = batch.segment_pos == 0
            same = (batch.ids[:, 1:] == batch.labels[:, :-1]) | starts[:, 1:]
            assert same.all()
    assert counts["first_fit"] < 0.7 * counts["none"] == 28
    text = ByteTokenizer().decode([i for i, w in zip(*expected[0], strict=True) if w])
    assert text == "0\nYes\n"


@pytest.mark.parametrize(
    ("too_long", "loss_on", "kept", "report"),
    [
        ("cut", "all", ["b", "bd"], ["conversations cut at a turn: 1"]),
        ("drop", "all", ["b"], ["conversations dropped as too long: 1"]),
        ("cut", "last", ["b"], ["conversations dropped as too long: 1"]),
    ],
)
def test_too_long_conversations_are_cut_or_dropped_and_counted(
    tmp_path, make, too_long, loss_on, kept, report
):
    rows = [
        turns("a", "b"),
        turns("a", "b", "c", "d", "e", "f" * 99),
        turns("q" * 150, "no"),
        turns("q"),
    ]
    path = write(tmp_path / "long.jsonl", rows)
    source = make(paths=[str(path)], split="all", seq_length=80, too_long=too_long, loss_on=loss_on)
    texts = [
        ByteTokenizer().decode([label for label, weight in zip(*one, strict=True) if weight])
        for one in documents_of([*source.eval_batches()])
    ]
    assert sorted(text.replace("\n", "") for text in texts) == kept
    counts = source._data_text().split("; ")[2:]
    dropped = sum(int(line.rpartition(" ")[2]) for line in counts if "too long" in line)
    assert dropped == 4 - 1 - len(kept)
    assert "conversations dropped without a loss: 1" in counts
    assert set(report) - {"conversations dropped as too long: 1"} <= set(counts)


def test_train_flags_select_turns(tmp_path, make):
    row = turns("a", "b", "c", "d")
    for number, flag in ((1, False), (3, True)):
        row["messages"][number]["train"] = flag
    path = write(tmp_path / "flags.jsonl", [row])
    source = make(paths=[str(path)], split="all", loss_on="train", batch_size=1)
    batch = source.get_next()
    assert ByteTokenizer().decode(batch.labels[batch.weights == 1]) == "d\n"
    assert "no effect" not in source._data_text()
    source = make(paths=[str(path)], split="all")
    len(source._documents)
    assert "conversations whose flags (train, weight) have no effect: 1" in source._data_text()


def test_every_kind_of_file_has_the_same_rows(tmp_path):
    arrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": row["messages"], "id": number} for number, row in enumerate(ROWS)]
    write(tmp_path / "lines.jsonl", rows)
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
    with gzip.open(tmp_path / "packed.json.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "table.parquet")
    saved = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:2])}
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "train" / "cache-0.arrow").write_bytes(b"")  # as `Dataset.map` leaves it
    (tmp_path / "README.md").write_text("about")
    source = ChatInput(batch_size=1, paths=[str(tmp_path)], chat_template="zephyr", split="all")
    assert [file.name for file in source._all_files] == [
        "array.json", "lines.jsonl", "packed.json.gz", "saved/test/data-00000-of-00001.arrow",
        "saved/train/data-00000-of-00001.arrow", "table.parquet",
    ]  # fmt: skip
    for file in source._all_files:
        actual = [json.loads(text) for _, text in source._texts(file)]
        expected = [[row["messages"], None, 0] for row in rows]
        assert actual == expected[: 2 if "test" in file.name else None], file.name
    source = ChatInput(
        batch_size=1, paths=[str(tmp_path / "saved")], chat_template="zephyr", split="heldout"
    )
    assert len(source._documents) == 2
    readme = [str(tmp_path / "README.md")]
    source = ChatInput(paths=readme, batch_size=1, chat_template="zephyr", split="all")
    with pytest.raises(BadRecordError, match=r"README.md: suffix='.md'"):
        source.get_next()


def test_heldout_conversations_are_not_trained_on(tmp_path, make):
    # The same conversations once more, with the keys of messages in another order.
    again = [{"messages": [dict([*one.items()][::-1]) for one in row["messages"]]} for row in ROWS]
    path = str(write(tmp_path / "twice.jsonl", [*ROWS, *again]))

    def texts(split: str) -> set[Any]:
        batches = make(split=split, paths=[path]).eval_batches()
        return {labels for labels, _ in documents_of([*batches])}

    train, heldout = texts("train"), texts("heldout")
    assert heldout
    assert not train & heldout
    assert len(train | heldout) == len(ROWS)


def test_bad_rows_are_skipped_and_counted_or_named(tmp_path, make, raises):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"messages": []}\n[1]\n{"a\n' + json.dumps(ROWS[0]) + "\n")
    source = make(paths=[str(path)], split="all", on_bad_record="skip")
    assert len(source._documents) == 1
    assert source.num_skipped == 3
    with raises(BadRecordError, owner=f"{path}, line 1"):
        make(paths=[str(path)], split="all").get_next()


def test_wrong_template_date_and_columns_are_named(tmp_path, make, raises):
    broken, file = tmp_path / "broken.jinja", tmp_path / "text.parquet"
    broken.write_text("{% if %}")
    for skips in ("skip", "refuse"):  # A template is no record.
        with pytest.raises(BadRecordError, match="cannot read the chat template") as error:
            make(chat_template=str(broken), on_bad_record=skips).get_next()
        assert error.value.hint is None
    with raises(ConfigError, field="template_date", value="today"):
        make(template_date="today")
    pytest.importorskip("pyarrow.parquet").write_table(
        pytest.importorskip("pyarrow").Table.from_pylist([{"text": "a"}]), file
    )
    with pytest.raises(BadRecordError, match=r"conversation=\['text'\]"):
        make(paths=[str(file)], split="all").get_next()


def test_conversations_whose_ends_have_no_loss_are_counted(tmp_path, make):
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}"
        "{% endfor %}"
    )
    (tmp_path / "ends.jinja").write_text(source)
    texts = []
    for template in (str(tmp_path / "ends.jinja"), "zephyr"):
        chat = make(split="all", chat_template=template)
        assert len(chat._documents) == 40
        texts.append("conversations without a loss on the end of a turn: 40" in chat._data_text())
    assert texts == [True, False]


def test_prompts_end_before_the_last_answer_and_exact_match_reads_it(tmp_path, make):
    path = write(tmp_path / "p.jsonl", [turns("a", "b", "c", "d"), turns("e", "f")])
    prompts = ChatPrompts(
        batch_size=2, paths=[str(path)], split="all", chat_template="zephyr", prompt_length=80
    )
    batch = prompts.get_next()
    texts = [
        ByteTokenizer().decode(ids[:length])
        for ids, length in zip(batch.ids, batch.prompt_lengths, strict=True)
    ]
    assert texts == [
        "<|user|>\na\n<|assistant|>\nb\n<|user|>\nc\n<|assistant|>\n",
        "<|user|>\ne\n<|assistant|>\n",
    ]
    assert prompts.prediction_metrics({0: "d\n", 1: "g"}) == {"exact_match": 0.5}


def test_conversations_none_of_which_is_left_are_an_error_with_counts(make, raises):
    dropped = {"conversations dropped as too long": 40}
    with raises(ConfigError, field="dropped", value=dropped):
        make(seq_length=8, split="all").get_next()


def test_state_of_other_template_or_loss_is_an_error(make):
    state = make(is_training=True).get_state()
    for fields in ({"chat_template": "chatml"}, {"loss_on": "last"}, {"seq_length": 170}):
        with pytest.raises(ConfigError, match="cannot restore"):
            make(is_training=True, **fields).set_state(state)


def test_states_of_many_batches_read_all_tokens_once(make):
    calls = []

    class Counted(ChatInput):
        def _fingerprint(self):
            calls.append(self)
            return super()._fingerprint()

    fields = {name: getattr(make(), name) for name in ("paths", "chat_template", "seq_length")}
    source = Counted(batch_size=4, is_training=True, **fields)
    for rows_done in (4, 8, 12):
        source.get_next()
        assert source.get_state()["position"]["rows_done"] == rows_done
    source.set_state(source.get_state())
    assert len(calls) == 1
