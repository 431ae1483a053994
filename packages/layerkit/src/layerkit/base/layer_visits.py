"""Visits of all layers of a network with the fields that they inherit, without making weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from layerkit.base.base_layer import BaseLayer


def visit_layers(network: BaseLayer, visit: Callable[[BaseLayer], None]) -> None:
    """Call `visit` on every bound layer of a network, outer ones first.

    The body of a scan is visited once. Shapes are computed; no array is made.
    """

    def intercept(
        call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        # Initialization calls it on every layer, also inside of a scan.
        if isinstance(context.module, BaseLayer) and context.method_name == "create_weights":
            visit(context.module)
        return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        jax.eval_shape(lambda: network.init_boxed(jax.random.key(0)))
