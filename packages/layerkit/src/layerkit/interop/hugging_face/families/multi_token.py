"""The layers for multi-token prediction of DeepSeek V3 and GLM-4.5, behind those of the model.

`num_nextn_predict_layers` is their number. A folder may lack them, as those that Transformers
saves. Published folders repeat the embedding and the head in each of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import LAYER, THEIR_LAYER
from layerkit.interop.hugging_face.keys import ConfigFile, Entry
from layerkit.interop.hugging_face.layouts import LINEAR
from layerkit.interop.hugging_face.parts import embedding_rows
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.transformer.multi_token import MultiTokenPrediction

EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of their number; the second is an attribute of Transformers."""

_STACK, _MODULES = LAYER.partition("/{layer}")[0], "lm/mtp"
_MODULE = _MODULES + "/{layer}/"


def _read_modules(file: ConfigFile, network: Config) -> None:
    depth = file.get(EXTRA_LAYERS[0], file.get(EXTRA_LAYERS[1], 1))
    if depth:
        network.mtp_tpl = MultiTokenPrediction.HParams.config(depth=depth)
        network.mtp_tpl.module_tpl.norm_tpl = network.final_norm_tpl.clone()


def _write_modules(network: Config) -> dict[str, Any]:
    return {EXTRA_LAYERS[0]: 0 if network.mtp_tpl is None else network.mtp_tpl.depth}


MULTI_TOKEN = Entry(_read_modules, _write_modules)
"""Entry of the number of modules, to be read after `rms_norm_eps`."""


def add_module_rows(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the rows of a model and those of its modules, each with a layer like the last one."""

    def inside(path: str | None) -> Any:
        return path and path.replace(LAYER, _MODULE + "layer/")

    layers = [
        dataclasses.replace(
            row,
            path=inside(row.path),
            beside=inside(row.beside),
            instead_of=inside(row.instead_of),
            behind=_STACK,
        )
        for row in rows
        if row.path.startswith(LAYER)
    ]
    copies = embedding_rows(
        THEIR_LAYER + "embed_tokens.weight", head=THEIR_LAYER + "shared_head.head.weight"
    )
    return (
        *rows,
        *layers,
        Row(THEIR_LAYER + "enorm.weight", _MODULE + "embedding_norm/scale", behind=_STACK),
        Row(THEIR_LAYER + "hnorm.weight", _MODULE + "hidden_norm/scale", behind=_STACK),
        Row(THEIR_LAYER + "eh_proj.weight", _MODULE + "projection/w", LINEAR, behind=_STACK),
        Row(THEIR_LAYER + "shared_head.norm.weight", _MODULE + "norm/scale", behind=_STACK),
        *(dataclasses.replace(row, behind=_STACK, copied_for=_MODULES) for row in copies),
    )
