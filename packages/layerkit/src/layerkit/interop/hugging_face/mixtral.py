"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts for a feed-forward.

Transformers adds one load-balancing loss to that of training, over the choices of all layers
together: coefficient · E · Σ_e (choices of e per token) · (mean probability of e). So an expert of
one layer may make up for that of the same number in another. Here each layer has a loss of its own,
and the coefficient is spread over them: the same for one layer, and for balanced experts; else at
least as strict. In Transformers it counts only where `output_router_logits` is on. Here it always
does in training; a `load_balance_weight` of 0 takes it away.

Noise of `router_jitter_noise` reaches the router here, and in Transformers the experts as well.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import ConfigFile, Key, get_field, set_field
from layerkit.interop.hugging_face.llama import (
    LLAMA_BUFFERS,
    LLAMA_COPIES,
    LLAMA_NEUTRAL,
    attention_rows,
    llama_entries,
    llama_network,
    outer_rows,
    pre_norm_rows,
)
from layerkit.interop.hugging_face.parts import Activation, HeadDim
from layerkit.interop.hugging_face.rotary import Rotary
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.moe.feed_forward import MoeFeedForward


def _skeleton(file: ConfigFile) -> Config:
    del file
    # Trained with a loss that balances all choices of a token, and without a z-loss.
    experts: Config = MoeFeedForward.HParams.config(balance_all_choices=True, router_z_weight=0.0)
    return llama_network(feed_forward_tpl=experts)


class _BalanceLoss:
    """`router_aux_loss_coef`; comes after the depth and the number of choices.

    Our losses are means over the choices of a token, theirs sums over them.
    """

    _WEIGHT = "layer.feed_forward_tpl.load_balance_weight"

    def read(self, file: ConfigFile, network: Config) -> None:
        coefficient = file.get("router_aux_loss_coef", 0.001)
        set_field(network, self._WEIGHT, coefficient * self._choices_per_layer(network))

    def write(self, network: Config) -> dict[str, Any]:
        coefficient = get_field(network, self._WEIGHT) / self._choices_per_layer(network)
        # As it was before it was multiplied, to the last of its digits.
        return {"router_aux_loss_coef": float(f"{coefficient:.12g}")}

    def _choices_per_layer(self, network: Config) -> float:
        choices = get_field(network, "layer.feed_forward_tpl.num_experts_per_token")
        return choices / network.num_layers


_MOE = "model.layers.{layer}.block_sparse_moe."
_OURS = "lm/stack/{layer}/feed_forward/"
_LINEAR = "out in -> in out"

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    skeleton=_skeleton,
    entries=(
        *llama_entries(kv_heads=8, epsilon=1e-5),
        HeadDim(),
        Rotary(default_theta=1_000_000.0),
        Activation("hidden_act", "silu"),
        Key("sliding_window", "layer.attention_tpl.window", None),
        Key("num_local_experts", "layer.feed_forward_tpl.num_experts", 8),
        Key("num_experts_per_tok", "layer.feed_forward_tpl.num_experts_per_token", 2),
        _BalanceLoss(),
        Key("router_jitter_noise", "layer.feed_forward_tpl.router_tpl.jitter", 0.0),
    ),
    rows=(
        *outer_rows(),
        *pre_norm_rows(),
        *attention_rows(),
        Row(_MOE + "gate.weight", _OURS + "router/w", "experts embed -> embed experts"),
        Row(_MOE + "experts.{expert}.w1.weight", _OURS + "gate", _LINEAR),
        Row(_MOE + "experts.{expert}.w2.weight", _OURS + "down", _LINEAR),
        Row(_MOE + "experts.{expert}.w3.weight", _OURS + "up", _LINEAR),
    ),
    neutral=LLAMA_NEUTRAL | {"output_router_logits"},
    prefix="model.",
    copies=LLAMA_COPIES,
    buffers=LLAMA_BUFFERS,
    counts=(("num_hidden_layers", "num_local_experts"),),
)
