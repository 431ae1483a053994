"""Optimizers that Optax does not have as a whole."""

from __future__ import annotations

from typing import Any

import jax
import optax

from layerkit.checks import check_non_negative, check_positive, check_rates
from layerkit_runner.optim.schedules import concrete_numbers


def adam_with_update_cap(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    update_rms_cap: float | None = 1.0,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Return Adam (Kingma and Ba, 2015) with Adafactor's cap (2018), as Pax's language models do.

    Args:
      learning_rate: A number or schedule.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Number added to the root of the second moment.
      weight_decay: Decoupled weight decay (Loshchilov and Hutter, 2019).
      update_rms_cap: Largest root mean square of a tensor's update, before weight decay and
        learning rate; None for no cap. Each layer of a stack is a tensor.
      mu_dtype: Dtype of the first moment, such as bfloat16, which halves its memory; None for the
        dtype of the weights. The second moment has the dtype of the weights, because its increments
        are too small for bfloat16.

    Raises:
      ConfigError: A number is out of range.
    """
    owner = "adam_with_update_cap"
    check_rates(owner, **concrete_numbers(b1=b1, b2=b2))
    check_non_negative(owner, **concrete_numbers(eps=eps, weight_decay=weight_decay))
    check_positive(owner, **concrete_numbers(update_rms_cap=update_rms_cap))
    cap = optax.identity() if update_rms_cap is None else optax.clip_by_block_rms(update_rms_cap)
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype),
        cap,
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def decays(params: Any) -> Any:
    """Return a mask for `optax.adamw(mask=…)`: True for matrices (`w`), not scales and biases.

    Args:
      params: Weights by layer path.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "w", params)
