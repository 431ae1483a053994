"""Tokenizers: text to ids and back, and what no tokenizer may let happen."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError, MissingFileError
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_inputs.text.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    tokenizer_config,
)

END = "<|endoftext|>"


@pytest.fixture(params=["bytes", "sentencepiece", "huggingface"])
def tokenizer(request):
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "sentencepiece":
        return SentencePieceTokenizer(path=request.getfixturevalue("sentencepiece_file"))
    path = request.getfixturevalue("tokenizer_json")
    return HuggingFaceTokenizer(path=path, eos_token=END)


def test_text_becomes_ids_and_text_again(tokenizer):
    text = "line 7 of some text, and more"
    ids = tokenizer.encode(text)
    assert isinstance(tokenizer, Tokenizer)
    assert ids.dtype == np.int32 and ids.ndim == 1 and len(ids) > 3
    assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text
    np.testing.assert_array_equal(tokenizer.encode(text.encode()), ids)


def test_special_ids_and_ids_that_do_not_exist_have_no_text(tokenizer):
    special = {tokenizer.start_id, tokenizer.eos_id, tokenizer.vocab_size + 5, -1} - {None}
    assert tokenizer.decode([*special, *tokenizer.encode("some text"), *special]) == "some text"


def test_text_tokenizers_reject_invalid_unicode(tokenizer):
    with pytest.raises(UnicodeError):
        tokenizer.encode("half of a pair: \ud800")
    if not isinstance(tokenizer, ByteTokenizer):
        with pytest.raises(UnicodeDecodeError) as caught:
            tokenizer.encode(b"abc\xffd")
        assert caught.value.start == 3


def test_special_ids_of_bytes_and_sentencepiece(sentencepiece_file):
    one, other = ByteTokenizer(), SentencePieceTokenizer(path=sentencepiece_file)
    assert (one.pad_id, one.bos_id, one.eos_id, one.start_id, one.vocab_size) == (0, 1, 2, 1, 259)
    # As in SeqIO, a model without BOS begins with its padding id.
    assert (other.pad_id, other.bos_id, other.eos_id, other.start_id) == (0, None, 1, 0)
    assert other.vocab_size == 60


def test_special_tokens_are_named_or_stand_beside_the_file(tokenizer_json, tmp_path):
    plain = HuggingFaceTokenizer(path=tokenizer_json)
    assert (plain.pad_id, plain.bos_id, plain.eos_id, plain.start_id) == (0, None, None, None)
    end = plain._model.token_to_id(END)
    named = HuggingFaceTokenizer(path=tokenizer_json, eos_token=END)
    assert (named.eos_id, named.start_id, named.bos_id, named.pad_id) == (end, end, None, end)
    assert named.fingerprint() != plain.fingerprint()
    shutil.copy(tokenizer_json, tmp_path)
    roles = {"bos_token": {"content": END, "special": True}, "pad_token": "0", "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    beside = HuggingFaceTokenizer(path=str(tmp_path))
    assert (beside.bos_id, beside.eos_id) == (end, None)
    assert beside.pad_id == plain._model.token_to_id("0")
    given_too = HuggingFaceTokenizer(path=str(tmp_path / "tokenizer.json"), bos_token="1")
    assert given_too.bos_id == plain._model.token_to_id("1")


@pytest.mark.parametrize(
    ("content", "error", "field"),
    [('{"bos_token": 7}', ConfigError, "bos_token"), ("[" * 100_000, BadRecordError, "path")],
    ids=["a number", "nested too deeply"],
)
def test_damaged_tokenizer_config_raises(raises, tokenizer_json, tmp_path, content, error, field):
    shutil.copy(tokenizer_json, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with raises(error, field=field):
        _ = HuggingFaceTokenizer(path=str(tmp_path)).bos_id


def test_special_token_in_text_becomes_its_id_or_stays_text(tokenizer_json, sentencepiece_file):
    tokenizers = pytest.importorskip("tokenizers")
    text = f"a{END}b"
    # What `transformers` calls; it splits special tokens off unless told otherwise.
    expected = tokenizers.Tokenizer.from_file(tokenizer_json).encode(text, add_special_tokens=False)
    fields = {"path": tokenizer_json, "eos_token": END}
    as_ids = HuggingFaceTokenizer(**fields)
    assert as_ids.encode(text).tolist() == expected.ids
    assert as_ids.encode(text)[1:-1].tolist() == [as_ids.eos_id]
    as_text = HuggingFaceTokenizer(special_tokens_in_text="text", **fields)
    assert as_text.eos_id not in as_text.encode(text)
    assert as_text.decode(as_text.encode(text)) == text
    np.testing.assert_array_equal(as_ids.encode("a b"), as_text.encode("a b"))
    pieces = SentencePieceTokenizer(path=sentencepiece_file)
    assert pieces.eos_id not in pieces.encode("a</s>b")


def test_fingerprint_and_note_depend_on_special_tokens_in_text(raises, tokenizer_json):
    as_ids = HuggingFaceTokenizer(path=tokenizer_json)
    as_text = HuggingFaceTokenizer(path=tokenizer_json, special_tokens_in_text="text")
    assert as_ids.fingerprint() != as_text.fingerprint()
    for tokenizer, value in ((as_ids, "ids"), (as_text, "text")):
        assert END in tokenizer.note and repr(value) in tokenizer.note
    with raises(ConfigError, field="special_tokens_in_text", value="txt"):
        HuggingFaceTokenizer(path=tokenizer_json, special_tokens_in_text="txt")


def test_special_tokens_are_named_by_their_ids(tokenizer_json, sentencepiece_file):
    model = HuggingFaceTokenizer(path=tokenizer_json)
    assert model.special_tokens == {model._model.token_to_id(END): END}
    pieces = SentencePieceTokenizer(path=sentencepiece_file)
    assert pieces.special_tokens == {0: "<pad>", 1: "</s>", 2: "<unk>"}
    assert ByteTokenizer().special_tokens == {0: "PAD", 1: "BOS", 2: "EOS"}


def test_truncation_and_padding_in_the_file_are_switched_off(tokenizer_json, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer.from_file(tokenizer_json)
    model.enable_truncation(2)
    model.enable_padding(length=50)
    model.save(str(tmp_path / "short.json"))
    text = "line 7 of some text"
    np.testing.assert_array_equal(
        HuggingFaceTokenizer(path=str(tmp_path / "short.json")).encode(text),
        HuggingFaceTokenizer(path=tokenizer_json).encode(text),
    )


def test_the_fingerprint_is_that_of_the_file(sentencepiece_file, tokenizer_json, tmp_path):
    digest = hashlib.sha256(Path(sentencepiece_file).read_bytes()).hexdigest()
    assert SentencePieceTokenizer(path=sentencepiece_file).fingerprint() == digest
    moved = shutil.copy(sentencepiece_file, tmp_path / "elsewhere.model")
    assert SentencePieceTokenizer(path=str(moved)).fingerprint() == digest
    digest = hashlib.sha256(Path(tokenizer_json).read_bytes()).hexdigest()
    as_text = HuggingFaceTokenizer(path=tokenizer_json, special_tokens_in_text="text")
    assert as_text.fingerprint() == f"{digest} None,None,None start=None"
    assert ByteTokenizer().fingerprint() == "bytes"


def test_missing_file_raises_when_built(raises, tmp_path):
    (tmp_path / "c4.model").touch()
    wrong, right = str(tmp_path / "c4.modl"), str(tmp_path / "c4.model")
    with raises(MissingFileError, field="path", value=wrong, choices=("bytes", right)):
        SentencePieceTokenizer(path=wrong)
    with raises(MissingFileError, field="path", value=str(tmp_path / "tokenizer.json")):
        HuggingFaceTokenizer(path=str(tmp_path))
    with pytest.raises(MissingFileError, match="path='byte'.* Did you mean 'bytes'"):
        tokenizer_config("byte").Instantiate()
    with pytest.raises(MissingFileError, match="folder: nowhere: path='nowhere/c4.model'.*'bytes'"):
        tokenizer_config("nowhere/c4.model").Instantiate()


@pytest.mark.parametrize("content", [b"", b"no model", b"\x00" * 100, None])
@pytest.mark.parametrize("kind", [SentencePieceTokenizer, HuggingFaceTokenizer])
def test_damaged_files_raise(kind, content, tmp_path, sentencepiece_file, tokenizer_json):
    path = tmp_path / "broken"
    if content is None:  # truncated
        file = sentencepiece_file if kind is SentencePieceTokenizer else tokenizer_json
        content = Path(file).read_bytes()[:-100]
    path.write_bytes(content)
    with pytest.raises(BadRecordError) as caught:
        kind(path=str(path)).encode("text")
    assert (caught.value.field, caught.value.value) == ("path", str(path))


def test_unknown_special_token_raises_with_the_nearest(tokenizer_json):
    with pytest.raises(ConfigError, match=re.escape(f"Did you mean '{END}'?")) as caught:
        _ = HuggingFaceTokenizer(path=tokenizer_json, eos_token="<|endoftxt|>").eos_id
    assert (caught.value.field, caught.value.value) == ("eos_token", "<|endoftxt|>")
