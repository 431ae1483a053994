"""Which text a tokenizer loses, and the documented calls that make tokenizers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from layerkit_inputs import LocalText, Mixture, Prefetch
from layerkit_inputs.base.tokenizer_interface import first_difference, lost_text
from layerkit_inputs.text.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)

DOCS = Path(__file__).parents[4] / "docs"
CALL = re.compile(
    r"^(sentencepiece\.SentencePieceTrainer\.train\($.*?^\))$", re.DOTALL | re.MULTILINE
)
CODE = "def f(x):\n    if x:\n\t\treturn  1\n\n  # ﬁ Ⅳ e\u0301 漢字\r\n"


@pytest.mark.parametrize("page", ["train_your_own.md", "data_sets.md"])
def test_documented_sentencepiece_call_makes_a_tokenizer_that_loses_nothing(page, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    source = tmp_path / "text.txt"
    source.write_text("".join(f"word{n % 97} and\n    more {n * 7}\n" for n in range(3000)))
    (call,) = CALL.findall((DOCS / page).read_text())
    call = re.sub(r"input=.*", f"input={str(source)!r},", call)
    call = re.sub(r"model_prefix=.*", f"model_prefix={str(tmp_path / 'm')!r}, minloglevel=2,", call)
    exec(re.sub(r"vocab_size=\d+", "vocab_size=400", call), {"sentencepiece": sentencepiece})
    tokenizer = SentencePieceTokenizer(path=str(tmp_path / "m.model"))
    assert lost_text(tokenizer, [CODE.encode()]) is None
    for text in (CODE, " x", "\n", "x  \n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, None)


def test_lost_characters_are_counted(sentencepiece_file, tokenizer_json):
    pieces = SentencePieceTokenizer(path=sentencepiece_file)
    # SentencePiece's default rule makes "line of text" of this: 6 of 8 spaces and 3 breaks go.
    text = b"line\n\n    of    text\n"
    assert lost_text(pieces, [text]) == "6 spaces, 3 line breaks of the first document"
    assert lost_text(pieces, [b"line of"] * 2) is None
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, "?"))
    words.normalizer = tokenizers.normalizers.Lowercase()
    folder = Path(tokenizer_json).with_name("words.json")
    words.save(str(folder))
    lower = HuggingFaceTokenizer(path=str(folder))
    assert lost_text(lower, [b"A"]) == "1 'A' of the first document"


def test_a_space_that_a_tokenizer_puts_first_is_no_loss(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    letters = {letter: number for number, letter in enumerate("Ġab")}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.save(str(tmp_path / "tokenizer.json"))
    assert lost_text(HuggingFaceTokenizer(path=str(tmp_path)), [b"ab", b" a"]) is None


@pytest.mark.parametrize("text", [CODE, "a<|endoftext|>b", "", "é"])
def test_lossless_tokenizers_lose_nothing(tokenizer_json, text):
    for tokenizer in (ByteTokenizer(), HuggingFaceTokenizer(path=tokenizer_json)):
        assert lost_text(tokenizer, [text.encode(), text.encode()[:-1]]) is None


def test_reports_of_inputs_warn_of_lost_text(tmp_path, sentencepiece_file):
    (tmp_path / "a.txt").write_text("line\n\nof text\n")
    (tmp_path / "val.txt").write_text("line")
    tokenizer = SentencePieceTokenizer.HParams.config(path=sentencepiece_file)
    text = LocalText.HParams.config(paths=[str(tmp_path)], tokenizer=tokenizer)
    fields = {"batch_size": 1, "is_training": True}
    mixture = Mixture(components={"x": text.clone(), "y": text.clone(split="heldout")}, **fields)
    lines = mixture.describe_data()
    lost = "WARNING: the tokenizer loses 3 line breaks of the first document"
    assert [line[:11] for line in lines] == ["x: LocalTex", "x: WARNING:", "y: LocalTex"]
    assert lines[1] == f"x: {lost}"
    alone = text.clone(**fields).Instantiate()
    assert Prefetch(source=alone).describe_data()[1:] == [lost]


def test_first_difference_compares_the_texts_of_ids(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")

    def save(name, *words):
        ids = {word: number for number, word in enumerate(words)}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=words[0]))
        model.add_special_tokens([words[0]])
        (tmp_path / name).mkdir()
        model.save(str(tmp_path / name / "tokenizer.json"))
        return HuggingFaceTokenizer(path=str(tmp_path / name))

    one, more = save("one", "<s>", "a", "b"), save("more", "<s>", "a", "b", "c")
    other, special = save("other", "<s>", "a", "d"), save("special", "<p>", "a", "b")
    assert first_difference(one, one) is None
    assert first_difference(one, more) is None
    assert first_difference(more, one) == "id 3 of 4 is 'c' and ''"
    assert first_difference(one, other) == "id 2 of 3 is 'b' and 'd'"
    assert first_difference(one, special) == "id 0 of 3 is '<s>' and '<p>'"
    assert first_difference(ByteTokenizer(), one) is not None
