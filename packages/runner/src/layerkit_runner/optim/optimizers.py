"""Optimizers that Optax offers only in parts."""

from __future__ import annotations

from typing import Any

import jax
import optax

from layerkit_runner.errors import UsageError
from layerkit_runner.optim.schedules import check_finite, concrete_number


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
      mu_dtype: Dtype of the first moment, such as bfloat16, which halves its memory; None for that
        of the weights. The second moment grows by too little a step for bfloat16.

    Raises:
      UsageError: A number is out of range.
    """
    for name, decay in (("b1", b1), ("b2", b2)):
        number = concrete_number(decay)
        if number is not None and not 0 <= number < 1:  # nor is NaN
            raise UsageError(f"adam_with_update_cap: {name}={decay} must be from 0 to below 1")
    check_finite("adam_with_update_cap: eps", eps)
    check_finite("adam_with_update_cap: weight_decay", weight_decay)
    cap_number = concrete_number(update_rms_cap)
    if cap_number is not None and not cap_number > 0:
        raise UsageError(
            f"adam_with_update_cap: update_rms_cap={update_rms_cap} must be positive, or None for"
            " no cap"
        )
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
