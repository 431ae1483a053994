"""The function that an expert computes, and the weights that it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from layerkit.layers.basic.elementwise import BaseActivation

_WIDEN, _NARROW = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
WEIGHT_AXES = {
    "up": _WIDEN,
    "gate": _WIDEN,
    "down": _NARROW,
    "up_bias": ("expert", "mlp"),
    "gate_bias": ("expert", "mlp"),
    "down_bias": ("expert", "embed"),
}
"""Logical axes of the weights of experts by name."""

PRODUCTS = ("up", "gate", "down")
"""Names of the weights that rows are multiplied by."""

OUTPUT_BIAS = "down_bias"
"""Name of the weight that is added to an output whose other terms are sums over `mlp`."""

# (rows of each expert, name of a weight) → product, with the bias of that name
Product = Callable[[jax.Array, str], jax.Array]


@dataclasses.dataclass(frozen=True)
class ExpertFunction:
    """The function y = down(h) of an expert.

    h = activation(up(x)), or h = activation(gate(x)) · (up(x) + up_offset) with a gate.

    Attributes:
      activation: Activation, bound.
      use_gate: True for a gate.
      gate_limit: Bound before the activation: the gate is at most this, and up within ± this; None
        for no bound.
      up_offset: Number that is added to up if there is a gate.
      dropout: Function that drops hidden activations.
    """

    activation: BaseActivation
    use_gate: bool
    gate_limit: float | None = None
    up_offset: float = 0.0
    dropout: Callable[[jax.Array], jax.Array] = lambda hidden: hidden

    def __call__(self, rows: jax.Array, product: Product) -> jax.Array:
        """Compute the outputs `[..., rows, dims]` of rows `[..., rows, dims]`."""
        up = product(rows, "up")
        if not self.use_gate:
            return product(self.dropout(self.activation(up)), "down")
        gate = product(rows, "gate")
        hidden = self.activation.gate(gate, up, limit=self.gate_limit, offset=self.up_offset)
        return product(self.dropout(hidden), "down")


def weight_names(*, use_gate: bool, use_bias: bool) -> tuple[str, ...]:
    """Return the names of the weights of an expert, biases last."""
    names = PRODUCTS if use_gate else ("up", "down")
    return (*names, *(f"{name}_bias" for name in names)) if use_bias else names
