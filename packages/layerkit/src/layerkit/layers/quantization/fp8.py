"""Products of 8-bit floats with delayed scaling.

Activations and weights are rounded to e4m3 (3 bits of mantissa), gradients to e5m2 (2 bits, more
range), after a division that maps the tensor's largest value to the largest value of the format.
Delayed scaling (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, and NVIDIA's
Transformer Engine) takes the largest value from a history of past steps, so that a tensor is read
once. The hardware accumulates in more bits, and both gradients are products of 8-bit floats as
well. The arithmetic is that of Flax (`flax.linen.fp8_ops`).

Scales and histories are state of the model in the collection `OVERWRITE_WITH_GRADIENT`: the
gradient of such a variable is by definition its next value. Thus the backward pass reports the
largest gradient, and no optimizer updates the state. `layerkit_runner` implements this. A custom
training loop calls `accumulate_by_max` at the start of its loss, and `next_state` on the gradients:

    def loss(params, fp8):
        return model.apply({PARAMS: params, OVERWRITE_WITH_GRADIENT: accumulate_by_max(fp8)}, x)

    grads, updates = jax.grad(loss, argnums=(0, 1))(params, fp8)
    fp8 = next_state(fp8, updates)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from jax import lax

from layerkit.base.base_layer import OVERWRITE_WITH_GRADIENT
from layerkit.base.weights import WeightBox, unbox
from layerkit.config.checks import check_sizes
from layerkit.layers.basic.dots import Dot, GroupedArray, GroupedProduct

_TENSORS = ("input", "kernel", "output_grad")


class Fp8Dot(Dot):
    """A product in fp8 whose scales come from past steps (delayed scaling).

    Factors are rounded to e4m3, and output gradients to e5m2.
    The first step scales by 1, since the history is empty. A tensor has one scale, also if it is a
    group of weights.

    The float32 state holds `<tensor>_scale` `[1]` and `<tensor>_amax_history`
    `[amax_history_length]` for each of `input`, `kernel` and `output_grad`.

    Attributes:
      amax_history_length: Number of steps of which the largest value is used.
    """

    amax_history_length: int = 1024

    def setup(self) -> None:
        """Check the field and create the state."""
        check_sizes(self, amax_history_length=self.amax_history_length)
        for tensor in _TENSORS:
            self._create_state(f"{tensor}_scale", jnp.ones((1,), jnp.float32))
            history = jnp.zeros((self.amax_history_length,), jnp.float32)
            self._create_state(f"{tensor}_amax_history", history)

    def fprop(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiply `[..., in]` by `[in, out]`; the result has the dtype of the factors.

        A group of weights `[group, in, out]` multiplies inputs `[group, tokens, in]`.
        """
        group = tuple(range(w.ndim - 2))
        return fp8_ops.fp8_scaled_dot_general(
            x,
            w,
            (((x.ndim - 1,), (w.ndim - 2,)), (group, group)),
            preferred_element_type=x.dtype,
            quantize_compute_type=w.dtype,
            lhs_scale=self._read_state("input_scale"),
            lhs_amax_history=self._read_state("input_amax_history"),
            rhs_scale=self._read_state("kernel_scale"),
            rhs_amax_history=self._read_state("kernel_amax_history"),
            grad_scale=self._read_state("output_grad_scale"),
            grad_amax_history=self._read_state("output_grad_amax_history"),
        )

    def grouped_arrays(self) -> dict[str, GroupedArray]:
        """Return the state by name."""
        names = (f"{tensor}_{kind}" for tensor in _TENSORS for kind in ("scale", "amax_history"))
        return {name: GroupedArray(self._read_state(name), None) for name in names}

    def grouped(
        self,
        rows: jax.Array,
        w: jax.Array,
        product: GroupedProduct,
        shards: Mapping[str, jax.Array],
    ) -> jax.Array:
        """Multiply sorted rows `[rows, in]` by the weights of their groups.

        Factors and gradients are rounded to 8 bits, and multiplied in their dtype before rounding:
        kernels of grouped products do not multiply 8-bit floats.
        """

        def state(tensor: str) -> tuple[jax.Array, jax.Array]:
            return shards[f"{tensor}_scale"], shards[f"{tensor}_amax_history"]

        dtype = rows.dtype
        rounded = fp8_ops.in_qdq(dtype, jnp.float8_e4m3fn, rows, *state("input"))
        kernel = fp8_ops.in_qdq(dtype, jnp.float8_e4m3fn, w, *state("kernel"))
        output = product(rounded, kernel)
        return fp8_ops.out_qdq(dtype, jnp.float8_e5m2, output, *state("output_grad"))

    def _create_state(self, name: str, value: jax.Array) -> None:
        self.variable(OVERWRITE_WITH_GRADIENT, name, lambda: WeightBox(value, (None,) * value.ndim))

    def _read_state(self, name: str) -> jax.Array:
        return unbox(self.get_variable(OVERWRITE_WITH_GRADIENT, name))


def accumulate_by_max(state: Any) -> Any:
    """Convert the state to the dtype that the model reads, whose gradients accumulate by maximum.

    A product that runs several times in a step, in a shared layer or for each microbatch of a
    pipeline, then returns the largest value of all instead of their sum. Call this function inside
    the differentiated function, and compile the latter.

    Args:
      state: The collection `OVERWRITE_WITH_GRADIENT`, nested dicts of float32 arrays `[...]`.
    """
    return jax.tree.map(lambda leaf: lax.convert_element_type(leaf, fp8_ops.fm32), state)


def next_state(state: Any, updates: Any) -> Any:
    """Return the state for the next step.

    Updates of a product that did not run (zeros), or that met values that are not finite, are
    ignored.

    Args:
      state: State of this step, nested dicts of float32 arrays `[...]`.
      updates: Gradient of the state, of the same shapes. With explicit data parallelism, pass the
        maximum over devices.
    """

    def choose(old: jax.Array, new: jax.Array) -> jax.Array:
        is_valid = jnp.all(jnp.isfinite(new)) & jnp.any(new != 0)
        return jnp.where(is_valid, new, old)

    return jax.tree.map(choose, state, updates)
