"""Reference values of the losses in docs/convergence.md, computed from the data alone.

All levels are nats per prediction. Predictions are the tokens (bytes) of the held-out text and the
end of each document.
"""

from __future__ import annotations

import collections
import itertools
import json
import lzma
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from passages import Passage, draw_passages

from layerkit_inputs import LocalText
from layerkit_inputs.base.find_files import standard_library_files
from layerkit_inputs.text.text_files import split_pieces
from layerkit_inputs.text.trigram_baseline import trigram_loss

VOCAB_SIZE = 256
NUM_PASSAGES = {"train": 8000, "heldout": 200, "asked": 400}


def draw_splits(num_train: int = NUM_PASSAGES["train"]) -> dict[str, list[Passage]]:
    """Return the training passages, the held-out passages and those of the last-word task."""
    counts = {**NUM_PASSAGES, "train": num_train}
    drawn = {
        name: draw_passages(count, seed=seed) for seed, (name, count) in enumerate(counts.items())
    }
    known = {passage.text for passage in drawn["train"]}
    assert not any(
        passage.text in known for name in ("heldout", "asked") for passage in drawn[name]
    )
    return drawn


def write_data(folder: Path, *, num_train: int) -> None:
    """Write the passages in the formats of three data sets to `tfds`, and `vocab.model`."""
    import sentencepiece

    from layerkit_inputs.testing.tfds_folders import write_tfds_folder

    splits = draw_splits(num_train)
    train, heldout = ([passage.text for passage in splits[name]] for name in ("train", "heldout"))
    asked = [passage.question for passage in splits["asked"]]
    texts = {"train": train, "validation": heldout}
    write_tfds_folder(folder / "tfds", "c4/en:3.0.1", texts=texts)
    write_tfds_folder(folder / "tfds", "the_pile:1.0.0", texts={**texts, "test": heldout})
    write_tfds_folder(folder / "tfds", "lambada:1.0.0", texts={"train": heldout, "test": asked})
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(train),
        model_prefix=str(folder / "vocab"),
        model_type="bpe",  # every word becomes a token
        vocab_size=VOCAB_SIZE,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (folder / "num_train.json").write_text(json.dumps(num_train))


def of_local_text(num_read: int) -> dict[str, float]:
    """Return the levels of Python's sources: tables of the training files, and `xz` after them.

    Args:
      num_read: Number of bytes that the model was trained on. One table uses the same amount.
    """
    fraction = LocalText.heldout_fraction
    splits = split_pieces(standard_library_files(), heldout_fraction=fraction)
    train, heldout = ([piece.read() for piece in split] for split in splits)
    before, after = b"".join(train), b"".join(heldout)
    as_much = random.Random(0).sample(train, len(train))
    sizes = itertools.accumulate(map(len, as_much))
    as_much = [document for document, size in zip(as_much, sizes, strict=True) if size <= num_read]
    added = _xz_bits(before + after) - _xz_bits(before)
    return {
        "frequencies of bytes": _unigram_loss(_counts(train), _counts(heldout)),
        "trigrams of as much text as the model read": trigram_loss(as_much, heldout),
        "trigrams of the whole training text": trigram_loss(train, heldout),
        # xz has a window of 64 MiB, so a repetition of any training text is nearly free.
        "xz after the whole training text": added * math.log(2) / (len(after) + len(heldout)),
    }


def _counts(documents: Sequence[bytes]) -> collections.Counter[int]:
    """Count each byte value, and the document ends as value 256."""
    result = np.bincount(np.frombuffer(b"".join(documents), np.uint8), minlength=257)
    result[256] = len(documents)
    return collections.Counter(dict(enumerate(result.tolist())))


def _xz_bits(text: bytes) -> int:
    return 8 * len(lzma.compress(text, preset=9))


def of_passages(folder: Path) -> dict[str, float]:
    """Return the levels of the passages: token frequencies, two forgetful readers, the entropy."""
    import sentencepiece

    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(folder / "vocab.model"))
    splits = draw_splits(json.loads((folder / "num_train.json").read_text()))
    train, heldout = (
        [[*vocabulary.encode(passage.text), vocabulary.eos_id()] for passage in splits[name]]
        for name in ("train", "heldout")
    )
    num_predictions = sum(map(len, heldout))
    known = {
        "forgets what the passage said": [p.forgetful_nats for p in splits["heldout"]],
        "does not know what belongs together": [p.unsorted_nats for p in splits["heldout"]],
        "entropy of the generator": [p.nats for p in splits["heldout"]],
    }
    return {
        "frequencies of tokens": _unigram_loss(
            *(collections.Counter(itertools.chain(*split)) for split in (train, heldout))
        ),
        **{name: sum(nats) / num_predictions for name, nats in known.items()},
    }


def of_last_words(folder: Path) -> dict[str, float]:
    """Return the last-word accuracy of two kinds of guesses."""
    splits = draw_splits(json.loads((folder / "num_train.json").read_text()))
    asked = splits["asked"]
    counts = collections.Counter(passage.last_word for passage in splits["train"])
    likeliest = counts.most_common(1)[0][0]
    return {
        "most frequent word": sum(p.last_word == likeliest for p in asked) / len(asked),
        "one of the things that the passage names": sum(1 / p.candidates for p in asked)
        / len(asked),
    }


def _unigram_loss(train: Mapping[Any, int], heldout: Mapping[Any, int]) -> float:
    """Return the mean -ln of the add-one frequency in `train` over the symbols of `heldout`."""
    total = math.log(sum(train.values()) + len({*train, *heldout}))
    losses = (n * (total - math.log(train[symbol] + 1)) for symbol, n in heldout.items())
    return sum(losses) / sum(heldout.values())
