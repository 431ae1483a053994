"""Tokenizers of bytes, of SentencePiece models and of `tokenizer.json` files of Hugging Face.

Readers have a field for the tokenizer:

    LocalText.HParams.config(tokenizer=SentencePieceTokenizer.HParams.config(path="c4.model"))

Readers add special ids in the same way for every tokenizer: a document begins with `start_id`,
unless `adds_start_id` is False, and ends with `eos_id`; see `special_tokens`. A `tokenizer.json`
encodes a special token in a text, such as `<|assistant|>`, as its id, as in `transformers`, unless
`special_tokens_in_text` is "text". Bytes and SentencePiece encode it as text.

A tokenizer may have more properties: `adds_start_id` (True by default), `special_tokens` (names by
id, which are marked in displayed ids), `byte_ids` (ids of single bytes, whose text depends on the
tokens after them), `note` (a line for the report at the start of a run) and `declared_ends` (end
tokens by the file that declares them, all of which end a generated text). The states of readers
contain `fingerprint()`, so a run cannot resume with another tokenizer.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from layerkit.config import Config, Configurable
from layerkit.config.checks import check_choice, require
from layerkit.config.hparams import check_fields
from layerkit.errors import ConfigError, first_names
from layerkit_inputs.base.errors import missing_file, require_extra, unreadable_file
from layerkit_inputs.base.tokenizer_interface import ROLES, prefix_id

if TYPE_CHECKING:
    from layerkit_inputs.text.declared_tokens import DeclaredTokens

# Byte `b` has the id `b + FIRST_BYTE_ID`. A model may round VOCAB_SIZE up; no data has higher ids.
PAD_ID = 0
BOS_ID = 1
EOS_ID = 2
FIRST_BYTE_ID = 3
VOCAB_SIZE = FIRST_BYTE_ID + 256
SPECIAL_TOKENS = {PAD_ID: "PAD", BOS_ID: "BOS", EOS_ID: "EOS"}
_MAX_NAMES = 4
_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TRIM_OFFSETS = re.compile(r'("trim_offsets":\s*)true')
# Token of one byte, for characters that a vocabulary lacks.
_BYTE = re.compile("<0x[0-9A-F]{2}>")

SpecialTokensInText = Literal["ids", "text"]
"""Encoding of a special token in a text: as its id, or as text."""


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
    """A tokenizer of bytes, with three special ids: padding, `BOS` and `EOS`."""

    vocab_size = VOCAB_SIZE
    pad_id = PAD_ID
    bos_id = BOS_ID
    eos_id = EOS_ID
    start_id = BOS_ID
    special_tokens = SPECIAL_TOKENS

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of bytes, or of the UTF-8 bytes of a string, int32 `[length]`."""
        data = text if isinstance(text, bytes) else text.encode("utf-8")
        return np.frombuffer(data, np.uint8).astype(np.int32) + FIRST_BYTE_ID

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Decode ids `[length]`. Invalid UTF-8 is replaced, other ids are dropped."""
        ids = np.asarray(ids)
        is_byte = (ids >= FIRST_BYTE_ID) & (ids < VOCAB_SIZE)
        return (ids[is_byte] - FIRST_BYTE_ID).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def fingerprint(self) -> str:
        """Return "bytes"."""
        return "bytes"


class _FileTokenizer(Configurable):
    """Base class of tokenizers of a file, beside which other files may declare special tokens."""

    path: str
    """Path of the file."""

    def __post_init__(self) -> None:
        """Check the fields, and that the file exists."""
        check_fields(self, owner=type(self).__qualname__)
        if not Path(self.path).is_file():
            raise missing_file(self, self.path)

    @functools.cached_property
    def _roles(self) -> dict[str, int | None]:
        """Return the ids of the special tokens by role."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: one more than the largest id."""
        raise NotImplementedError

    @functools.cached_property
    def _declared(self) -> DeclaredTokens:
        # Imported here, since bytes declare no tokens.
        from layerkit_inputs.text.declared_tokens import read_declared_tokens

        return read_declared_tokens(self, self.path)

    @property
    def declared_tokens(self) -> dict[str, str | None]:
        """Special tokens by role that the folder declares; a chat template may write them."""
        return {
            role: getattr(self, role, None) or self._declared.tokens.get(role) for role in ROLES
        }

    @functools.cached_property
    def _sha256(self) -> str:
        with Path(self.path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @property
    def pad_id(self) -> int:
        """Id of the padding token, else of EOS, else 0. Padding has no loss."""
        ids = (self._roles["pad_token"], self._roles["eos_token"], 0)
        return next(token_id for token_id in ids if token_id is not None)

    @property
    def bos_id(self) -> int | None:
        """Id of BOS, or None."""
        return self._roles["bos_token"]

    @property
    def eos_id(self) -> int | None:
        """Id of EOS, or None."""
        return self._roles["eos_token"]

    @property
    def declared_ends(self) -> dict[str, tuple[int, ...]]:
        """End tokens by the file that declares them."""
        ends: dict[str, tuple[int, ...]]
        ends = {"tokenizer": () if self.eos_id is None else (self.eos_id,)}
        for name, ids in self._declared.model_ids.items():
            ends[name] = tuple(i for i in ids["eos_token"] if 0 <= i < self.vocab_size)
        return {name: ids for name, ids in ends.items() if ids}

    def _ids_text(self) -> str:
        return ",".join(str(self._roles[role]) for role in ROLES)


class SentencePieceTokenizer(_FileTokenizer):
    """A tokenizer of a SentencePiece model file.

    A vocabulary alone has the ids of SeqIO: `start_id` is the model's BOS, or the padding id if a
    model (such as T5's) has no BOS. Beside a `tokenizer_config.json`, special tokens are those of
    the folder, and a text begins with BOS if it sets `add_bos_token`, as in `transformers`.
    """

    path: str
    """Path of the `.model` file."""

    @functools.cached_property
    def _model(self) -> Any:
        sentencepiece = require_extra("sentencepiece", needed_by="SentencePieceTokenizer")
        try:
            return sentencepiece.SentencePieceProcessor(model_file=str(self.path))
        except (RuntimeError, OSError) as error:
            raise unreadable_file(self, self.path, "a SentencePiece model", error) from None

    @functools.cached_property
    def _roles(self) -> dict[str, int | None]:
        """Return the ids of the special tokens by role."""
        model, declared = self._model, self._declared.tokens
        ids = {"bos_token": model.bos_id, "eos_token": model.eos_id, "pad_token": model.pad_id}
        stored = {role: None if get() < 0 else get() for role, get in ids.items()}
        return stored | {role: self._declared_id(role) for role in declared}

    def _declared_id(self, role: str) -> int | None:
        token = self._declared.tokens[role]
        if token is None:
            return None
        token_id = self._model.piece_to_id(token)
        if self._model.id_to_piece(token_id) == token:
            return token_id
        for added in self._declared.added:
            if added["content"] == token and "id" in added:
                return added["id"]
        expected = f"a piece of {self.path}, or an added token"
        raise ConfigError(
            owner="SentencePieceTokenizer", field=role, value=token, expected=expected
        )

    @property
    def vocab_size(self) -> int:
        """Number of pieces of the model; more if the folder declares special tokens after them."""
        return max(self._model.vocab_size(), *(1 + (role or 0) for role in self._roles.values()))

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """Return the names of ids without text."""
        model = self._model
        ids = range(model.vocab_size())
        names = {i: model.id_to_piece(i) for i in ids if model.is_control(i) or model.is_unknown(i)}
        declared = self._declared.tokens
        return names | {
            token_id: declared[role]
            for role, token_id in self._roles.items()
            if token_id is not None and declared.get(role)
        }

    @property
    def note(self) -> str:
        """Line about special tokens in text, for the report at the start of a run."""
        return "special tokens in text are encoded as text by SentencePiece"

    @property
    def start_id(self) -> int | None:
        """BOS, or the padding id if there is none."""
        return self.pad_id if self.bos_id is None else self.bos_id

    @property
    def adds_start_id(self) -> bool:
        """Whether a text begins with `start_id`; see the class."""
        add_bos_token = self._declared.add_bos_token
        return add_bos_token is None or (add_bos_token and self.bos_id is not None)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of a text, int32 `[length]`, without special ids."""
        return np.array(self._model.encode(as_text(text)), np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Decode ids `[length]`. Special and unknown ids are dropped."""
        return self._model.decode(_known_ids(ids, self._model.vocab_size()))

    def fingerprint(self) -> str:
        """Return the SHA-256 of the file, and the special ids if the folder declares them."""
        if self._declared.add_bos_token is None and not self._declared.tokens:
            return self._sha256
        return f"{self._sha256} {self._ids_text()} start={prefix_id(self)}"


class HuggingFaceTokenizer(_FileTokenizer):
    """A tokenizer of a `tokenizer.json` of Hugging Face's `tokenizers` and `transformers`.

    The tokens that begin, end and pad a text are those of `transformers.AutoTokenizer` for the
    folder, or set by fields; see `special_tokens`. A text begins with the token that the file's
    post-processor puts first, as in `transformers`. If it puts none, `start_id` is BOS, else the
    padding token, else EOS, and only begins a text without tokens. Truncation and padding of the
    file are disabled, since readers make the rows.
    """

    path: str
    """Path of `tokenizer.json`, or of its folder."""
    bos_token: str | None = None
    """BOS token, such as `<s>`. None: that of the folder."""
    eos_token: str | None = None
    """EOS token, such as `</s>`. None: that of the folder."""
    pad_token: str | None = None
    """Padding token, such as `<pad>`. None: that of the folder."""
    add_bos_token: bool | None = None
    """Whether a text begins with the BOS token. None: as the post-processor of the file."""
    special_tokens_in_text: SpecialTokensInText = "ids"
    """Encoding of special tokens in a text: their `ids`, as in `transformers`, or ids
    of their characters (`text`), which is for text that others may write."""

    def __post_init__(self) -> None:
        """Find the file of a folder, and check the fields."""
        if Path(self.path).is_dir():
            self.path = str(Path(self.path, "tokenizer.json"))
        super().__post_init__()

    @functools.cached_property
    def _loaded(self) -> tuple[Any, list[str]]:
        """Return the model of the file, and the declared tokens that were added to it."""
        tokenizers = require_extra("tokenizers", needed_by="HuggingFaceTokenizer")
        try:
            # Places of tokens then include spaces; ids stay the same.
            text = _TRIM_OFFSETS.sub(r"\1false", Path(self.path).read_text("utf-8"))
            model = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # The bindings raise no narrower class.
            raise unreadable_file(self, self.path, "a tokenizer.json", error) from None
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = self.special_tokens_in_text == "text"
        known = model.get_vocab(with_added_tokens=True)
        missing: dict[str, Any] = {}
        for token in self._declared.added:
            if (name := token["content"]) not in known and name not in missing:
                options = {key: token[key] for key in _TOKEN_OPTIONS if key in token}
                missing[name] = tokenizers.AddedToken(name, **options)
        model.add_tokens([*missing.values()])
        return model, [*missing]

    @property
    def _model(self) -> Any:
        return self._loaded[0]

    @functools.cached_property
    def _roles(self) -> dict[str, int | None]:
        """Return the ids of the special tokens by role."""
        return {role: self._role_id(role) for role in ROLES}

    def _role_id(self, role: str) -> int | None:
        token, declared = getattr(self, role), self._declared
        if token is not None:
            check_choice("HuggingFaceTokenizer", self._model.get_vocab(), **{role: token})
            return self._model.token_to_id(token)
        token = declared.tokens.get(role)
        if token is not None and (token_id := self._model.token_to_id(token)) is not None:
            return token_id
        token_id = declared.id_in_model(role, vocab_size=self.vocab_size)
        if token_id is None and role == "eos_token" and role not in declared.tokens:
            return next(iter(self._frame[1]), None)
        return token_id

    @functools.cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """Return the ids that the post-processor puts before and after a text."""
        encoded = map(self._model.encode, ("a", *self._model.get_vocab(with_added_tokens=False)))
        encoding = next((text for text in encoded if 0 in text.special_tokens_mask), None)
        if encoding is None:
            return [], []
        is_added = encoding.special_tokens_mask
        begin, end = is_added.index(0), len(is_added) - is_added[::-1].index(0)
        return encoding.ids[:begin], encoding.ids[end:]

    @functools.cached_property
    def vocab_size(self) -> int:
        """Return one more than the largest id, including added tokens."""
        return 1 + max(self._model.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """Return the special tokens of the file by their ids."""
        added = self._model.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @functools.cached_property
    def added_tokens(self) -> list[str]:
        """Return the tokens that a text may spell out, special or not."""
        return [token.content for token in self._model.get_added_tokens_decoder().values()]

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

    @functools.cached_property
    def start_id(self) -> int | None:
        """Id that the post-processor puts first, else of BOS, of padding or of EOS, or None."""
        first, roles = self._frame[0], self._roles
        if self.add_bos_token is None:
            field = "tokens of the post-processor before a text"
            expected = "at most one; set add_bos_token to True for BOS alone, or to False for none"
            names = [self._model.id_to_token(token_id) for token_id in first]
            require(len(first) <= 1, "HuggingFaceTokenizer", field, names, expected)
        elif self.add_bos_token:
            require(self.bos_id is not None, "HuggingFaceTokenizer", "bos_token", None, "a token")
        candidates: list[int | None] = [] if self.add_bos_token else [*first]
        candidates = [*candidates, roles["bos_token"], roles["pad_token"], roles["eos_token"]]
        return next((token_id for token_id in candidates if token_id is not None), None)

    @property
    def adds_start_id(self) -> bool:
        """Whether a text begins with `start_id`."""
        return bool(self._frame[0]) if self.add_bos_token is None else self.add_bos_token

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of a text, int32 `[length]`, without special ids."""
        return np.array(self._model.encode(as_text(text), add_special_tokens=False).ids, np.int32)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text, int32 `[length]`, and the place of each in the text.

        Places are begins and ends in characters, int64 `[length, 2]`.
        """
        encoding = self._model.encode(as_text(text), add_special_tokens=False)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.int32), places

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Decode ids `[length]`. Special and unknown ids are dropped."""
        return self._model.decode(_known_ids(ids, self.vocab_size), skip_special_tokens=True)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the file, the special ids, the added tokens, and the encoding.

        What older versions did not vary is omitted where it has their value: the encoding "text" of
        special tokens, and a start id that is BOS, else padding, else EOS, else 0.
        """
        roles, added = self._roles, self._loaded[1]
        in_text = "" if self.special_tokens_in_text == "text" else " special_tokens_in_text=ids"
        known = (roles["bos_token"], roles["pad_token"], roles["eos_token"], 0)
        older = next(token_id for token_id in known if token_id is not None)
        first = prefix_id(self)
        start = "" if first == older else f" start={first}"
        names = f" added={json.dumps(added)}" if added else ""
        return f"{self._sha256} {self._ids_text()}{in_text}{start}{names}"


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


def _known_ids(ids: np.ndarray | Sequence[int], vocab_size: int) -> list[int]:
    """Return the ids within the vocabulary. A model with a rounded vocabulary predicts others."""
    array = np.asarray(ids, np.int64)
    return array[(array >= 0) & (array < vocab_size)].tolist()
