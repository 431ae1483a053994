"""SeqIO tasks of published text, which import SeqIO when they are built.

A task is the config of a field of `SeqIOInput`: `Config(language_model_task,
tfds_name="c4/en:3.0.1", vocab_path="c4.model")`. Tasks are not registered, so that two experiments
can read a data set with different vocabularies.

Tasks take `tfds_name`, the TFDS name of a data set with configuration and version, and `vocab_path`
and `vocab_size` of `vocabulary`, whose errors they raise. They return a `seqio.Task`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerkit.errors import ConfigError
from layerkit_experiments.recipes.published_data.last_words import (
    LAST_WORD,
    QUOTES,
    check_vocab_size,
    require_vocab_path,
)
from layerkit_inputs.seqio.tasks import import_seqio, import_tensorflow


def language_model_task(
    *, tfds_name: str, vocab_path: str | None, vocab_size: int | None = None
) -> Any:
    """Return a task whose `targets` are the documents (`text`) of a data set, each followed by EOS.

    A document longer than a row is split without loss, and only its last piece ends with EOS. (Pax
    splits 128 documents joined without separators.)
    """
    append_eos = import_seqio().preprocessors.append_eos
    return _task(
        tfds_name,
        [_text_as_targets, _tokenize, append_eos, _cut_into_pieces],
        vocabulary(vocab_path, vocab_size),
        add_eos=True,
    )


def joined_documents_task(
    *,
    tfds_name: str,
    vocab_path: str | None,
    vocab_size: int | None = None,
    num_documents: int = 4096,
) -> Any:
    """Return a task whose `targets` are rows cut from documents joined without separators.

    This is how Pax reads C4 for MLPerf's GPT-3. Only the last row of each `num_documents` documents
    may be shorter than the others.

    Args:
      tfds_name: See the module; the task reads its feature `text`.
      vocab_path: See `vocabulary`.
      vocab_size: See `vocabulary`.
      num_documents: Number of documents that are joined.
    """
    join = functools.partial(_join, num_documents=num_documents)
    return _task(
        tfds_name,
        [_text_as_targets, _tokenize, join, _cut_into_pieces],
        vocabulary(vocab_path, vocab_size),
        suffix="_joined",
        shuffle_buffer_size=10_000,
    )


def token_ids_task(*, tfds_name: str, vocab_size: int) -> Any:
    """Return a task whose `targets` are the feature `ids` of a TFDS data set."""
    ids = import_seqio().PassThroughVocabulary(vocab_size)
    return _task(tfds_name, [_ids_as_targets], ids, suffix="_ids")


def last_word_task(*, tfds_name: str, vocab_path: str | None, vocab_size: int | None = None) -> Any:
    """Return a task whose `targets` are the last word of a `passage`, and `inputs` the text before.

    Neither ends with EOS, and the word keeps its leading space. Curly quotes become straight
    quotes, as in the text behind the published figures of GPT-2 and Pax.
    """
    return _task(
        tfds_name,
        [_passage_and_last_word, _tokenize],
        vocabulary(vocab_path, vocab_size),
        features=("inputs", "targets"),
        suffix="_last_word",
    )


def yes_no_task(*, tfds_name: str, vocab_path: str | None, vocab_size: int | None = None) -> Any:
    """Return a task of yes-or-no questions about a passage, without end tokens.

    It reads the features `passage`, `question` and `label`, which is 1 for yes. `inputs` are three
    lines as in Pax: the passage, `question: …?` and `answer:`. `targets` are the answer, `yes` or
    `no`, and `wrong_targets` the other of the two.
    """
    return _task(
        tfds_name,
        [_question_and_answers, _tokenize],
        vocabulary(vocab_path, vocab_size),
        features=("inputs", "targets", "wrong_targets"),
        shuffle_buffer_size=100_000,
    )


def vocabulary(vocab_path: str | None, vocab_size: int | None = None) -> Any:
    """Return the vocabulary that VOCAB_PATH names.

    Args:
      vocab_path: SentencePiece model, local or in a store; `bytes` for bytes.
      vocab_size: Vocabulary size of the trained model; None for no check.

    Returns:
      A `seqio.Vocabulary`.

    Raises:
      ConfigError: No vocabulary is set, it does not exist, or it is too large.
    """
    seqio = import_seqio()
    vocab_path = require_vocab_path(vocab_path)
    if vocab_path == "bytes":
        tokens = seqio.ByteVocabulary()
    else:
        _check_exists(vocab_path)
        tokens = seqio.SentencePieceVocabulary(vocab_path)
    check_vocab_size(vocab_size, tokens.vocab_size, vocab_path)
    return tokens


def _check_exists(path: str) -> None:
    if "://" in path or Path(path).is_file():
        return  # files of a store are checked when they are read
    folder = Path(path).parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    raise ConfigError("the file does not exist", field="VOCAB_PATH", value=path, choices=names)


def _task(
    tfds_name: str,
    preprocessors: Sequence[Any],
    tokens: Any,
    *,
    features: Sequence[str] = ("targets",),
    suffix: str = "",
    add_eos: bool = False,
    **options: Any,
) -> Any:
    """Return a task that is named after its data set, with the features in one vocabulary."""
    seqio = import_seqio()
    return seqio.Task(
        tfds_name.partition(":")[0].replace("/", "_") + suffix,
        source=seqio.TfdsDataSource(tfds_name),
        preprocessors=preprocessors,
        output_features={name: seqio.Feature(tokens, add_eos=add_eos) for name in features},
        **options,
    )


# Preprocessors map a `tf.data.Dataset` to another; SeqIO passes `output_features` and
# `sequence_length` to those that have such an argument.


def _tokenize(dataset: Any, output_features: Mapping[str, Any]) -> Any:
    tokenize = import_seqio().preprocessors.tokenize
    return tokenize(dataset, output_features, copy_pretokenized=False)


def _text_as_targets(dataset: Any) -> Any:
    @_plain
    def targets(example: Mapping[str, Any]) -> dict[str, Any]:
        return {"targets": example["text"]}

    return dataset.map(targets)


def _ids_as_targets(dataset: Any) -> Any:
    tf = import_tensorflow()

    @_plain
    def targets(example: Mapping[str, Any]) -> dict[str, Any]:
        return {"targets": tf.cast(example["ids"], tf.int32)}

    return dataset.map(targets)


def _join(dataset: Any, *, num_documents: int) -> Any:
    @_plain
    def joined(documents: Mapping[str, Any]) -> dict[str, Any]:
        return {"targets": documents["targets"].values}

    return (
        dataset.map(_plain(lambda x: {"targets": x["targets"]}))
        .ragged_batch(num_documents)
        .map(joined)
    )


def _cut_into_pieces(dataset: Any, sequence_length: Mapping[str, int]) -> Any:
    tf = import_tensorflow()
    length = sequence_length["targets"]

    @_plain
    def pieces(example: Mapping[str, Any]) -> Any:
        tokens = example["targets"]
        starts = tf.data.Dataset.range(0, tf.size(tokens, tf.int64), length)
        return starts.map(_plain(lambda start: {"targets": tokens[start : start + length]}))

    return dataset.flat_map(pieces)


def _passage_and_last_word(dataset: Any) -> Any:
    tf = import_tensorflow()

    @_plain
    def split(example: Mapping[str, Any]) -> dict[str, Any]:
        text = tf.strings.strip(example["passage"])
        for curly, straight in QUOTES.items():
            text = tf.strings.regex_replace(text, curly, straight)
        return {
            "inputs": tf.strings.regex_replace(text, LAST_WORD, r"\1"),
            "targets": tf.strings.regex_replace(text, LAST_WORD, r" \2"),
        }

    return dataset.map(split)


def _question_and_answers(dataset: Any) -> Any:
    tf = import_tensorflow()

    @_plain
    def rows(example: Mapping[str, Any]) -> dict[str, Any]:
        parts = [example["passage"], "\nquestion: ", example["question"], "?\nanswer:"]
        is_yes = example["label"] > 0
        return {
            "inputs": tf.strings.join(parts),
            "targets": tf.where(is_yes, "yes", "no"),
            "wrong_targets": tf.where(is_yes, "no", "yes"),
        }

    return dataset.map(rows)


def _plain(function: Any) -> Any:
    """Return `function` marked so that TensorFlow does not rewrite it."""
    return import_tensorflow().autograph.experimental.do_not_convert(function)
