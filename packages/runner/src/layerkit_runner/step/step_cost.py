"""Model FLOPs and temporary memory of a training step, for throughput and plans.

FLOPs are counted on the jaxpr of a function: XLA's cost analysis counts the body of a loop once,
and the repetitions of rematerialization. Only contractions count, two FLOPs for each multiply-add,
as in Chowdhery et al., "PaLM", 2022, appendix B.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from layerkit.config import Config, copy_config, field_names, walk_configs
from layerkit.layers.basic.dots import unused_templates
from layerkit.ops.pipeline_schedule import stages_in_sequence
from layerkit_runner.optim.weight_selection import mesh_axes
from layerkit_runner.step.metrics import GLOBAL_BATCH
from layerkit_runner.step.train_state import TrainState, batch_spec

CAUSAL_SCOPE = "causal_attention"
"""Name of the `jax.named_scope` whose contractions count half, because half is masked out."""

_FORWARDS_PER_TRAINING_STEP = 3
# Matches the scope as a whole part of a name stack such as 'jvp(vmap(causal_attention))/dot'.
_IN_CAUSAL_SCOPE = re.compile(rf"(?:^|[/(]){CAUSAL_SCOPE}(?:$|[/)])")
# The name of products of which a share counts, such as those of `layerkit.ops.moe.grouped_matmul`
# with some of their rows, and those that an optimizer computes in some of its steps.
_ROWS_IN_USE = re.compile(r"\brows_(\d+)_of_(\d+)\b")


def forward_flops(fn: Callable[..., Any], *abstract_args: Any) -> float:
    """Return the FLOPs of one call of `fn`, summed over all devices.

    - A scan counts its body once per iteration. A conditional counts its most expensive branch. A
      `while` loop of unknown length counts its body ONCE.
    - A Pallas kernel counts the FLOPs of its cost estimate, or else its body once per cell of its
      grid, from which splash attention leaves out hidden blocks.
    - Repetitions by `jax.checkpoint` in a backward pass are not counted.
    - Inside `shard_map`, one shard counts times the sizes of the mesh axes that split an input.
    - Contractions under `jax.named_scope('causal_attention')` count half, grouped products of
      experts the rows in use with balanced routing, and one-hot products as products.
    """
    return _total(_jaxpr_flops(jax.make_jaxpr(fn)(*abstract_args).jaxpr, "", share=1.0))


def training_flops(fn: Callable[..., Any], *abstract_args: Any) -> float:
    """Return the model FLOPs of one training step with the loss `fn`: three times its FLOPs."""
    return _FORWARDS_PER_TRAINING_STEP * forward_flops(fn, *abstract_args)


def program_flops(program: core.ClosedJaxpr) -> float:
    """Return the FLOPs of a traced program, such as a training step, summed over all devices.

    In contrast to `forward_flops`, repetitions of rematerialization and bubbles of a pipeline
    count.
    """
    return sum(scoped_flops(program).values())


def scoped_flops(program: core.ClosedJaxpr) -> dict[tuple[str, str], float]:
    """Return the terms of `program_flops` by their names and the dtypes of their factors.

    A name is that of a scope, such as `transpose(jvp(lm))/softmax`. A dtype is without its format,
    such as `float8`, the wider one of two, and empty for kernels.
    """
    # Unused results are not counted, because a compiler removes them.
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    flops: dict[tuple[str, str], float] = {}
    for scope, dtype, term in _jaxpr_flops(jaxpr, "", share=1.0):
        flops[scope, dtype] = flops.get((scope, dtype), 0.0) + term
    return flops


_Terms = Iterator[tuple[str, str, float]]


def _total(terms: Iterable[tuple[str, str, float]]) -> float:
    return sum((term for *_, term in terms), 0.0)


def _jaxpr_flops(jaxpr: core.Jaxpr, scope: str, *, share: float) -> _Terms:
    return itertools.chain.from_iterable(
        _equation_flops(eqn, scope, share=share) for eqn in jaxpr.eqns
    )


def _equation_flops(eqn: core.JaxprEqn, outer: str, *, share: float) -> _Terms:
    """Yield scopes, dtypes and FLOPs of an equation; `share` of those of its contractions count."""
    # The name stack of an inner jaxpr does not include that of its equation.
    name_stack = str(eqn.source_info.name_stack)
    scope = f"{outer}/{name_stack}"
    # Rows in use of a window leave out those that a causal mask hides.
    if rows := _ROWS_IN_USE.search(name_stack):
        share = int(rows[1]) / int(rows[2])
    elif _IN_CAUSAL_SCOPE.search(name_stack):
        share = 0.5
    # Kernels of libraries that give no cost estimate are in a function with a known name.
    if count := _CONTRACTIONS.get(eqn.primitive.name) or _CONTRACTIONS.get(
        eqn.params.get("name", "")
    ):
        yield scope, _dtype_of_factors(eqn), float(count(eqn)) * share
        return
    if eqn.primitive.name == "pallas_call" and eqn.params["cost_estimate"] is not None:
        # The bounds of loops in a kernel are often known only at run time.
        yield scope, "", float(eqn.params["cost_estimate"].flops) * share
        return
    inner = [[*_jaxpr_flops(jaxpr, scope, share=share)] for jaxpr in _inner_jaxprs(eqn)]
    if eqn.primitive.name == "cond":
        inner = [max(inner, key=_total)]
    for name, dtype, flops in itertools.chain.from_iterable(inner):
        yield name, dtype, _repeats(eqn) * flops


def _dtype_of_factors(eqn: core.JaxprEqn) -> str:
    """Return the wider dtype of two factors, `float8` for `float8_e4m3fn`."""
    factors: list[Any] = [operand.aval for operand in eqn.invars[:2]]
    dtypes = [factor.dtype for factor in factors]
    return max(dtypes, key=jax.dtypes.itemsize_bits).name.partition("_")[0]


def _repeats(eqn: core.JaxprEqn) -> int:
    match eqn.primitive.name:
        case "scan":
            return int(eqn.params["length"])
        case "shard_map":
            entries = [names for spec in eqn.params["in_specs"] for names in mesh_axes(spec, 0)]
            axes = {axis for names in entries for axis in names}
            return math.prod(eqn.params["mesh"].shape[axis] for axis in axes)
        case "pallas_call":
            return math.prod(d for d in eqn.params["grid_mapping"].grid if isinstance(d, int))
        case _:
            return 1


def _inner_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part


def _shape(operand: Any) -> tuple[int, ...]:
    return operand.aval.shape


def _dot_flops(eqn: core.JaxprEqn) -> int:
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    return _product_flops(eqn, contracted, batch)


def _ragged_dot_flops(eqn: core.JaxprEqn) -> int:
    # Each row is multiplied with the weights of one group, so the group axis does not count.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    return _product_flops(eqn, contracted, (*batch, *numbers.rhs_group_dimensions))


def _product_flops(eqn: core.JaxprEqn, contracted: tuple[int, ...], shared: tuple[int, ...]) -> int:
    """Count one multiply-add for each pair of a scalar on the left and a free one on the right."""
    lhs, rhs = map(_shape, eqn.invars[:2])
    bound = {*contracted, *shared}
    free = math.prod(size for axis, size in enumerate(rhs) if axis not in bound)
    return 2 * math.prod(lhs) * free


def _conv_flops(eqn: core.JaxprEqn) -> int:
    """Count one sum over the kernel's window and a group's input channels per output scalar."""
    kernel = _shape(eqn.invars[1])
    output = _shape(eqn.outvars[0])
    out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    multiply_adds = math.prod(output) * math.prod(kernel) // out_features
    return 2 * multiply_adds // math.prod(eqn.params["lhs_dilation"])


def _attention_products(eqn: core.JaxprEqn, *, with_keys: int, with_values: int) -> int:
    """Count products of all pairs of tokens over the dimensions of keys and those of values.

    Layout 0 is [batch, length, heads, head_dim], layout 1 [batch, heads, length, head_dim].
    """
    query, key, value = map(_shape, eqn.invars[:3])
    length_axis = -3 if eqn.params.get("layout", 0) == 0 else -2
    dims = with_keys * key[-1] + with_values * value[-1]
    return 2 * math.prod(query[:-1]) * key[length_axis] * dims


# The backward pass computes the products of queries with keys again.
_attention_flops = functools.partial(_attention_products, with_keys=1, with_values=1)
_attention_gradient_flops = functools.partial(_attention_products, with_keys=3, with_values=2)


def _scaled_matmul_flops(eqn: core.JaxprEqn) -> int:
    """Count a scaled product of [batch, rows, contracted] and [batch, columns, contracted]."""
    lhs, rhs = map(_shape, eqn.invars[:2])
    return 2 * math.prod(lhs) * rhs[1]


_CONTRACTIONS: dict[str, Callable[[core.JaxprEqn], int]] = {
    "dot_general": _dot_flops,
    "ragged_dot_general": _ragged_dot_flops,
    "conv_general_dilated": _conv_flops,
    "scaled_matmul_wrapper": _scaled_matmul_flops,
    "dot_product_attention_fwd_wrapper": _attention_flops,
    "dot_product_attention_fp8_fwd_wrapper": _attention_flops,
    "dot_product_attention_bwd_wrapper": _attention_gradient_flops,
    "dot_product_attention_fp8_bwd_wrapper": _attention_gradient_flops,
    "tokamax_attention": _attention_flops,
    "tokamax_attention_gradients": _attention_gradient_flops,
}


# Fields of layers with values that recompute nothing in the backward pass and use no kernels,
# which cannot be traced without their device.
_PLAIN = {
    "remat": "none",
    "chunk_size": sys.maxsize,
    "backend": "xla",
}
# Those of experts. Groups and slots are of a whole batch, and balanced experts need no slots.
_PLAIN_EXPERTS = {"grouped_matmul": "blocks", "num_groups": None, "capacity_in_evaluation": False}


# Neither a mesh nor a pipeline can split one row, so the task is also not bound to a mesh.
@stages_in_sequence()
def model_flops_per_step(task_config: Config, state: TrainState, batch: Any, rows: int) -> float:
    """Return the model FLOPs of one global step, `rows` times those of one row.

    `state` has the shapes of the task's state without padding. With frozen weights, the products in
    the program of the gradient are counted.
    """
    one_row = jax.tree.map(lambda leaf: batch_spec(leaf, rows=1), batch)
    task = _simplify_layers(copy_config(task_config)).Instantiate()
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    chosen = task.train.learner.trained_weights

    def evaluate(state: TrainState, batch: Any) -> Any:
        return task.eval_step(state, batch, GLOBAL_BATCH, averaged=False)[0]

    if chosen.select(state.params) is state.params:
        return rows * training_flops(evaluate, state, one_row)

    def loss(trained: Any, state: TrainState, batch: Any) -> jax.Array:
        state = state.replace(params=chosen.merge(state.params, trained))
        return evaluate(state, batch)[task.loss_name].value

    gradient = jax.make_jaxpr(jax.grad(loss))(chosen.select(state.params), state, one_row)
    return rows * program_flops(gradient)


def _simplify_layers(task: Config) -> Config:
    unused = unused_templates(task)  # Setting a field of an unused template is an error.
    for config in walk_configs(task):
        if id(config) in unused:
            continue
        names = field_names(config)
        for field, value in (_PLAIN | (_PLAIN_EXPERTS if "num_experts" in names else {})).items():
            if field in names:
                setattr(config, field, value)
    return task


def temporary_bytes(stats: Any, *, platform: str) -> int:
    """Return the bytes of gradients, activations and workspace on a device at the peak of a step.

    The TPU compiler counts temporaries that do not exist at the same time, so they are its peak
    less all other memory. The peak includes arguments and results in host memory. Other compilers
    allocate temporaries for the whole step. `stats` is the value of `memory_analysis()`.
    """
    others = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    others += (
        stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
    )
    if platform != "tpu" or stats.peak_memory_in_bytes < others:  # Some runtimes report no peak.
        return int(stats.temp_size_in_bytes)
    return int(stats.peak_memory_in_bytes - others)
