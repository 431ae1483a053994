"""Rematerialization policies by name: which activations are saved for the backward pass.

| name | saved in the forward pass | extra compute |
|---|---|---|
| `none` | everything that XLA saves | none |
| `dots` | outputs of all matrix products | little |
| `dots_no_batch` | outputs of products without batch dimensions: projections, not logits | some |
| `projections` | queries, keys, values and outputs of branches; nothing wide | more |
| `attention_out` | outputs of attention | almost a forward pass |
| `residual` | inputs of the layers within a pipeline stage | one more forward pass |
| `full` | nothing | one more forward pass |
| `offload_projections` | as `projections`, in host memory | as `projections` |
| `offload_residual` | as `full`, in host memory | as `full` |

All policies except `none` also save the input of the layer. The last six select activations by
their names (`name_activation`), so they save the same with any kernel. The last two copy the
activations to pinned host memory and back while the device computes other layers; the device then
holds those of one layer at a time.

A policy can also list names of `ACTIVATION_NAMES`: `save:query,key;offload:residual` saves queries
and keys, copies the inputs of the layers to host memory, and computes the rest again. As a policy
of the stages of a pipeline, and there alone, `offload:stage_input` is `full` with the inputs in
host memory.

`save_slopes` is the choice for a single element-wise function: its slopes are saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from layerkit.base.sharding import HOST_MEMORY
from layerkit.config.checks import check_choice, require

_RESIDUAL = ("residual",)
_PROJECTIONS = (
    "query",
    "key",
    "value",
    "attention_out",
    "cross_attention_out",
    "feed_forward_out",
    "feed_forward_start_out",
    "conv_out",
)
# Outputs of the activation function in the feed-forward layer, wide.
_HIDDEN = ("feed_forward_hidden",)
_STAGE_INPUT = ("stage_input",)  # of a tick of a pipeline
ACTIVATION_NAMES = (*_RESIDUAL, *_PROJECTIONS, *_HIDDEN, *_STAGE_INPUT)
_TREATMENTS = ("save", "offload")
# Results of products that `jax.checkpoint` cannot look into, since they define their gradients.
_PRODUCT, _BATCHED_PRODUCT = "product", "batched_product"
_IN_REMAT: ContextVar[bool] = ContextVar("in_remat", default=False)


def _offload(*names: str, saved: Sequence[str] = ()) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )


def _save_names(policy: Any, *names: str) -> Any:
    named = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint_policies.save_from_both_policies(policy, named)


_POLICIES: dict[str, Any] = {
    "none": None,
    "dots": _save_names(jax.checkpoint_policies.dots_saveable, _PRODUCT, _BATCHED_PRODUCT),
    "dots_no_batch": _save_names(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _PRODUCT
    ),
    "projections": jax.checkpoint_policies.save_only_these_names(*_PROJECTIONS),
    "attention_out": jax.checkpoint_policies.save_only_these_names(
        "attention_out", "cross_attention_out"
    ),
    "residual": jax.checkpoint_policies.save_only_these_names(*_RESIDUAL),
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload_projections": _offload(*_RESIDUAL, *_PROJECTIONS),
    "offload_residual": _offload(*_RESIDUAL),
}
REMAT_POLICIES = tuple(_POLICIES)


def name_activation(x: jax.Array, name: str) -> jax.Array:
    """Return `x` `[...]` with a name for rematerialization policies.

    A layer that names its input must use the returned array, or both are saved.

    Raises:
      ConfigError: The name is not in `ACTIVATION_NAMES`.
    """
    check_choice("name_activation", ACTIVATION_NAMES, name=name)
    named: jax.Array = checkpoint_name(x, name)
    return named


def name_product(x: jax.Array, *, is_batched: bool) -> jax.Array:
    """Return the result `[...]` of a product with its own gradient, for the policies of products.

    Args:
      x: Result of a `jax.custom_vjp` that multiplies.
      is_batched: True if the product has batch dimensions, as those of experts.
    """
    named: jax.Array = checkpoint_name(x, _BATCHED_PRODUCT if is_batched else _PRODUCT)
    return named


def check_remat_policy(policy: str, *, owner: str = "remat", has_stages: bool = False) -> Any:
    """Return the policy of a name, or of `save:NAME,…;offload:NAME,…`.

    `has_stages` is True for a pipeline, which alone has the activation `stage_input`.

    Raises:
      ConfigError: A policy, part or name is unknown, a name is given twice, or `stage_input` is
        given without a pipeline.
    """
    if ":" not in policy:
        check_choice(owner, REMAT_POLICIES, remat=policy)
        return _POLICIES[policy]
    names: dict[str, list[str]] = {treatment: [] for treatment in _TREATMENTS}
    for part in policy.split(";"):
        treatment, _, listed = part.partition(":")
        check_choice(f"{owner}, remat={policy!r}", _TREATMENTS, treatment=treatment.strip())
        for name in listed.split(","):
            check_choice(f"{owner}, remat={policy!r}", ACTIVATION_NAMES, name=name.strip())
            names[treatment.strip()].append(name.strip())
    present = names["save"] + names["offload"]
    require(len(present) == len(set(present)), owner, "remat", policy, "each name once")
    expected = "no stage_input, which only the stages of a pipeline have (stage_remat)"
    require(has_stages or not {*_STAGE_INPUT} & {*present}, owner, "remat", policy, expected)
    if not names["offload"]:
        return jax.checkpoint_policies.save_only_these_names(*names["save"])
    return _offload(*names["offload"], saved=names["save"])


def remat(body: Callable[..., Any], policy: str, *, in_scan: bool) -> Callable[..., Any]:
    """Return `body(module, *args)` with rematerialization.

    Args:
      body: Function of a Flax module and arrays.
      policy: One of `REMAT_POLICIES`, or a list of names.
      in_scan: True for the body of a scan, which XLA does not merge with the recomputation.
    """
    if policy == "none":
        return body
    if not in_scan:
        body = _order_gradients(body)
    body = _rematerialized(body)
    return nn.remat(body, policy=check_remat_policy(policy), prevent_cse=not in_scan)


def is_in_remat() -> bool:
    """Return whether a policy other than `none` applies to the layer that is being traced.

    A `jax.checkpoint` of a layer's own is then superfluous. It would save its input a second time
    if the policy saves that input by name.
    """
    return _IN_REMAT.get()


def save_inputs(
    function: Callable[..., Any], *, has_policy: bool | None = None
) -> Callable[..., Any]:
    """Return a function of arrays `[...]` whose backward pass keeps its inputs alone.

    The backward pass computes the function again, so it should be cheap, such as a cast. Within a
    layer that a policy applies to, the policy decides what is kept.

    Args:
      function: Function to compute again.
      has_policy: Whether a policy applies, for rules of gradients, which are traced after the
        layer; None for the value of `is_in_remat` now.
    """
    if has_policy is None:
        has_policy = is_in_remat()
    # XLA may merge what is computed twice: it fuses such steps into the loops that read them.
    return function if has_policy else jax.checkpoint(function, prevent_cse=False)


def _rematerialized(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return `body`, within which `is_in_remat` is True."""

    def run(*args: Any) -> Any:
        token = _IN_REMAT.set(True)
        try:
            return body(*args)
        finally:
            _IN_REMAT.reset(token)

    return run


def _order_gradients(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return `body` whose input gets its gradient after the weights have theirs.

    XLA for several GPUs postpones the gradients of weights until they are summed over the devices,
    which keeps the recomputed activations of all layers.
    """

    def ordered(module: Any, x: Any, *args: Any) -> Any:
        if module.is_initializing():
            return body(module, x, *args)

        def join(weights: Any) -> Any:
            nonlocal x
            joined, x = _join_gradients((weights, x))
            return joined

        def run(module: Any) -> Any:
            return body(module, x, *args)

        return nn.map_variables(run, "params", trans_in_fn=join)(module)

    return ordered


@jax.custom_jvp
def _join_gradients(arrays: Any) -> Any:
    """Return the arrays; the gradient of none is read before those of all are computed."""
    return arrays


@functools.partial(_join_gradients.defjvp, symbolic_zeros=True)
def _join_tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
    leaves, structure = jax.tree.flatten(tangents[0])
    # Frozen weights and integers have no gradient.
    present = [leaf for leaf in leaves if not isinstance(leaf, SymbolicZero)]
    joined = iter(jax.lax.optimization_barrier(present))
    leaves = [leaf if isinstance(leaf, SymbolicZero) else next(joined) for leaf in leaves]
    return primals[0], jax.tree.unflatten(structure, leaves)


def remat_in_scan(body: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Return a pure function of arrays `[...]`, the body of a scan, with rematerialization.

    Args:
      body: Pure function.
      policy: One of `REMAT_POLICIES`, or a list of names.
    """
    if policy == "none":
        return body
    checked = check_remat_policy(policy, has_stages=True)
    return jax.checkpoint(_rematerialized(body), policy=checked, prevent_cse=False)


ElementWise = Callable[..., jax.Array]
"""A function of arrays `[...]` of one shape that computes each element separately."""


def save_slopes(
    function: ElementWise, *arrays: jax.Array, has_policy: bool | None = None
) -> jax.Array:
    """Return `function(*arrays)`, whose backward pass keeps one array per argument.

    It keeps the partial derivatives, in the dtype of the result.

    Args:
      function: Differentiable element-wise function that closes over no arrays.
      *arrays: Arrays `[...]` of one shape.
      has_policy: Whether the backward pass computes the function again; None for the value of
        `is_in_remat`.
    """
    return _save_slopes(function, is_in_remat() if has_policy is None else has_policy, *arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _save_slopes(function: ElementWise, _: bool, *arrays: jax.Array) -> jax.Array:  # noqa: FBT001
    return function(*arrays)


@_save_slopes.defjvp
def _save_slopes_jvp(
    function: ElementWise,
    has_policy: bool,  # noqa: FBT001
    arrays: tuple[jax.Array, ...],
    tangents: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    terms = []
    for index, (x, tangent) in enumerate(zip(arrays, tangents, strict=True)):

        def of_one(x: jax.Array, index: int = index) -> jax.Array:
            return function(*arrays[:index], x, *arrays[index + 1 :])

        outputs, slope = jax.jvp(of_one, (x,), (jnp.ones_like(x),))
        if not has_policy:
            # XLA would otherwise keep several steps of the formula and compute the slope from them.
            slope = jax.lax.optimization_barrier(slope)
        terms.append((slope * tangent).astype(outputs.dtype))
    return outputs, functools.reduce(jnp.add, terms)
