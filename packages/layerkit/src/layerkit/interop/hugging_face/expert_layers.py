"""Entries of mixtures of experts, and patterns of layers of which some have a dense feed-forward.

Transformers adds one load-balancing loss over the choices of all layers to the training loss:
coefficient · E · Σ_e (choices of e per token) · (mean probability of e). Imbalances of different
layers may cancel there. Here each layer has a loss, and the coefficient is divided among the
layers. The sum is equal for one layer and for balanced experts, and at least as large otherwise.
Transformers adds the loss only with `output_router_logits`. Here training always adds it, unless
`load_balance_weight` is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerkit.config import Config, target_of
from layerkit.interop.hugging_face.keys import (
    ConfigFile,
    Entry,
    UnsupportedModelError,
    all_layers,
    get_field,
    set_field,
)
from layerkit.interop.hugging_face.layer_types import stack_layers
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.transformer.transformer import TransformerFeedForward

EXPERTS = "layer.feed_forward_tpl."
"""Path of the fields of experts."""


def count_experts(file: ConfigFile, default: int) -> int:
    """Return `num_experts`, which Transformers also writes as `num_local_experts`.

    Raises:
      UnsupportedModelError: The file has both keys with different values.
    """
    counts = [file.get(name, None) for name in ("num_experts", "num_local_experts")]
    stated = [count for count in counts if count is not None]
    if len(set(stated)) > 1:
        raise file.invalid("num_local_experts", f"{stated[0]}, the value of num_experts")
    count: int = stated[0] if stated else default
    return count


def experts_key(default: int) -> Entry:
    """Return the entry of the number of experts, with its default in Transformers."""
    return Entry(
        lambda file, network: set_field(
            network, EXPERTS + "num_experts", count_experts(file, default)
        ),
        lambda network: {"num_experts": get_field(network, EXPERTS + "num_experts")},
    )


def balance_loss(default: float) -> Entry:
    """Return the entry of `router_aux_loss_coef`, to be read after the number of choices."""
    weight = EXPERTS + "load_balance_weight"

    # The losses of layerkit are means over the choices of a token; those of Transformers are sums.
    def choices_per_layer(network: Config) -> float:
        choices: int = get_field(network, EXPERTS + "num_experts_per_token")
        return choices / network.num_layers

    def read(file: ConfigFile, network: Config) -> None:
        coefficient = file.get("router_aux_loss_coef", default)
        set_field(network, weight, coefficient * choices_per_layer(network))

    def write(network: Config) -> dict[str, Any]:
        coefficient = get_field(network, weight) / choices_per_layer(network)
        # Rounded to the original coefficient.
        return {"router_aux_loss_coef": float(f"{coefficient:.12g}")}

    return Entry(read, write)


def expert_layers(
    entries: tuple[Entry, ...],
    *,
    is_dense: Callable[[ConfigFile, int], bool],
    write_dense: Callable[[list[int]], dict[str, Any]],
    dense_size: str = "intermediate_size",
) -> Entry:
    """Return the entry of layers with experts among layers with a dense feed-forward.

    It is read last. If there are layers of both kinds, each has its hidden size, and the network
    has 0.

    Args:
      entries: Entries of the layers with experts. They read and write a network of these alone,
        whose `hidden_dims` is the size of an expert.
      is_dense: Function (file, layer) → True for a layer without experts.
      write_dense: Function from the indices of the dense layers to their keys.
      dense_size: Key of the hidden size of the dense layers.
    """

    def read(file: ConfigFile, network: Config) -> None:
        are_dense = [is_dense(file, layer) for layer in range(network.num_layers)]
        sparse = network.clone()
        sparse.num_layers = max(are_dense.count(False), 1)
        for entry in entries:
            entry.read(file, sparse)
        sparse.num_layers = network.num_layers
        templates = {True: all_layers(network), False: all_layers(sparse)}
        sizes = {True: network.hidden_dims, False: sparse.hidden_dims}
        layers = []
        for layer, dense in enumerate(are_dense):
            template = templates[dense][layer].clone()
            if dense:
                template.feed_forward_tpl = TransformerFeedForward.HParams.config(
                    use_gate=True, activation_tpl=template.feed_forward_tpl.activation_tpl
                )
            if len(set(are_dense)) > 1:
                template.hidden_dims = sizes[dense]
            layers.append(template)
        network.hidden_dims = 0 if len(set(are_dense)) > 1 else sizes[True in are_dense]
        network.stack_tpl = stack_layers(layers)

    def write(network: Config) -> dict[str, Any]:
        layers = all_layers(network)
        dense = [n for n, template in enumerate(layers) if not _has_experts(template)]
        mixtures = [template for template in layers if _has_experts(template)]
        if not mixtures:
            raise UnsupportedModelError("no layer has experts")
        sparse = network.clone()
        sparse.stack_tpl = stack_layers(mixtures)
        sparse.num_layers = len(mixtures)
        sparse.hidden_dims = mixtures[0].hidden_dims or network.hidden_dims
        content = write_dense(dense)
        if dense:
            content[dense_size] = layers[dense[0]].hidden_dims or network.hidden_dims
        for entry in entries:
            content |= entry.write(sparse)
        return content

    return Entry(read, write)


def _has_experts(template: Config) -> bool:
    return issubclass(target_of(template.feed_forward_tpl), MoeFeedForward)
