"""Fixtures of small real tokenizers, of laws under prefetch and of readers in a new process."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from layerkit_inputs import Prefetch

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


@pytest.fixture
def check_law():
    """Return a function that checks a law of an input, alone or under `Prefetch`."""
    made = []

    def check(law, make, *, reads_ahead=False):
        def make_source(**fields):
            source = make(**fields)
            made.append(Prefetch(source=source) if reads_ahead else source)
            return made[-1]

        law(make_source)

    yield check
    for source in made:
        source.close()


READ = """
import json, sys, layerkit_inputs
from layerkit_inputs.testing import laws
reader, fields, state, count = json.loads(sys.argv[1])
source = getattr(layerkit_inputs, reader)(**fields)
source.set_state(state)
batches = laws.take(source, count)
print(json.dumps([{name: array.tolist() for name, array in batch.items()} for batch in batches]))
"""


@pytest.fixture
def read_in_new_process():
    """Return a function that resumes a reader in a new process and reads batches of lists."""

    def read(reader, fields, state, count):
        argument = json.dumps([reader.__name__, fields, state, count])
        done = subprocess.run(
            [sys.executable, "-c", READ, argument], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return read
