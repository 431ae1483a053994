"""Small real tokenizers, trained for the tests."""

from __future__ import annotations

import io

import pytest

LINES = [f"line {number} of some text, and {number * 7} words more of it" for number in range(300)]


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory):
    """Return the path of a SentencePiece model with T5's special ids: padding 0, EOS 1, no BOS."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=60,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "t5.model"
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory):
    """Return the path of a byte-level BPE like GPT-2's, with one special token, `<|endoftext|>`."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(LINES, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model.save(str(path))
    return str(path)
