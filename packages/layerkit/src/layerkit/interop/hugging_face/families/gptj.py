"""GPT-J (Wang and Komatsuzaki, 2021): parallel branches that share a norm, interleaved rotary.

Only the feed-forward and the head have biases.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.gpt2 import GPT2
from layerkit.interop.hugging_face.families.stablelm import layer_norm_network
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import (
    NORM_EPSILONS,
    ConfigFile,
    Entry,
    fixed,
    get_field,
    key,
    set_field,
)
from layerkit.interop.hugging_face.layouts import INTO_HEADS, OUT_OF_HEADS
from layerkit.interop.hugging_face.parts import (
    activation,
    embedding_rows,
    linear_rows,
    norm_rows,
    tied_embedding,
)
from layerkit.interop.hugging_face.tensors import Row

_ROTARY = "layer.attention_tpl.rotary_tpl"


def _network() -> Config:
    network = layer_norm_network()
    layer = network.stack_tpl.layer_tpl.set(parallel=True, parallel_shares_norm=True)
    layer.attention_tpl.rotary_tpl.pairing = "neighbors"
    layer.feed_forward_tpl.set(use_gate=False, has_bias=True)
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
_INTO = {f"{_OURS}attention/{n}": f"{_THEIRS}attn.{n[0]}_proj" for n in ("query", "key", "value")}

GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    network=_network,
    entries=(
        tied_embedding(default=False),
        Entry(_add_bias_of_head, lambda network: {}),
        key("vocab_size", "vocab_size", 50400),
        key("n_embd", "model_dims", 4096),
        key("n_inner", "hidden_dims", None, fallback=lambda network: 4 * network.model_dims),
        key("n_layer", "num_layers", 28),
        key("n_head", "num_heads", 16),
        key("layer_norm_epsilon", NORM_EPSILONS, 1e-5),
        activation("activation_function", "gelu_new"),
        key("embd_pdrop", "dropout_rate", 0.0),
        key("resid_pdrop", "layer.dropout_rate", 0.0),
        key("attn_pdrop", "layer.attention_tpl.dropout_rate", 0.0),
        Entry(_read_rotary, _write_rotary),
        fixed("rotary", value=True),
        fixed("scale_attn_weights", value=True),
    ),
    # The table of angles has `n_positions` rows.
    neutral=GPT2.neutral | {"n_positions"},
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    buffers=r"\battn\.((masked_)?bias|embed_positions)$",
    rows=(
        *embedding_rows("transformer.wte.weight"),
        Row("lm_head.bias", "lm/softmax/b"),
        *linear_rows(_INTO, INTO_HEADS),
        *linear_rows({_OURS + "attention/output": _THEIRS + "attn.out_proj"}, OUT_OF_HEADS),
        *linear_rows({_OURS + "feed_forward/up": _THEIRS + "mlp.fc_in"}),
        *linear_rows({_OURS + "feed_forward/down": _THEIRS + "mlp.fc_out"}),
        *norm_rows(
            {_OURS + "attention_norm": _THEIRS + "ln_1", "lm/final_norm": "transformer.ln_f"}
        ),
    ),
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
    counts=("n_layer",),
)
