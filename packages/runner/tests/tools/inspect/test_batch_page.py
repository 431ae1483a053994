"""The page of batches: its tokens and images against the arrays, what it escapes, and its size."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit_inputs import (
    BaseInput,
    ByteTokenizer,
    ChatInput,
    GeneratedDigits,
    LocalText,
    NumberWords,
    PairInput,
)
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.tools.inspect.batch_forms import batch_page, image_data, images_data, turns
from layerkit_runner.tools.inspect.batch_rows import read_row, token_sides
from layerkit_runner.tools.inspect.batches import read_input, simulated_hosts
from layerkit_runner.tools.pages.tokens import Token, read_tokens

CHIP = re.compile(r'<i(?: class="([^"]*)")? title="([^"]*)">([^<]*)</i>')
ATTACK = "<script>alert(1)</script> \u202egnp.exe\u202c \x1b[31m \x00 café 東京\n\t"
FIELDS = {"is_training": True, "split": "all", "percore_batch_size": 1.0, "input_random_seed": 0}


def configs(folder: Path) -> dict[str, Any]:
    """Return inputs of packed text, conversations, pairs, pairs of texts, and images."""
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} {ATTACK}" * (1 + number % 3))
    turn = [{"role": "user", "content": ATTACK}, {"role": "assistant", "content": "No. "}]
    chats = [{"messages": turn * (1 + number % 3)} for number in range(40)]
    pairs = [{"prompt": f"{n}?", "chosen": f"{n}!", "rejected": "é" * (n + 1)} for n in range(20)]
    for name, rows in {"chats": chats, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    chat = {"chat_template": "zephyr", **FIELDS}
    make = {
        LocalText: {"paths": [f"{folder}/*.txt"], "seq_length": 160, **FIELDS},
        ChatInput: {"paths": [f"{folder}/chats.jsonl"], "seq_length": 500, **chat},
        PairInput: {"paths": [f"{folder}/pairs.jsonl"], "seq_length": 90, **chat},
        NumberWords: {"inputs_length": 80, "targets_length": 60, **FIELDS, "split": "train"},
        GeneratedDigits: {"is_training": True, "percore_batch_size": 1.0},
    }
    return {kind.__name__: kind.HParams.config(**fields) for kind, fields in make.items()}


def page_of(*inputs: Any, num_batches: int = 1) -> str:
    partitioner = SpmdPartitioner(ici_mesh_shape=[8, 1, 1])
    partitioner.start()
    hosts = simulated_hosts(jax.devices(), 1)
    parts = [
        read_input(config, "train", partitioner, hosts, num_batches, is_page=True)
        for config in inputs
    ]
    return batch_page("Test", "1 host(s)", parts)


def rows_of(page: str) -> list[list[tuple[str, dict[str, float], str]]]:
    """Return the class, facts and text of each token of each row."""
    return [
        [
            (kind, {k: float(v) for k, v in re.findall(r"(\w+) ([\d.]+)", title)}, html.unescape(t))
            for kind, title, t in CHIP.findall(row)
        ]
        for row in page.split("<article")[1:]
    ]


@pytest.mark.parametrize("name", ["LocalText", "ChatInput", "PairInput", "NumberWords"])
def test_tokens_of_page_are_those_of_batch(name: str, tmp_path: Path):
    config = configs(tmp_path)[name]
    rows = rows_of(page_of(config))
    batch = build(config.set(batch_size=8)).get_next()
    assert len(rows) > 2
    for number, chips in enumerate(rows):
        expected: list[tuple[bool, dict[str, float]]] = []
        for side, part in token_sides(batch):
            numbers = part.segment_ids[number]
            for segment in np.unique(numbers[numbers > 0]):
                (places,) = np.nonzero(numbers == segment)
                where = {"segment": segment} if numbers.max() > 1 else {}
                # Ids alone in the source; else the first id, which has no loss, and the labels.
                for p in places if side == "src" else places[:1]:
                    facts = {"id": part.ids[number, p], "position": p, **where}
                    expected.append((side != "src", facts))
                for p in () if side == "src" else places:
                    weight = part.weights[number, p]
                    facts = {"id": part.labels[number, p], "position": p, **where}
                    expected.append((weight == 0, facts | {"weight": weight}))
        assert [("masked" in kind, facts) for kind, facts, _ in chips] == expected
        decoded = ByteTokenizer().decode([int(facts["id"]) for _, facts, _ in chips])
        shown = "".join(text for kind, _, text in chips if "special" not in kind and text != "‥")
        if "\ufffd" not in decoded:  # A row may begin within a character.
            signs = decoded.translate(str.maketrans(" \n\t", "␣⏎⇥"))
            assert shown == re.sub(r"[\x00-\x1f\u202c\u202e]", lambda c: repr(c[0])[1:-1], signs)


def test_turns_of_assistant_are_apart_and_pairs_are_side_by_side(tmp_path: Path):
    inputs = configs(tmp_path)
    page = page_of(inputs["ChatInput"], inputs["PairInput"])
    turns = re.findall(r'<span class="turn( weighted)?"><small>([^<]*)</small>(.*?)</span>', page)
    assert {(bool(kind), label) for kind, label, _ in turns} == {
        (True, "assistant, with loss"),
        (False, "without loss"),
    }
    texts = ["".join(text for *_, text in CHIP.findall(chips)) for _, _, chips in turns]
    assert texts[:2][1].startswith("No.")
    assert re.findall("<h5>(.*)</h5>", page)[:4] == ["chosen", "rejected"] * 2
    assert "tokens of a text" in page
    assert re.search(r"padding of a row in %.*?<title>\d+ to \d+: \d", page, re.DOTALL)


def test_images_of_page_are_those_of_batch(tmp_path: Path):
    config = configs(tmp_path)["GeneratedDigits"]
    images = re.findall(r'src="data:image/png;base64,([^"]*)"', page_of(config))
    batch = build(config.set(batch_size=8)).get_next()
    assert len(images) == 8
    for number, data in enumerate(images):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        np.testing.assert_array_equal(pixels, np.rint(255 * batch.inputs[number, :, :, 0]))


def test_page_shows_each_image_of_a_row():
    images = np.linspace(0, 1, 2 * 3 * 8 * 8 * 3).reshape(2, 3, 8, 8, 3)
    row = read_row(BaseInput(batch_size=2), NestedMap(images=images), 1)
    (values,) = row[1].values()
    shown = [
        Image.open(io.BytesIO(base64.b64decode(x.partition(",")[2]))) for x in images_data(values)
    ]
    np.testing.assert_array_equal(np.stack(shown), np.rint(255 * images[1]))


def test_ids_and_labels_of_other_tokens_are_two_sequences():
    masked = {"labels": np.array([[9, 8, 7]]), "weights": np.array([[0, 1, 0]])}
    batch = NestedMap(ids=np.array([[9, 1, 7]]))
    names = []
    for fields in ({}, masked):
        row = read_row(BaseInput(batch_size=1), NestedMap(batch, **fields), 0)
        names.append([(name, [t.id for t in part]) for name, _, part in turns(row.segments[0])])
    assert names == [[("", [9, 1, 7])], [("ids", [9, 1, 7]), ("labels", [9, 8, 7])]]


@pytest.mark.parametrize("shape", [(300, 200, 3), (8, 8, 4), (8, 300, 1)])
def test_images_of_any_range_become_small_ones(shape: tuple[int, ...]):
    values = np.linspace(-2, 3, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    data = base64.b64decode(image_data(values).partition(",")[2])
    pixels = np.asarray(Image.open(io.BytesIO(data)))
    assert max(pixels.shape[:2]) <= 96
    assert pixels.min() < 30
    assert pixels.max() > 225


def test_hostile_text_is_escaped(tmp_path: Path):
    page = page_of(*configs(tmp_path).values())
    assert page.count("<script") == 0
    assert not [char for char in page if not char.isprintable() and char != "\n"]
    assert r"\u202e" in page
    texts = ("\u202e", "", " ", " a", "\n\n", "\t", "a\xa0b")
    shown = [Token(text, 0, 0, is_special=False).shown for text in texts]
    assert shown == [r"\u202e", "‥", "␣", " a", "⏎⏎", "⇥", r"a\xa0b"]


def test_page_of_long_rows_and_many_batches_is_small_and_states_what_is_left_out(tmp_path: Path):
    (tmp_path / "long.txt").write_text("a long text " * 30_000)
    fields = {"paths": [f"{tmp_path}/long.txt"], "seq_length": 4096, **FIELDS}
    page = page_of(LocalText.HParams.config(**fields), num_batches=6)
    assert len(page) < 1_000_000
    assert page.count("3,584 more tokens of this row are left out.") == 4 * 4
    assert page.count("Rows 4 to 7 of this batch are left out.") == 4
    assert "only the first 4 batches are drawn; histograms count all" in page
    assert "0 to 0, median 0" in page  # padding of all rows


@pytest.mark.parametrize("text", ["naïve 東京 🙂 a  b\n", "\ufffd é"])
def test_texts_of_tokens_join_to_the_text(text: str):
    ids = ByteTokenizer().encode(text)
    tokens = read_tokens(ids, ByteTokenizer().decode, {})
    assert "".join(token.text for token in tokens) == text
    # Incomplete characters before special ids.
    tokens = read_tokens(
        np.array([1, *ids, 2, 0xC3 + 3, 1]), ByteTokenizer().decode, ByteTokenizer.special_tokens
    )
    assert "".join(token.text for token in tokens) == f"BOS{text}EOS\ufffdBOS"
    assert [token.position for token in tokens if token.is_special] == [0, *len(ids) + np.r_[1, 3]]


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, False), (1400, True)])
def test_page_of_batches_in_browser(open_page, tmp_path, width, dark):
    file = tmp_path / "batches.html"
    file.write_text(page_of(*configs(tmp_path).values()))
    page = open_page(file, width=width, dark=dark)
    assert page.locator("figure svg rect").count() > 50
    assert page.locator("article img").evaluate_all("all => all.every(i => i.naturalWidth == 28)")
    chosen, rejected = (
        page.locator("h5", has_text=side).first.bounding_box() for side in ("chosen", "rejected")
    )
    assert (chosen["y"] == rejected["y"]) == (width > 1000)
    colors = (
        "all => all.map(i => getComputedStyle(i.querySelector('i:not(.masked)')).backgroundColor)"
    )
    tints = page.locator("article", has_text="row 0").first.locator(".segment").evaluate_all(colors)
    assert len(set(tints)) == len(tints) > 1
