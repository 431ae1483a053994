"""Tokenizers of bytes, of SentencePiece models and of `tokenizer.json` files of Hugging Face.

Readers have a field for the tokenizer:

    LocalText.HParams.config(tokenizer=SentencePieceTokenizer.HParams.config(path="c4.model"))

Readers add special ids in the same way for every tokenizer: a document begins with `start_id` and
ends with `eos_id`, if there is one. A `tokenizer.json` encodes a special token in a text, such as
`<|assistant|>`, as its id, as in `transformers`, unless `special_tokens_in_text` is "text". Bytes
and SentencePiece encode it as text.

A tokenizer may have three more properties: `special_tokens` (names by id, which are marked in
displayed ids), `byte_ids` (ids of single bytes, whose text depends on the tokens after them) and
`note` (a line for the report at the start of a run). The states of readers
contain `fingerprint()`, so a run cannot resume with another tokenizer.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np

from layerkit.checks import check_choice
from layerkit.config import Config, Configurable
from layerkit.errors import ConfigError, first_names
from layerkit_inputs import byte_vocabulary
from layerkit_inputs.bad_records import BadRecordError, MissingFileError
from layerkit_inputs.errors import require_extra

_MAX_NAMES = 4
# Token of one byte, for characters that a vocabulary lacks.
_BYTE = re.compile("<0x[0-9A-F]{2}>")

SpecialTokensInText = Literal["ids", "text"]
"""Encoding of a special token in a text: as its id, or as text."""


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of tokenizers. A custom class needs no base class."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: one more than the largest id."""
        ...

    @property
    def pad_id(self) -> int:
        """Id of padding, 0 if the vocabulary has none."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning of a text, or None."""
        ...

    @property
    def eos_id(self) -> int | None:
        """Id of the end of a text, or None."""
        ...

    @property
    def start_id(self) -> int:
        """Id that the first token of a document is predicted from."""
        ...

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of a text, int32 `[length]`, without special ids.

        Raises:
          UnicodeError: The text is not Unicode. Invalid UTF-8 raises UnicodeDecodeError.
        """
        ...

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Decode ids `[length]`. Special and unknown ids are dropped."""
        ...

    def fingerprint(self) -> str:
        """Return a short string that differs between tokenizers with different ids for a text."""
        ...


def as_text(text: str | bytes) -> str:
    """Return a text as a string that can be encoded as UTF-8.

    Raises:
      UnicodeError: The bytes are not UTF-8, or the string has half of a surrogate pair.
    """
    if isinstance(text, bytes):
        return text.decode("utf-8")
    text.encode("utf-8")
    return text


class ByteTokenizer(Configurable):
    """A tokenizer of bytes, with three special ids; see `byte_vocabulary`."""

    vocab_size = byte_vocabulary.VOCAB_SIZE
    pad_id = byte_vocabulary.PAD_ID
    bos_id = byte_vocabulary.BOS_ID
    eos_id = byte_vocabulary.EOS_ID
    start_id = byte_vocabulary.BOS_ID
    special_tokens = byte_vocabulary.SPECIAL_TOKENS

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of bytes, or of the UTF-8 bytes of a string, int32 `[length]`."""
        data = text if isinstance(text, bytes) else text.encode("utf-8")
        return byte_vocabulary.encode(data).astype(np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Decode ids `[length]`. Invalid UTF-8 is replaced."""
        return byte_vocabulary.decode(np.asarray(ids))

    def fingerprint(self) -> str:
        """Return "bytes"."""
        return "bytes"


class SentencePieceTokenizer(Configurable):
    """A tokenizer of a SentencePiece model file, with the ids of SeqIO's vocabularies.

    `start_id` is the model's BOS. If a model (such as T5's) has no BOS, it is the padding id, as in
    SeqIO.
    """

    path: str
    """Path of the `.model` file."""

    def __post_init__(self) -> None:
        """Check that the file exists."""
        _check_file(self, self.path)

    @functools.cached_property
    def _model(self) -> Any:
        sentencepiece = require_extra("sentencepiece", needed_by="SentencePieceTokenizer")
        try:
            return sentencepiece.SentencePieceProcessor(model_file=str(self.path))
        except (RuntimeError, OSError) as error:
            raise _cannot_be_read(self, self.path, "a SentencePiece model", error) from None

    @property
    def vocab_size(self) -> int:
        """Number of pieces of the model."""
        return self._model.vocab_size()

    @property
    def pad_id(self) -> int:
        """Padding id of the model, else 0."""
        return max(self._model.pad_id(), 0)

    @property
    def bos_id(self) -> int | None:
        """BOS of the model, or None."""
        return _id_or_none(self._model.bos_id())

    @property
    def eos_id(self) -> int | None:
        """EOS of the model, or None."""
        return _id_or_none(self._model.eos_id())

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """Return the names of ids without text."""
        model = self._model
        ids = range(model.vocab_size())
        return {i: model.id_to_piece(i) for i in ids if model.is_control(i) or model.is_unknown(i)}

    @property
    def note(self) -> str:
        """Line about special tokens in text, for the report at the start of a run."""
        return "special tokens in text are encoded as text by SentencePiece"

    @property
    def start_id(self) -> int:
        """BOS of the model, else the padding id."""
        return self.pad_id if self.bos_id is None else self.bos_id

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of a text, int32 `[length]`, without special ids."""
        return np.array(self._model.encode(as_text(text)), np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Decode ids `[length]`. Special and unknown ids are dropped."""
        return self._model.decode(_known_ids(ids, self.vocab_size))

    @functools.cached_property
    def _sha256(self) -> str:
        return _sha256_of(self.path)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the file."""
        return self._sha256


class HuggingFaceTokenizer(Configurable):
    """A tokenizer of a `tokenizer.json` of Hugging Face's `tokenizers` and `transformers`.

    Such a file does not define the tokens that begin, end and pad a text. They are read from the
    `tokenizer_config.json` in the same folder, if it exists, or set by fields. Truncation and
    padding of the file are disabled, since readers make the rows.

    `start_id` is BOS, else the padding token, else EOS (as GPT-2 uses `<|endoftext|>`).
    """

    path: str
    """Path of `tokenizer.json`, or of its folder."""
    bos_token: str | None = None
    """BOS token, such as `<s>`. None: that of `tokenizer_config.json`."""
    eos_token: str | None = None
    """EOS token, such as `</s>`. None: that of `tokenizer_config.json`."""
    pad_token: str | None = None
    """Padding token, such as `<pad>`. None: that of `tokenizer_config.json`."""
    special_tokens_in_text: SpecialTokensInText = "ids"
    """Encoding of special tokens in a text: their `ids`, as in `transformers`, or ids
    of their characters (`text`), which is for text that others may write."""

    def __post_init__(self) -> None:
        """Check the fields."""
        choices, value = get_args(SpecialTokensInText), self.special_tokens_in_text
        check_choice("HuggingFaceTokenizer", choices, special_tokens_in_text=value)
        if Path(self.path).is_dir():
            self.path = str(Path(self.path, "tokenizer.json"))
        _check_file(self, self.path)

    @functools.cached_property
    def _model(self) -> Any:
        tokenizers = require_extra("tokenizers", needed_by="HuggingFaceTokenizer")
        try:
            model = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as error:  # The bindings raise no narrower class.
            raise _cannot_be_read(self, self.path, "a tokenizer.json", error) from None
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = self.special_tokens_in_text == "text"
        return model

    @functools.cached_property
    def _roles(self) -> dict[str, int | None]:
        """Return the ids of the special tokens by role."""
        beside = Path(self.path).with_name("tokenizer_config.json")
        try:
            config = json.loads(beside.read_bytes()) if beside.is_file() else {}
            stated = {role: config.get(role) for role in ("bos_token", "eos_token", "pad_token")}
        except (ValueError, AttributeError, RecursionError) as error:
            raise _cannot_be_read(self, beside, "a JSON object", error) from None
        return {role: self._role_id(role, token) for role, token in stated.items()}

    def _role_id(self, role: str, stated: Any) -> int | None:
        token = getattr(self, role)
        if token is None:  # A token with options is an object.
            token = stated.get("content") if isinstance(stated, dict) else stated
        if token is None:
            return None
        token_id = self._model.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            raise ConfigError(
                owner="HuggingFaceTokenizer",
                field=role,
                value=token,
                expected=f"a token of {self.path}",
                choices=self._model.get_vocab() if isinstance(token, str) else (),
            )
        return token_id

    @functools.cached_property
    def vocab_size(self) -> int:
        """Return one more than the largest id, including added tokens."""
        return 1 + max(self._model.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def pad_id(self) -> int:
        """Id of `pad_token`, else 0."""
        return self._roles["pad_token"] or 0

    @property
    def bos_id(self) -> int | None:
        """Id of `bos_token`, or None."""
        return self._roles["bos_token"]

    @property
    def eos_id(self) -> int | None:
        """Id of `eos_token`, or None."""
        return self._roles["eos_token"]

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """Return the special tokens of the file by their ids."""
        added = self._model.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """Return the ids of single bytes, which a decoder joins to characters."""
        vocabulary = self._model.get_vocab().items()
        return frozenset(token_id for name, token_id in vocabulary if _BYTE.fullmatch(name))

    @property
    def note(self) -> str | None:
        """Line about special tokens in text for the start report, or None if there are none."""
        if not self.special_tokens:
            return None
        names = list(self.special_tokens.values())
        encoding = "their ids" if self.special_tokens_in_text == "ids" else "text"
        return (
            f"special tokens in text ({first_names(names, limit=_MAX_NAMES)}) are encoded as"
            f" {encoding} (special_tokens_in_text={self.special_tokens_in_text!r})"
        )

    @property
    def start_id(self) -> int:
        """Id of BOS, else of the padding token, else of EOS, else 0."""
        candidates = (self._roles[role] for role in ("bos_token", "pad_token", "eos_token"))
        return next((token_id for token_id in candidates if token_id is not None), 0)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of a text, int32 `[length]`, without special ids."""
        return np.array(self._model.encode(as_text(text), add_special_tokens=False).ids, np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Decode ids `[length]`. Special and unknown ids are dropped."""
        return self._model.decode(_known_ids(ids, self.vocab_size), skip_special_tokens=True)

    @functools.cached_property
    def _sha256(self) -> str:
        return _sha256_of(self.path)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the file, the ids of BOS, EOS and padding, and the encoding.

        The encoding "text" of special tokens is omitted, as in states and token records of older
        versions.
        """
        roles = ",".join(str(self._roles[role]) for role in sorted(self._roles))
        in_text = "" if self.special_tokens_in_text == "text" else " special_tokens_in_text=ids"
        return f"{self._sha256} {roles}{in_text}"


def tokenizer_config(name: str, *, special_tokens_in_text: SpecialTokensInText = "ids") -> Config:
    """Return the config of a tokenizer by name.

    Args:
      name: "bytes", the path of a SentencePiece `.model`, or of a `tokenizer.json` or its folder.
      special_tokens_in_text: Field of HuggingFaceTokenizer. Other tokenizers encode as "text".
    """
    if name == "bytes":
        return ByteTokenizer.HParams.config()
    if name.endswith(".model"):
        return SentencePieceTokenizer.HParams.config(path=name)
    return HuggingFaceTokenizer.HParams.config(
        path=name, special_tokens_in_text=special_tokens_in_text
    )


def _id_or_none(token_id: int) -> int | None:
    return None if token_id < 0 else token_id


def _known_ids(ids: np.ndarray | Sequence[int], vocab_size: int) -> list[int]:
    """Return the ids within the vocabulary. A model with a rounded vocabulary predicts others."""
    array = np.asarray(ids, np.int64)
    return array[(array >= 0) & (array < vocab_size)].tolist()


def _sha256_of(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_file(tokenizer: Any, path: str) -> None:
    if not Path(path).is_file():
        folder = Path(path).parent
        raise MissingFileError(
            f"file not found in {folder}",
            owner=type(tokenizer).__qualname__,
            field="path",
            value=Path(path).name,
            choices=sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else (),
        )


def _cannot_be_read(
    tokenizer: Any, path: str | Path, expected: str, error: Exception
) -> BadRecordError:
    problem = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    return BadRecordError(
        f"cannot read the file ({problem[0]})",
        owner=type(tokenizer).__qualname__,
        field="path",
        value=str(path),
        expected=expected,
    )
