"""Tokenizers: text to token ids and back, from a file on this machine.

Three kinds: bytes, a SentencePiece model, and the `tokenizer.json` of Hugging Face's `tokenizers`.
They are fields of readers, so a config says which tokenizer made the data:

    LocalText.HParams.config(tokenizer=SentencePieceTokenizer.HParams.config(path="c4.model"))

Readers decide where special ids go, the same way for every tokenizer: a document begins with
`start_id` and ends with `eos_id`, where there is one. A special token that is spelled out in a
text, such as `<|assistant|>`, becomes its id with a `tokenizer.json`, as in `transformers`, unless
`special_tokens_in_text` says otherwise. Bytes and SentencePiece encode it as any other text.

A tokenizer may have two more properties: `special_tokens` (id -> name; these are marked where ids
are shown to people) and `note` (a line for the report at the start of a run).

`fingerprint()` goes into the states of readers, so that a run cannot go on with another tokenizer.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np

from layerkit.config import Config, Configurable
from layerkit.near_names import near_names
from layerkit_inputs import byte_vocabulary
from layerkit_inputs.extras import require

_MOST_NAMED = 4

SpecialTokensInText = Literal["ids", "text"]
"""What a special token that is spelled out in a text becomes: its id, or ids of its characters."""


@runtime_checkable
class Tokenizer(Protocol):
    """What a reader asks of a tokenizer; a class of your own needs no base class."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def pad_id(self) -> int:
        """The id that fills rows up; 0 where the vocabulary has none of its own."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id of a beginning, if there is one."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id of an end, if there is one."""
        ...

    @property
    def start_id(self) -> int:
        """What the first token of a document is predicted from."""
        ...

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text`: int32 `[length]`, without special ids.

        Raises:
          ValueError: `text` is not Unicode; of bytes that are not UTF-8 a UnicodeDecodeError.
        """
        ...

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Text of ids `[length]`; special ids, and ids that do not exist, vanish."""
        ...

    def fingerprint(self) -> str:
        """A short text that differs where the ids of some text may differ."""
        ...


def as_text(text: str | bytes) -> str:
    """`text` as a string that can be encoded.

    Raises:
      UnicodeError: bytes that are not UTF-8, or a string with half of a surrogate pair.
    """
    if isinstance(text, bytes):
        return text.decode("utf-8")
    text.encode("utf-8")
    return text


class ByteTokenizer(Configurable):
    """Bytes as tokens, after three special ids; see `byte_vocabulary`. Encodes any bytes."""

    vocab_size = byte_vocabulary.VOCAB_SIZE
    pad_id = byte_vocabulary.PAD_ID
    bos_id = byte_vocabulary.BOS_ID
    eos_id = byte_vocabulary.EOS_ID
    start_id = byte_vocabulary.BOS_ID
    special_tokens = byte_vocabulary.SPECIAL_TOKENS

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of the bytes (of a string: of its UTF-8), int32 `[length]`."""
        data = text if isinstance(text, bytes) else text.encode("utf-8")
        return byte_vocabulary.encode(data).astype(np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Text of ids `[length]`; broken UTF-8 is replaced."""
        return byte_vocabulary.decode(np.asarray(ids))

    def fingerprint(self) -> str:
        """`bytes`."""
        return "bytes"


class SentencePieceTokenizer(Configurable):
    """A SentencePiece model file, as SeqIO's vocabularies read it.

    `start_id` is the model's BOS or, as in SeqIO, the padding id where a model (such as T5's) has
    no BOS.
    """

    path: str
    """The `.model` file."""

    def __post_init__(self) -> None:
        _check_file(self, self.path)

    @functools.cached_property
    def _model(self) -> Any:
        sentencepiece = require("sentencepiece", needed_by="SentencePieceTokenizer")
        try:
            return sentencepiece.SentencePieceProcessor(model_file=str(self.path))
        except (RuntimeError, OSError) as error:
            raise _cannot_be_read(self, self.path, "a SentencePiece model", error) from None

    @property
    def vocab_size(self) -> int:
        """Pieces of the model."""
        return self._model.vocab_size()

    @property
    def pad_id(self) -> int:
        """The model's padding id, else 0."""
        return max(self._model.pad_id(), 0)

    @property
    def bos_id(self) -> int | None:
        """The model's BOS, if it has one."""
        return _id_or_none(self._model.bos_id())

    @property
    def eos_id(self) -> int | None:
        """The model's EOS, if it has one."""
        return _id_or_none(self._model.eos_id())

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """Return the names of ids that stand for no text."""
        model = self._model
        ids = range(model.vocab_size())
        return {i: model.id_to_piece(i) for i in ids if model.is_control(i) or model.is_unknown(i)}

    @property
    def note(self) -> str:
        """Line about special tokens in text for the report at the start of a run."""
        return "special tokens spelled out in text are encoded as text, as SentencePiece does"

    @property
    def start_id(self) -> int:
        """BOS, else the padding id."""
        return self.pad_id if self.bos_id is None else self.bos_id

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text`, int32 `[length]`."""
        return np.array(self._model.encode(as_text(text)), np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Text of ids `[length]`."""
        return self._model.decode(_known_ids(ids, self.vocab_size))

    @functools.cached_property
    def _sha256(self) -> str:
        return _sha256_of(self.path)

    def fingerprint(self) -> str:
        """SHA-256 of the file."""
        return self._sha256


class HuggingFaceTokenizer(Configurable):
    """A `tokenizer.json`, as saved by Hugging Face's `tokenizers` and `transformers`.

    Such a file does not tell which tokens begin, end and pad a text. They are taken from the
    `tokenizer_config.json` beside it, where there is one, or given by name. Truncation and padding
    that the file asks for are switched off: rows are the readers' business.

    `start_id` is BOS, else the padding token, else EOS (as GPT-2 uses `<|endoftext|>`).
    """

    path: str
    """`tokenizer.json`, or the folder it lies in."""
    bos_token: str | None = None
    """Such as `<s>`. None: as in `tokenizer_config.json`."""
    eos_token: str | None = None
    """Such as `</s>`. None: as in `tokenizer_config.json`."""
    pad_token: str | None = None
    """Such as `<pad>`. None: as in `tokenizer_config.json`."""
    special_tokens_in_text: SpecialTokensInText = "ids"
    """What special tokens spelled out in a text become: their `ids`, as in `transformers`, or ids
    of their characters (`text`), which is for text that others may write."""

    def __post_init__(self) -> None:
        known = get_args(SpecialTokensInText)
        if self.special_tokens_in_text not in known:
            raise ValueError(
                f"{type(self).__qualname__}: special_tokens_in_text={self.special_tokens_in_text!r}"
                f"{near_names(str(self.special_tokens_in_text), known)} Expected one of {known}."
            )
        if Path(self.path).is_dir():
            self.path = str(Path(self.path, "tokenizer.json"))
        _check_file(self, self.path)

    @functools.cached_property
    def _model(self) -> Any:
        tokenizers = require("tokenizers", needed_by="HuggingFaceTokenizer")
        try:
            model = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as error:  # the bindings raise nothing more precise
            raise _cannot_be_read(self, self.path, "a tokenizer.json", error) from None
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = self.special_tokens_in_text == "text"
        return model

    @functools.cached_property
    def _roles(self) -> dict[str, int | None]:
        """Ids of the special tokens."""
        beside = Path(self.path).with_name("tokenizer_config.json")
        try:
            config = json.loads(beside.read_bytes()) if beside.is_file() else {}
            stated = {role: config.get(role) for role in ("bos_token", "eos_token", "pad_token")}
        except (ValueError, AttributeError, RecursionError) as error:
            raise _cannot_be_read(self, beside, "a JSON object", error) from None
        return {role: self._role_id(role, token) for role, token in stated.items()}

    def _role_id(self, role: str, stated: Any) -> int | None:
        token = getattr(self, role)
        if token is None:  # a token with its options is written as an object
            token = stated.get("content") if isinstance(stated, dict) else stated
        if token is None:
            return None
        if not isinstance(token, str):
            raise ValueError(
                f"{type(self).__qualname__}: {role}={token!r:.100} of {self.path}. Expected text."
            )
        token_id = self._model.token_to_id(token)
        if token_id is None:
            near = near_names(token, self._model.get_vocab())
            raise ValueError(f"{role}={token!r} is no token of {self.path}{near}")
        return token_id

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return 1 + max(self._model.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def pad_id(self) -> int:
        """Id of `pad_token`, else 0."""
        return self._roles["pad_token"] or 0

    @property
    def bos_id(self) -> int | None:
        """Id of `bos_token`, if there is one."""
        return self._roles["bos_token"]

    @property
    def eos_id(self) -> int | None:
        """Id of `eos_token`, if there is one."""
        return self._roles["eos_token"]

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """Return the special tokens of the file by their ids."""
        added = self._model.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @property
    def note(self) -> str | None:
        """Line about special tokens in text for the start report; None where there are none."""
        if not self.special_tokens:
            return None
        names = list(self.special_tokens.values())
        more = f", … {len(names)} in all" if len(names) > _MOST_NAMED else ""
        become = "become their ids" if self.special_tokens_in_text == "ids" else "stay text"
        return (
            f"special tokens spelled out in text ({', '.join(names[:_MOST_NAMED])}{more}) {become}"
            f" (special_tokens_in_text={self.special_tokens_in_text!r})"
        )

    @property
    def start_id(self) -> int:
        """BOS, else the padding token, else EOS, else 0."""
        candidates = (self._roles[role] for role in ("bos_token", "pad_token", "eos_token"))
        return next((token_id for token_id in candidates if token_id is not None), 0)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text`, int32 `[length]`."""
        return np.array(self._model.encode(as_text(text), add_special_tokens=False).ids, np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Text of ids `[length]`."""
        return self._model.decode(_known_ids(ids, self.vocab_size), skip_special_tokens=True)

    @functools.cached_property
    def _sha256(self) -> str:
        return _sha256_of(self.path)

    def fingerprint(self) -> str:
        """SHA-256 of the file, the ids of BOS, EOS and padding, and how special tokens are read.

        `text` is not named: it is how states and token records of older versions were made.
        """
        roles = ",".join(str(self._roles[role]) for role in sorted(self._roles))
        in_text = "" if self.special_tokens_in_text == "text" else " special_tokens_in_text=ids"
        return f"{self._sha256} {roles}{in_text}"


def tokenizer_config(name: str, *, special_tokens_in_text: SpecialTokensInText = "ids") -> Config:
    """Return the config of the tokenizer that a flag or a field names.

    Args:
      name: `bytes`, a SentencePiece `.model`, or a `tokenizer.json` or the folder it lies in.
      special_tokens_in_text: Field of HuggingFaceTokenizer; the others encode them as text.
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
    """A model may round the vocabulary up, and predict ids that have no text."""
    array = np.asarray(ids, np.int64)
    return array[(array >= 0) & (array < vocab_size)].tolist()


def _sha256_of(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_file(tokenizer: Any, path: str) -> None:
    if not Path(path).is_file():
        folder = Path(path).parent
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        raise FileNotFoundError(
            f"{type(tokenizer).__qualname__}: there is no file path={str(path)!r}"
            f"{near_names(Path(path).name, names)}"
        )


def _cannot_be_read(tokenizer: Any, path: str | Path, expected: str, error: Exception) -> Exception:
    problem = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    return ValueError(
        f"{type(tokenizer).__qualname__}: {path} is not {expected} that can be read ({problem[0]})."
    )
