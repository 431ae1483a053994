"""The special tokens that the folder of a tokenizer declares.

`read_declared_tokens` reads the files beside a tokenizer in the order of `transformers`:
`special_tokens_map.json` before `tokenizer_config.json` (unless that declares
`added_tokens_decoder`), then the defaults of the tokenizer class. Only where these do not name a
token, it is that of `config.json` or of `generation_config.json`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import unreadable_file
from layerkit_inputs.base.tokenizer_interface import ROLES

_NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENS_MAP = "special_tokens_map.json"
_ADDED_TOKENS = "added_tokens.json"
_MODEL_FILES = ("config.json", "generation_config.json")
_GPT_END = "<|endoftext|>"
_CLASS_TOKENS: Mapping[str, tuple[str | None, str | None, str | None]] = {
    "CodeLlamaTokenizer": ("<s>", "</s>", None),
    "GPT2Tokenizer": (_GPT_END, _GPT_END, None),
    "GPTNeoXTokenizer": (_GPT_END, _GPT_END, "<|padding|>"),
    "GemmaTokenizer": ("<bos>", "<eos>", "<pad>"),
    "LlamaTokenizer": ("<s>", "</s>", None),
    "Qwen2Tokenizer": (None, _GPT_END, _GPT_END),
    "T5Tokenizer": (None, "</s>", "<pad>"),
}
"""Default tokens of the tokenizer classes of `transformers`, in the order of ROLES."""
_NO_CLASS = ""
_CLASS_OF_MODEL: Mapping[str, str] = {
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neo": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "gptj": "GPT2Tokenizer",
    "mistral": _NO_CLASS,
    "mixtral": _NO_CLASS,
    "mt5": "T5Tokenizer",
    "olmo2": _NO_CLASS,
    "olmo3": _NO_CLASS,
    "olmoe": "GPTNeoXTokenizer",
    "phi3": _NO_CLASS,
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "t5": "T5Tokenizer",
}
"""Tokenizer class of a `model_type`; the class without defaults ignores that of the folder."""


@dataclasses.dataclass(frozen=True)
class DeclaredTokens:
    """Special tokens that the files beside a tokenizer declare.

    Attributes:
      tokens: Token by role, as declared or as the default of the tokenizer's class. None declares
        that there is none.
      added: Declared tokens in the order in which a vocabulary gets those that it lacks: `content`,
        `id` if it is known, and options of `AddedToken`.
      add_bos_token: Value of that key in `tokenizer_config.json`; None without the file.
      model_ids: Ids by role in `config.json` and in `generation_config.json`, by file.
    """

    tokens: Mapping[str, str | None]
    added: Sequence[Mapping[str, Any]]
    add_bos_token: bool | None
    model_ids: Mapping[str, Mapping[str, tuple[int, ...]]]

    def id_in_model(self, role: str, *, vocab_size: int) -> int | None:
        """Return the first id of a role in the model's files that a vocabulary has, or None.

        A tokenizer may declare that it has no BOS and no padding. A text must end.
        """
        if role != "eos_token" and self.tokens.get(role, role) is None:
            return None
        ids = (token_id for known in self.model_ids.values() for token_id in known[role])
        return next((token_id for token_id in ids if 0 <= token_id < vocab_size), None)


def read_declared_tokens(tokenizer: Any, path: str) -> DeclaredTokens:
    """Read the special tokens that the files beside a tokenizer declare.

    Args:
      tokenizer: The tokenizer, whose class is named in messages.
      path: Path of `tokenizer.json`, or of a SentencePiece model.

    Raises:
      BadRecordError: A file is no JSON object.
      ConfigError: A declared token or id has another type.
    """
    file = Path(path)

    def read(name: str) -> dict[str, Any]:
        beside = file.with_name(name)
        try:
            content = json.loads(beside.read_bytes()) if beside.is_file() else {}
            if not isinstance(content, dict):
                raise ValueError(f"it holds a {type(content).__name__}")
        except (ValueError, RecursionError) as error:
            raise unreadable_file(tokenizer, beside, "a JSON object", error) from None
        return content

    config, model_files = read(_TOKENIZER_CONFIG), {name: read(name) for name in _MODEL_FILES}
    stated, by_id = dict(config), config.get("added_tokens_decoder")
    if by_id is None:
        stated |= read(_TOKENS_MAP)
        by_id = {token_id: token for token, token_id in read(_ADDED_TOKENS).items()}
    owner = str(file.with_name(_TOKENIZER_CONFIG))
    named = {key: _content(stated[key], key, owner) for key in _NAMED_TOKENS if key in stated}
    more = stated.get("extra_special_tokens") or stated.get("additional_special_tokens") or ()
    special = [*named.values()]
    special += [_content(token, "extra_special_tokens", owner) for token in _values(more)]
    added = [
        *_list_by_id(by_id, special, owner),
        *({"content": name, "special": True} for name in special),
    ]
    tokens = _class_tokens(config, model_files["config.json"], file) | named
    return DeclaredTokens(
        tokens={role: token for role, token in tokens.items() if role in ROLES},
        added=[token for token in added if token["content"]],
        add_bos_token=bool(config.get("add_bos_token")) if config else None,
        model_ids={
            name: _model_ids(content, owner=str(file.with_name(name)))
            for name, content in model_files.items()
        },
    )


def _values(tokens: Any) -> list[Any]:
    return [*tokens.values()] if isinstance(tokens, dict) else [*tokens]


def _list_by_id(by_id: Any, special: Sequence[str | None], owner: str) -> list[dict[str, Any]]:
    """Return the tokens of `added_tokens_decoder` in the order of their ids."""
    field = "added_tokens_decoder"
    require(isinstance(by_id, dict), owner, field, by_id, "an object of tokens by id")
    try:
        tokens = sorted((int(token_id), token) for token_id, token in by_id.items())
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error), owner=owner, field=field, value=by_id) from None
    listed = []
    for token_id, token in tokens:
        content = _content(token, field, owner)
        options = token if isinstance(token, dict) else {"special": content in special}
        listed.append({**options, "content": content, "id": token_id})
    return listed


def _content(token: Any, field: str, owner: str) -> str | None:
    """Return the text of a declared token, which may be an object with options."""
    content = token.get("content") if isinstance(token, dict) else token
    require(isinstance(content, str | None), owner, field, token, "a token, as text")
    return content or None


def _class_tokens(
    config: Mapping[str, Any], model: Mapping[str, Any], file: Path
) -> dict[str, str | None]:
    """Return the default tokens of the class that `AutoTokenizer` selects for a tokenizer.json."""
    stated = config.get("tokenizer_class") or model.get("tokenizer_class")
    model_class = _CLASS_OF_MODEL.get(str(model.get("model_type")))
    name = str(stated or model_class or _NO_CLASS).removesuffix("Fast")
    is_ignored = model_class == _NO_CLASS or file.suffix != ".json"
    # Class defaults of Llama 2 do not fit Llama 3, whose folders may name the same class.
    if is_ignored or (name == "LlamaTokenizer" and b'"ByteLevel"' in file.read_bytes()):
        return {}
    return dict(zip(ROLES, _CLASS_TOKENS.get(name, ()), strict=False))


def _model_ids(content: Mapping[str, Any], *, owner: str) -> dict[str, tuple[int, ...]]:
    """Return the ids of the roles in `config.json` or `generation_config.json`."""
    known = {}
    for role in ROLES:
        value = content.get(f"{role}_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        expected = "a token id, or a list of token ids"
        is_ids = all(isinstance(token_id, int) for token_id in ids)
        require(is_ids, owner, f"{role}_id", value, expected)
        known[role] = tuple(ids)
    return known
