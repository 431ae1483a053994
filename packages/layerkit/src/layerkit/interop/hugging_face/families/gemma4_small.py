"""The parts of Gemma 4 E2B and E4B: embeddings for each layer, shared keys and values."""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import LAYER, THEIR_LAYER
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, all_layers
from layerkit.interop.hugging_face.layer_types import stack_layers
from layerkit.interop.hugging_face.parts import layer_rows
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.transformer.layer_inputs import GatedInput, LayerInputs

_EMBEDDINGS, _VOCABULARY = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
_SHARED, _DOUBLE = "num_kv_shared_layers", "use_double_wide_mlp"


def _read(file: ConfigFile, network: Config) -> None:
    layers = [layer.clone() for layer in all_layers(network)]
    dims, rows = file.get(_EMBEDDINGS, 256), file.get(_VOCABULARY, 262144)
    if dims:
        if rows != network.vocab_size:
            expected = f"{network.vocab_size}, the vocab_size, with {_EMBEDDINGS}={dims}"
            raise file.invalid(_VOCABULARY, expected, value=rows)
        network.layer_inputs_tpl = LayerInputs.HParams.config(dims=dims)
        network.layer_inputs_tpl.norm_tpl = network.final_norm_tpl.clone()
        for layer in layers:
            layer.layer_input_tpl = GatedInput.HParams.config(dims=dims)
            layer.layer_input_tpl.norm_tpl = network.final_norm_tpl.clone()
            layer.layer_input_tpl.activation_tpl = layer.feed_forward_tpl.activation_tpl.clone()
    shared, is_double = file.get(_SHARED, 0), file.get(_DOUBLE, default=False)
    if shared and is_double and file.get("enable_moe_block", default=False):
        raise file.invalid(_DOUBLE, "false, since layers with experts are not doubled")
    num_first, windows = len(layers) - shared, [layer.attention_tpl.window for layer in layers]
    numbers = {window: number for number, window in enumerate(windows[:num_first], 1)}
    if num_first < 1 or not set(windows) <= set(numbers):
        raise file.invalid(_SHARED, "fewer, so that a layer of each type has keys and values")
    for layer, window in zip(layers[num_first:], windows[num_first:], strict=True):
        one = {"kv_layer": numbers[window], "value_norm_tpl": None, "values_are_keys": False}
        layer.attention_tpl.set(**one)
    if shared and is_double:
        for index, layer in enumerate(layers):
            layer.hidden_dims = network.hidden_dims * (2 if index >= num_first else 1)
        network.hidden_dims = 0
    network.stack_tpl = stack_layers(layers, num_first=num_first if shared else 0)


def _write(network: Config) -> dict[str, Any]:
    layers, inputs = all_layers(network), network.layer_inputs_tpl
    sizes = [layer.hidden_dims or network.hidden_dims for layer in layers]
    is_double = sizes[-1] > sizes[0]
    return {
        **({"intermediate_size": sizes[0]} if is_double else {}),
        _EMBEDDINGS: 0 if inputs is None else inputs.dims,
        _VOCABULARY: network.vocab_size,
        _SHARED: sum(layer.attention_tpl.kv_layer is not None for layer in layers),
        _DOUBLE: is_double,
    }


# Read after all other entries, which set the sizes of heads.
GEMMA4_SMALL = Entry(_read, _write)

_TABLE = "vocab embed -> vocab embed"
_OURS, _THEIRS = LAYER + "layer_input/", THEIR_LAYER + "per_layer_"
GEMMA4_SMALL_ROWS = (
    Row("model.embed_tokens_per_layer.weight", "lm/layer_inputs/embedding/w", _TABLE),
    *layer_rows(
        {
            "lm/layer_inputs/projection": "model.per_layer_model_projection",
            "lm/layer_inputs/norm": "model.per_layer_projection_norm",
            _OURS + "gate": _THEIRS + "input_gate",
            _OURS + "norm": THEIR_LAYER + "post_per_layer_input_norm",
        }
    ),
    *layer_rows({_OURS + "output": _THEIRS + "projection"}, "out in -> in out"),
)
