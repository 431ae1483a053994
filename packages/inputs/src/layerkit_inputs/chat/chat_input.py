"""ChatInput and ChatPrompts, inputs of conversations in files, by the chat template of a model.

Files are JSON lines, JSON arrays, Parquet, and the Arrow files of data sets that `datasets` saved
to disk. `conversations` lists the forms of rows. The conversations are rendered and tokenized on
first use, and their ids are kept in memory. A conversation is a document: its template writes the
special tokens, also those at its start and end.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from layerkit.config import build
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError, first_names
from layerkit_inputs.base.errors import BadRecordError, as_bad_record, require_extra
from layerkit_inputs.base.find_files import TextFile, find_text_files
from layerkit_inputs.base.tokenizer_interface import SpecialIds
from layerkit_inputs.chat.conversations import (
    FORMS,
    Conversation,
    drop_nulls,
    read_conversation,
    read_pair,
)
from layerkit_inputs.chat.images import ChatImages
from layerkit_inputs.chat.template import ChatTemplate, load_chat_template
from layerkit_inputs.chat.token_masks import (
    ChatTokens,
    LossOn,
    encode_conversation,
    encode_prompt,
    leaves_out_tools,
    turn_ends,
)
from layerkit_inputs.packing.documents import DocumentPrompts, Documents, PackedRows, RowPlan
from layerkit_inputs.parquet.row_group_sizes import open_parquet
from layerkit_inputs.text.split_documents import Split, SplitDocuments
from layerkit_inputs.text.text_files import read_raw_documents
from layerkit_inputs.text.tokenizers import SpecialTokensInText

# Columns of tables that are read; others may have any types.
_OTHERS = {"system", "tools", "input", "image", "images", "chosen", "rejected", "label"}
_COLUMNS = frozenset(_OTHERS.union(*FORMS))
_TABLES = (".parquet", ".arrow")
_SUFFIXES = (".jsonl", ".ndjson", ".json", *_TABLES)
# Files that `datasets` writes beside the Arrow files of a data set.
_BESIDE_ARROW = re.compile(r"(dataset_dict|dataset_info|state)\.json|cache-.*\.arrow")
_ROWS_AT_A_TIME = 1000


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _table_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, or of an Arrow stream."""
    arrow = require_extra("pyarrow", needed_by="Parquet and Arrow files")
    damaged = as_bad_record(str(path), "cannot read the file", arrow.ArrowException, OSError)
    with damaged, contextlib.ExitStack() as stack:
        if _suffix(path) == ".arrow":
            opened = stack.enter_context(arrow.memory_map(str(path)))
            stream = stack.enter_context(arrow.ipc.open_stream(opened))
            names = stream.schema.names
        else:
            file = stack.enter_context(open_parquet(path, columns=[*_COLUMNS]))
            names = file.schema_arrow.names
            stream = file.iter_batches(_ROWS_AT_A_TIME, columns=_known(names))
        for batch in stream:
            yield from drop_nulls(batch.select(_known(names)).to_pylist())


def _known(names: Sequence[str]) -> list[str]:
    """Return the columns that are read, or all if none is known, for the error about them."""
    return [name for name in names if name in _COLUMNS] or [*names]


class ConversationFiles(SplitDocuments):
    """Base class of inputs of conversations, which a chat template renders."""

    paths: Sequence[str] | None = None
    """Files, folders or patterns of conversations. Required."""
    max_bytes: int = 1 << 31
    """Maximum bytes of the conversations of a split, whose tokens are kept in memory."""
    chat_template: str | None = None
    """A name such as `chatml`, a `.jinja` file, or a folder; None: that of the tokenizer's
    folder."""
    template_date: str = "2025-01-01"
    """Date that a template writes as that of the day, so that a resumed run has the same data."""
    special_tokens_in_text: SpecialTokensInText = "text"
    """Encoding of special tokens that a message spells out: as `text`, or as their `ids`."""
    images: ChatImages | None = None
    """Form of the images of messages, which are arrays `images` of the batches. None: messages with
    images are unreadable."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._counts = collections.Counter[str]()
        try:
            self._today = datetime.datetime.fromisoformat(self.template_date)
        except ValueError:
            raise self._config_error(
                field="template_date", value=self.template_date, expected="a date: YYYY-MM-DD"
            ) from None

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return load_chat_template(self.chat_template, self._tokenizer, today=self._today)

    @functools.cached_property
    def _ends(self) -> tuple[int, ...]:
        return turn_ends(self._template, self._tokenizer)

    def _read(self, row: Mapping[str, Any]) -> Any:
        """Return what a row of a file holds, as a tuple that JSON keeps."""
        return read_conversation(row)

    def _encode_turns(self, conversation: Conversation, loss_on: LossOn = "all") -> ChatTokens:
        return encode_conversation(
            conversation,
            self._template,
            self._tokenizer,
            loss_on=loss_on,
            special_tokens_in_text=self.special_tokens_in_text,
            images=self.images,
        )

    def _encode(self, conversation: Conversation) -> ChatTokens | str:
        """Return the tokens of a conversation, or the reason for which it is dropped."""
        raise NotImplementedError

    def _encode_row(self, row: Sequence[Any]) -> Sequence[ChatTokens] | str:
        """Return the documents of a row, as `_read` and JSON give it, or why it is dropped."""
        tokens = self._encode(Conversation(*row))
        return tokens if isinstance(tokens, str) else [tokens]

    def _find_files(self, paths: Sequence[str] | None, field: str) -> list[TextFile]:
        files = {
            file.path.resolve(): file
            for path in paths or ()
            for file in find_text_files([path], field=field)
            if not Path(path).is_dir()
            or (_suffix(file.path) in _SUFFIXES and not _BESIDE_ARROW.fullmatch(file.path.name))
        }
        expected = f"files with the suffixes {', '.join(_SUFFIXES)}"
        require(files, self._label, field, paths, expected, BadRecordError)
        return sorted(files.values())

    def _begin(self) -> None:
        self._tokens: list[ChatTokens] = []
        self._images: list[Sequence[Any]] = []
        self._counts.clear()
        _ = self._template  # Its errors are about no record.

    def _rows(self, file: TextFile) -> Iterator[tuple[str, Any]]:
        """Yield the place and the contents of each row of a file: a value, or bytes of JSON."""
        path, kind = file.path, _suffix(file.path)
        if kind not in _SUFFIXES:
            raise BadRecordError(owner=str(path), field="suffix", value=kind, choices=_SUFFIXES)
        if kind in _TABLES:
            rows: Iterable[Any] = _table_rows(path)
        else:
            lines = read_raw_documents(file, field="", max_document_bytes=self.max_bytes)
            places = ((line.where, line.data or b"") for line in lines)
            first = [*itertools.islice(places, 1)]
            if not any(data.lstrip().startswith(b"[") for _, data in first):
                yield from itertools.chain(first, places)
                return
            try:
                rows = json.loads(b"\n".join(data for _, data in itertools.chain(first, places)))
            except (ValueError, RecursionError) as error:
                raise BadRecordError(f"no array of JSON: {error}", owner=str(path)) from None
        for number, row in enumerate(rows):
            yield f"{path}, row {number}", row

    def _texts(self, file: TextFile) -> Iterator[tuple[str, bytes]]:
        self._folder = file.path.parent
        try:
            for where, row in self._rows(file):
                try:
                    row = json.loads(row) if isinstance(row, bytes) else row
                    kind, expected = type(row).__name__, "a JSON object"
                    require(isinstance(row, dict), None, "type of a row", kind, expected)
                    yield where, json.dumps(self._read(row), ensure_ascii=False).encode()
                except (ValueError, TypeError, RecursionError) as error:
                    problem = str(error) if isinstance(error, ConfigError) else f"no JSON: {error}"
                    self._bad.report(file=where, record=None, problem=problem)
        except BadRecordError as error:
            if self.on_bad_record == "refuse":
                raise
            self._bad.report(file=str(file.path), record=None, problem=str(error))

    def _add(self, where: str, parts: Iterable[bytes]) -> None:
        (text,) = parts
        contents: list[str] = []

        def note(value: dict[str, Any]) -> dict[str, Any]:
            texts = (value.get("content"), value.get("text"))
            contents.extend(text for text in texts if isinstance(text, str))
            return value

        row = json.loads(text, object_hook=note)
        try:
            tokens = self._encode_row(row)
            if not isinstance(tokens, str):
                tokens = [self._locate_images(one, where) for one in tokens]
        except (ConfigError, UnicodeError) as error:
            self._bad.report(file=where, record=None, problem=str(error))
            return
        self._count(text, " ".join(contents).encode())
        self._check_size(self._num_bytes)
        if isinstance(tokens, str):
            self._counts[tokens] += 1
        else:
            self._tokens += tokens

    def _locate_images(self, tokens: ChatTokens, where: str) -> ChatTokens:
        if self.images is None:
            return tokens
        locate = functools.partial(self.images.locate, beside=self._folder, where=where)
        return tokens._replace(images=[locate(name) for name in tokens.images])

    def _with_images(self, batch: NestedMap, rows: np.ndarray, documents: np.ndarray) -> NestedMap:
        """Return a batch with the images of its rows, if this input reads images.

        Args:
          batch: Batch with `ids` `[batch, length]`.
          rows: Row in the batch of each document, int64 `[documents]`.
          documents: Numbers of the documents, in the order in which rows hold them.
        """
        if self.images is not None:
            num_rows, length = batch.ids.shape
            sources: list[list[Any]] = [[] for _ in range(num_rows)]
            for row, document in zip(rows.tolist(), documents.tolist(), strict=True):
                sources[row] += self._images[document]
            batch.images = self.images.read(sources, length=length)
        return batch

    def _build(self) -> Documents:
        if not self._tokens and self._counts:
            problem = f"no conversation of {first_names(self.paths or ())} is left"
            expected = "conversations with answers, or a greater length of rows"
            counts = dict(self._counts)
            raise self._config_error(problem, field="dropped", value=counts, expected=expected)
        sizes = np.array([len(tokens.ids) for tokens in self._tokens], np.int64)
        none = ChatTokens(np.zeros(0, np.int32), np.zeros(0, bool))
        arrays = zip(*(tokens[:2] for tokens in (none, *self._tokens)), strict=True)
        ids, has_loss = map(np.concatenate, arrays)
        self._images = [tokens.images for tokens in self._tokens]
        self._tokens = []
        return Documents.of(ids, sizes, has_loss=has_loss)

    def special_ids(self) -> SpecialIds:
        """Return the id that ends a turn, and that of padding."""
        return SpecialIds(None, next(iter(self._ends), None), self._tokenizer.pad_id)

    def _fingerprint(self) -> dict[str, Any]:
        documents = self._documents
        # It depends on the template, its variables, and all fields that choose tokens.
        tokens = zlib.crc32(np.asarray(documents.ids).astype("<i4").tobytes())
        loss = zlib.crc32(np.asarray(documents.has_loss).tobytes(), tokens)
        fields = () if self.images is None else ("height", "width", "mean", "std", "resampling")
        pixels = {name: np.array(getattr(self.images, name)).tolist() for name in fields}
        images = {"images": pixels} if pixels else {}
        return {**super()._fingerprint(), "tokens_crc32": loss, **images}

    def _data_text(self) -> str:
        text = super()._data_text()
        return "; ".join([text, *(f"{kind}: {count:,}" for kind, count in self._counts.items())])


class ChatInput(PackedRows, ConversationFiles):
    """An input of packed rows of conversations, with a loss on what the assistant writes.

    Batches hold arrays `[batch, length]`: `ids` and `labels` (int32; a label is the next token of
    the conversation), `weights` (float32, 1 for labels that the assistant writes and that
    `loss_on` selects), `paddings` (float32, 1 where padded), `segment_ids` and `segment_pos`
    (int32), and with `images` those of `ChatImages.read`. Evaluation batches also have `provenance`
    and `eval_sample_weights`, each `[batch]`.
    """

    packing: Literal["first_fit", "none"] = "first_fit"
    """`first_fit` (several whole conversations in a row) or `none` (one in a row)."""
    loss_on: LossOn = "all"
    """Turns of the assistant with a loss: `all`, the `last`, or those whose `train` is true."""
    too_long: Literal["cut", "drop"] = "cut"
    """`cut` keeps the first turns of a conversation that fit a row, up to an answer, unless only
    the last turn has a loss; `drop` leaves it out. Both are counted in the start report."""

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of empty rows, whose arrays do not depend on the conversations."""
        batch = super().blank_batch(config, rows)
        if config.images is not None:
            batch.images = build(config.images).read([()] * rows, length=config.seq_length)
        return batch

    def _encode(self, conversation: Conversation) -> ChatTokens | str:
        encode = functools.partial(self._encode_turns, loss_on=self.loss_on)
        tokens = encode(conversation)
        if is_cut := len(tokens.ids) > self.seq_length + 1:
            cuts, most = self._cuts(conversation), self.seq_length + 1
            num_fit = bisect.bisect_right(cuts, most, key=lambda c: len(encode(c).ids))
            if not num_fit:
                return "conversations dropped as too long"
            tokens = encode(cuts[num_fit - 1])
        if not tokens.has_loss[1:].any():
            return "conversations dropped without a loss"
        flags = set[str]().union(*conversation.messages) & {"train", "weight"}
        has_end = np.isin(tokens.ids[tokens.has_loss], self._ends).any()
        remarks = {
            "cut at a turn": is_cut,
            "whose tools the template leaves out": leaves_out_tools(conversation, self._template),
            "whose flags (train, weight) have no effect": flags and self.loss_on != "train",
            "without a loss on the end of a turn": not has_end,
        }
        self._counts.update(f"conversations {name}" for name, holds in remarks.items() if holds)
        return tokens

    def _cuts(self, conversation: Conversation) -> list[Conversation]:
        """Return the conversation up to each of its answers, or nothing if it may not be cut."""
        messages, first = conversation.messages, conversation.num_prompt_messages
        if self.too_long == "drop" or self.loss_on == "last":
            return []
        answers = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        return [conversation._replace(messages=messages[: i + 1]) for i in answers]

    @functools.cached_property
    def _plan(self) -> RowPlan:
        ends, images = self._documents.ends, None
        if self.images is not None:
            counts = np.array([len(sources) for sources in self._images], np.int64)
            images = (counts, self.images.num_images(self.seq_length))
        return RowPlan(ends, self.seq_length, self.packing, images=images)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        batch = self._documents.rows_of(self._plan, rows, pad_id=self._tokenizer.pad_id)
        pieces = self._plan.pieces(rows)
        return self._with_images(batch, pieces.row, pieces.document)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "packing": self.packing}


class ChatPrompts(DocumentPrompts, ConversationFiles):
    """An input of conversations up to their last answer, for a model to continue.

    Batches are those of `DocumentPrompts`, with `images` those of `ChatImages.read`. A longer
    prompt than `prompt_length` is dropped. Of a pair with a preference, the chosen conversation is
    read.
    """

    split: Split = "heldout"
    """`train`, `heldout`, `test` or `all`."""

    def _read(self, row: Mapping[str, Any]) -> Conversation:
        return read_pair(row).chosen if "chosen" in row else read_conversation(row)

    def _begin(self) -> None:
        super()._begin()
        self._answers: list[str] = []

    def _encode(self, conversation: Conversation) -> ChatTokens | str:
        messages = conversation.messages
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or not answers[-1]:
            return "conversations dropped without a prompt and an answer"
        prompt = conversation._replace(messages=messages[: answers[-1]])
        answer = messages[answers[-1]].get("content")
        ids = encode_prompt(
            prompt,
            self._template,
            self._tokenizer,
            special_tokens_in_text=self.special_tokens_in_text,
            images=self.images,
        )
        if len(ids) > self.prompt_length:
            return f"prompts dropped as longer than prompt_length={self.prompt_length}"
        self._answers.append(answer if isinstance(answer, str) else "")
        return ChatTokens(ids, np.ones(len(ids), bool), prompt.images)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return self._with_images(super()._read_rows(rows), np.arange(len(rows)), rows)

    def _build(self) -> Documents:
        documents = super()._build()
        return dataclasses.replace(documents, num_inputs=documents.num_predictions)

    @property
    def has_prediction_metrics(self) -> bool:
        """Whether `prediction_metrics` reads decoded text: True."""
        return True

    def prediction_metrics(self, predictions: Mapping[int, str]) -> dict[str, float]:
        """Return `exact_match`, the share of answers that equal those of the files.

        Spaces and line breaks around an answer do not count. Without predictions, return {}.
        """
        if not predictions or not len(self._documents):
            return {}
        equal = [text.strip() == self._answers[n].strip() for n, text in predictions.items()]
        return {"exact_match": float(np.mean(equal))}
