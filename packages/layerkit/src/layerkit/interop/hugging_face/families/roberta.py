"""RoBERTa and XLM-RoBERTa (Liu et al., 2019; Conneau et al., 2019): BERT with shifted positions.

Position 0 has the row of the table after that of the padding token's id.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.bert import BERT, bert_entries
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, key
from layerkit.layers.basic.elementwise import GELU

_NAMES = {
    "bert.": "roberta.",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.predictions.transform": "lm_head",
    "cls.predictions": "lm_head",
}


def _rename(name: str) -> str:
    old = next(old for old in _NAMES if name.startswith(old))
    return _NAMES[old] + name.removeprefix(old)


def _read_positions(file: ConfigFile, network: Config) -> None:
    size = file.get("max_position_embeddings", 512)
    network.position_tpl.offset = file.get("pad_token_id", 1) + 1
    network.position_tpl.max_length = size - network.position_tpl.offset


def _write_positions(network: Config) -> dict[str, Any]:
    position: Any = network.position_tpl
    return {
        "pad_token_id": position.offset - 1,
        "max_position_embeddings": position.offset + position.max_length,
    }


ROBERTA, XLM_ROBERTA = (
    dataclasses.replace(
        BERT,
        model_type=model_type,
        architecture=f"{stem}ForMaskedLM",
        entries=(
            key("vocab_size", "vocab_size", vocab_size),
            *bert_entries(
                stem,
                Entry(_read_positions, _write_positions),
                head_activation=GELU.HParams.config(approximate=False),
            ),
        ),
        prefix="roberta.",
        copies={_rename(copy): _rename(original) for copy, original in BERT.copies.items()},
        rows=tuple(dataclasses.replace(row, name=_rename(row.name)) for row in BERT.rows),
        token_ids={"bos_token_id": 0, "eos_token_id": 2},
    )
    for model_type, stem, vocab_size in (
        ("roberta", "Roberta", 50265),
        ("xlm-roberta", "XLMRoberta", 30522),
    )
)
