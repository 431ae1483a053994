"""GPT-J (Wang and Komatsuzaki, 2021): parallel branches that share a norm, interleaved rotary.

Only the feed-forward and the head have biases.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.gpt2 import GPT2, gpt_entries
from layerkit.interop.hugging_face.families.llama import llama_network
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, fixed, get_field, set_field
from layerkit.interop.hugging_face.parts import embedding_rows, layer_rows, tied_embedding
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import LayerNorm

_ROTARY = "layer.attention_tpl.rotary_tpl"


def _network() -> Config:
    network = llama_network(norm_class=LayerNorm, is_gated=False)
    layer = network.stack_tpl.layer_tpl.set(parallel=True, parallel_shares_norm=True)
    layer.attention_tpl.rotary_tpl.pairing = "neighbors"
    layer.feed_forward_tpl.has_bias = True
    return network


def _add_bias_of_head(file: ConfigFile, network: Config) -> None:
    del file
    network.softmax_tpl.use_bias = True


def _read_rotary(file: ConfigFile, network: Config) -> None:
    rotated, head_dim = file.get("rotary_dim", 64), network.model_dims // network.num_heads
    if not rotated or rotated % 2 or rotated > head_dim:
        raise file.invalid("rotary_dim", f"an even number of the {head_dim} coordinates of a head")
    set_field(network, f"{_ROTARY}.fraction", rotated / head_dim)


def _write_rotary(network: Config) -> dict[str, Any]:
    head_dim = network.model_dims // network.num_heads
    return {"rotary_dim": round(get_field(network, f"{_ROTARY}.fraction") * head_dim)}


_THEIRS, _OURS = "transformer.h.{layer}.", "lm/stack/{layer}/"
_ATTENTION, _INTO = _THEIRS + "attn.", ("query", "key", "value")

GPTJ = dataclasses.replace(
    GPT2,
    model_type="gptj",
    architecture="GPTJForCausalLM",
    network=_network,
    entries=(
        tied_embedding(default=False),
        Entry(_add_bias_of_head),
        *gpt_entries(vocab_size=50400, dims=4096, layers=28, heads=16, dropout=0.0),
        Entry(_read_rotary, _write_rotary),
        fixed("rotary", value=True),
    ),
    # The table of angles has `n_positions` rows.
    neutral=GPT2.neutral | {"n_positions"},
    buffers=r"\battn\.((masked_)?bias|embed_positions)$",
    rows=(
        *embedding_rows("transformer.wte.weight"),
        Row("lm_head.bias", "lm/softmax/b"),
        *layer_rows(
            {
                **{f"{_OURS}attention/{n}": f"{_ATTENTION}{n[0]}_proj" for n in _INTO},
                _OURS + "attention/output": _ATTENTION + "out_proj",
                _OURS + "feed_forward/up": _THEIRS + "mlp.fc_in",
                _OURS + "feed_forward/down": _THEIRS + "mlp.fc_out",
                _OURS + "attention_norm": _THEIRS + "ln_1",
                "lm/final_norm": "transformer.ln_f",
            }
        ),
    ),
)
