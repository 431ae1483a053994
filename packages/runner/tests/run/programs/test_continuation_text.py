"""Prompt and continuation are the text that a tokenizer's library decodes from all ids."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit_inputs.text.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
)
from layerkit_runner.run.programs.decode_program import TextStream, continuation_text

WORDS = ["▁the", "▁", "▁cat", "s", "e", "t", "a", "c", "▁a", "▁é", "."]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def llama2(tokenizers: Any) -> Any:
    """Like Llama 2, TinyLlama, Mistral and Phi 3."""
    names = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    vocab = {name: i for i, name in enumerate(names)}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    strip = decoders.Strip(content=" ", left=1, right=0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def metaspace(tokenizers: Any) -> Any:
    """Like T5 and XLM-R."""
    made = tokenizers.Tokenizer(
        tokenizers.models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in WORDS)], unk_id=0)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    return made


def byte_level(tokenizers: Any) -> Any:
    """Like GPT-2, Llama 3 and Qwen: every character above ASCII takes several tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate([*alphabet, "Ġa", "<|endoftext|>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("Ġ", "a")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made


def word_piece(tokenizers: Any) -> Any:
    """Like BERT."""
    names = ["[UNK]", "[SEP]", "the", "a", "cat", "##s", "##e", ".", "n't", "do", "'", "m"]
    vocab = {name: i for i, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    made.add_special_tokens(["[SEP]"])
    return made


def check(tokenizer: Any, decode: Callable[[list[int]], str], prompts: list[str]) -> None:
    rng = np.random.default_rng(0)
    for prompt in prompts:
        before = [*tokenizer.encode(prompt).tolist()]
        for _ in range(60):
            ids = rng.integers(0, tokenizer.vocab_size, rng.integers(1, 8)).tolist()
            whole = decode([*before, *ids])
            stream = TextStream(tokenizer, before)
            pieces = [*map(stream.add, ids), stream.rest()]
            assert decode(before) + "".join(pieces) == whole
            assert "".join(pieces) == stream.text()


@pytest.mark.parametrize("make", [llama2, metaspace, byte_level, word_piece])
def test_tokenizer_json(make: Callable[[Any], Any], tmp_path: Path):
    made = make(pytest.importorskip("tokenizers"))
    path = str(tmp_path / "tokenizer.json")
    made.save(path)
    prompts = ["the cat", "a", "the."] + ["", "é the "] * (make is not word_piece)
    check(HuggingFaceTokenizer(path=path), made.decode, prompts)


def test_sentencepiece_and_bytes(tmp_path: Path):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat", "a cat sat", "the hat"]),
        model_writer=model,
        vocab_size=280,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path / "a.model"
    path.write_bytes(model.getvalue())
    raw = sentencepiece.SentencePieceProcessor(model_file=str(path))
    check(SentencePieceTokenizer(path=str(path)), raw.decode, ["the cat", "a", ""])
    check(ByteTokenizer(), ByteTokenizer().decode, ["the ", "é"])


def test_streamed_pieces_are_whole_characters(tmp_path: Path):
    made = byte_level(pytest.importorskip("tokenizers"))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(path=str(tmp_path))
    ids = tokenizer.encode("aé你 🙂!").tolist()
    stream = TextStream(tokenizer, tokenizer.encode("é").tolist())
    assert [piece for piece in map(stream.add, ids) if piece] == list("aé你 🙂!")
    assert len(ids) == 1 + 2 + 3 + 1 + 4 + 1


def test_text_that_a_decoder_changes_or_ends_is_decoded_alone():
    assert continuation_text("a cat", "a cat sat", "sat") == " sat"
    assert continuation_text("inputs", "inputs", "targets") == "targets"
    assert continuation_text("é", "��", "�") == "�"
