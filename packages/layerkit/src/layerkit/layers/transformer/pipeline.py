"""Pipeline: stages on separate devices that process a batch in microbatches.

All stages run the same layer with separate weights, stacked on an axis named `stage`. At each tick
all stages compute on different microbatches (one vmapped call, sharded over the stages), and the
results move to the next stage (one collective-permute). The ticks are a scan, so the program
contains the stage once (as in GSPMD; Xu et al., 2021, arXiv:2105.04663).
`layerkit.ops.pipeline_schedule` defines the schedule. With `circular_repeats`, the outputs of
the last stage enter the first stage again for the next round. Each round has its own weights, which
are stacked `[repeats, stage, ...]`. Stages without a microbatch (bubbles) compute on zeros, and
their outputs, gradients, auxiliary losses, summaries and state updates are discarded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from layerkit.base.base_layer import (
    AUX_LOSS,
    NON_TRAINABLE,
    OVERWRITE_WITH_GRADIENT,
    PARAMS,
    RANDOM,
    BaseLayer,
)
from layerkit.base.step_reports import (
    AUX_MEANS,
    REPORTS,
    STEP_TOTALS,
    apply_totals,
    combine_reports,
    is_report,
)
from layerkit.base.weights import unbox
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_sizes, require
from layerkit.errors import ConfigError
from layerkit.layers.transformer.pipeline_weights import GatheredWeights
from layerkit.layers.transformer.repeat import check_carry, check_not_shared, lay_out, lift_options
from layerkit.ops.indexing import as_float, gradient_where, take, where
from layerkit.ops.microbatches import (
    Arguments,
    advance_queue,
    make_queue,
    merge_microbatches,
    read_queue,
    split_microbatches,
)
from layerkit.ops.pipeline_schedule import (
    PipelineSchedule,
    Work,
    are_stages_in_sequence,
    inside_stages,
)
from layerkit.ops.remat import check_remat_policy, name_activation, remat_in_scan

_LOG = logging.getLogger(__name__)

# Collections of a stage that a pipeline needs to combine the reports of microbatches in another.
_COMBINED = {AUX_LOSS: AUX_MEANS, NON_TRAINABLE: STEP_TOTALS}


class Pipeline(BaseLayer):
    """A pipeline `stage(…stage(stage(x))…)` of stages that process different microbatches at once.

    The first argument is passed from stage to stage. Any other array whose first axis is the batch
    is split, and each microbatch gets its rows. All microbatches share scalars and arrays whose
    first axis has size 1. Arguments that are not arrays are passed to every stage unchanged.

    Auxiliary losses equal those of the whole batch; see `BaseLayer.add_aux_loss`. Scalar summaries
    are means over the microbatches. Both are stacked `[stage]` or `[repeats, stage]`. Histograms
    are summed, and images are those of the first microbatch. Moving statistics are updated once per
    microbatch, and biases of routers once. Random keys differ by stage, round and microbatch.

    In evaluation, a batch that cannot be split into the microbatches, such as a single row, runs
    through the stages in sequence.

    Attributes:
      stage_tpl: Layer of one stage; its result has the shape and dtype of its first argument.
      num_stages: Number of stages; a multiple of the mesh axes of the rule for `stage`.
      num_microbatches: Number of microbatches of a batch. With more microbatches, stages idle for a
        smaller fraction of the time (bubbles).
      microbatch_size: Number of rows of a microbatch, instead of `num_microbatches`.
      circular_repeats: Number of rounds of a microbatch through all stages. A value above 1
        requires at least as many microbatches as stages.
      stream_inputs: True to shard the microbatches that are outside of the stages over the stages.
        This requires a number of microbatches that is a multiple of the number of stages. False
        replicates these microbatches on every stage.
      gather_weights_once: True to gather weights over `fsdp` once, before the first tick. Those of
        all rounds stay gathered until the backward pass has ended. False gathers them at each tick,
        as it does those of experts in any case.
      remat: Name of the rematerialization policy of one pass of one stage; see
        `layerkit.ops.remat`. Activations are saved for every tick, so the default saves only the
        inputs of stages (as in Huang et al., 2019); `offload:stage_input` has them in host memory.

    Raises:
      ConfigError: A size is below one, the numbers of microbatches and stages are incompatible, or
        pipelines do not support the policy.
    """

    stage_tpl: Config[BaseLayer] = sub_config_field(None)
    num_stages: int = 1
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    circular_repeats: int = 1
    stream_inputs: bool = True
    gather_weights_once: bool = False
    remat: str = "full"

    def setup(self) -> None:
        """Check the fields and create the stage."""
        self._check_fields()
        self.keep_shared_weights_inside(self.stage_tpl)
        check_not_shared(self.path_name, "stage_tpl", self.stage_tpl)
        self.create_child("stage", self.stage_tpl)

    def fprop(
        self, x: jax.Array, *args: Any, per_copy: dict[str, Any] | None = None, **kwargs: Any
    ) -> jax.Array:
        """Apply all stages in all rounds.

        Args:
          x: `[batch, ...]`.
          *args: Arguments of every stage: arrays that are split like `x`, or shared.
          per_copy: Keyword arguments that differ between passes: pytrees of arrays
            `[repeats·stages, ...]`, ordered by round and then stage.
          **kwargs: Keyword arguments of every stage, split or shared like `args`.

        Returns:
          Array with the shape and dtype of `x`.

        Raises:
          ConfigError: A batch of training cannot be split into the microbatches, an array has a
            first axis other than the batch or 1, or a stage changes shapes.
        """
        schedule = self._schedule_of(x.shape[0])
        if schedule is None:
            return self.run("__call__", x, *args, per_copy=per_copy, **kwargs)
        arguments = Arguments(args, kwargs, batch=x.shape[0], owner=self.path_name)
        # x and the arguments with one entry per row move from stage to stage.
        count = schedule.num_microbatches
        microbatches = [split_microbatches(rows, count) for rows in (x, *arguments.by_row)]
        gathered = self._gathered_weights()
        run_stages = self._run_stages(arguments, gathered)
        read = {kind: self._stage_variables(kind) for kind in (PARAMS, OVERWRITE_WITH_GRADIENT)}
        read[PARAMS] = gathered.gather(read[PARAMS])
        constants = read, self._stacked(per_copy)
        shared = [
            jnp.broadcast_to(leaf, (self.num_stages, *leaf.shape)) for leaf in arguments.shared
        ]
        shared = self._lay_out(shared, "stage")

        def tick(carry: Any, now: jax.Array) -> tuple[Any, Any]:
            inside, waiting, between_rounds, state = carry
            entering, waiting = self._advance(waiting, inside, now)
            moved = [jnp.roll(rows, 1, axis=0) for rows in inside]
            if self.circular_repeats > 1:
                returning = moved
                if between_rounds is not None:
                    returning, between_rounds = self._advance(between_rounds, inside, now)
                is_first_round = now < schedule.num_microbatches
                entering = jax.tree.map(partial(where, is_first_round), entering, returning)
            is_first_stage = jnp.arange(self.num_stages) == 0
            inside = jax.tree.map(partial(where, is_first_stage), entering, moved)
            inside = self._lay_out(inside, "stage", "batch")
            work = schedule.work_at(now)
            inside, state, reports = run_stages(work, constants, shared, state, inside)
            inside = self._lay_out(inside, "stage", "batch")
            return (inside, waiting, between_rounds, state), reports

        start = self._start(microbatches, schedule)
        ticks = jnp.arange(schedule.num_ticks)
        (inside, waiting, _, state), reports = jax.lax.scan(tick, start, ticks)
        # Finished microbatches wait in the slots of those that have entered.
        _, (outputs,) = self._advance(waiting[:1], inside[:1], schedule.num_ticks)
        self._store(state, reports, schedule)
        outputs = merge_microbatches(read_queue(outputs, schedule.num_ticks + 1))
        return self._lay_out([outputs], "batch")[0]

    def run(
        self, method: str, x: Any, *args: Any, per_copy: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run a method of all stages in sequence on all rows; see `Repeat.run`."""

        def body(stage: Any, carry: Any, differing: dict[str, Any]) -> tuple[Any, None]:
            result = getattr(stage, method)(carry, *args, **differing, **kwargs)
            check_carry(carry, result, owner=self.path_name, runs="stage")
            return result, None

        for name, size in self._stacked_axes():
            body = nn.scan(body, length=size, in_axes=0, **lift_options(name))
        return body(self.stage, x, self._stacked(per_copy))[0]

    def init_cache(self, *args: Any, **kwargs: Any) -> None:
        """Create the decoding caches of all stages, stacked like their weights."""
        self._for_each(lambda stage: stage.init_cache(*args, **kwargs))

    def create_weights(self) -> None:
        """Create the weights of all stages."""
        self._for_each(lambda stage: stage.create_weights())

    # The stages.

    def _run_stages(self, arguments: Arguments, gathered: GatheredWeights) -> Callable[..., Any]:
        """Return a function that runs all stages for one tick.

        The function takes pytrees of arrays `[stage, ...]` and returns (inside, state, reports):

        - work: `Work` of the tick.
        - constants: Read-only variables, and arguments that differ between passes. With several
          rounds they are `[repeats, stage, ...]`.
        - shared: Arguments that all microbatches share.
        - state: Non-trainable variables. With several rounds they are `[repeats, stage, ...]`.
        - inside: Microbatches inside the stages.

        A stage is applied as a function of its variables and not by a lifted transform, because the
        tick decides which variables it reads and whether its updates count.
        """
        stage, _ = self.stage.unbind()
        mutable = [c for c in (NON_TRAINABLE, *REPORTS) if self.is_mutable_collection(c)]
        mutable += [other for name, other in _COMBINED.items() if name in mutable]
        key = self.next_prng_key() if self.has_rng(RANDOM) else None
        mesh_axes = self._stage_mesh_axes()

        def run_stage(work: Work, constants: Any, shared: Any, state: Any, inside: Any) -> Any:
            own_constants = self._select_round(jax.tree.map(as_float, constants), work)
            own_state = self._select_round(state, work)
            guard = partial(jax.tree.map, partial(gradient_where, work.is_real))
            if_real = partial(jax.tree.map, partial(where, work.is_real))
            own_constants, shared = guard((own_constants, shared))
            read, differing = _cast_like(constants, own_constants)
            read[PARAMS] = gathered.scatter_gradients(read[PARAMS])
            inside = if_real(inside, jax.tree.map(jnp.zeros_like, inside))
            name = partial(name_activation, name="stage_input")
            x, *rows = (name(a) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in inside)
            args, kwargs = arguments.replace(rows, shared)
            with inside_stages(mesh_axes):
                result, updates = stage.apply(
                    {**read, NON_TRAINABLE: own_state},
                    x,
                    *args,
                    rngs={} if key is None else {RANDOM: jax.random.fold_in(key, work.serial)},
                    mutable=mutable,
                    **differing,
                    **kwargs,
                )
            check_carry(x, result, owner=self.path_name, runs="stage")
            own_state = if_real(updates.pop(NON_TRAINABLE, own_state), own_state)
            return [result, *rows], self._update_round(state, own_state, work), updates

        stacked = len(self._stacked_axes()) - 1  # index of the stage axis in stacked variables
        return jax.vmap(
            remat_in_scan(run_stage, self.remat),
            in_axes=(0, stacked, 0, stacked, 0),
            out_axes=(0, stacked, 0),
            spmd_axis_name=mesh_axes,
        )

    def _gathered_weights(self) -> GatheredWeights:
        stage, _ = self.stage.unbind()
        stacked = tuple(name for name, _ in reversed(self._stacked_axes()))
        sharding = self.inherited("sharding") if self.gather_weights_once else None
        return GatheredWeights(stage, stacked=stacked, sharding=sharding, owner=self.path_name)

    def _select_round(self, variables: Any, work: Work) -> Any:
        """Select the current round from the variables `[repeats, ...]` of one stage."""
        if self.circular_repeats == 1:
            return variables
        return jax.tree.map(lambda stacked: take(stacked, work.round), variables)

    def _update_round(self, variables: Any, new: Any, work: Work) -> Any:
        if self.circular_repeats == 1:
            return new
        put = partial(jax.lax.dynamic_update_index_in_dim, index=work.round, axis=0)
        return jax.tree.map(put, variables, new)

    def _stage_variables(self, collection: str) -> Any:
        return unbox(self.stage.variables.get(collection, {}))

    def _store(self, state: Any, reports: Any, schedule: PipelineSchedule) -> None:
        """Write the state and the reports of the stages to their collections."""
        where_real = schedule.ticks_of_work(), np.arange(self.num_stages)
        is_circular = self.circular_repeats > 1
        reports = combine_reports(reports, where_real, is_circular=is_circular)
        if not self.is_mutable_collection(STEP_TOTALS):
            state = apply_totals(state, reports.pop(STEP_TOTALS, {}))
        if not self.is_mutable_collection(AUX_MEANS) and AUX_MEANS in reports:
            means = reports.pop(AUX_MEANS)
            reports[AUX_LOSS] = jax.tree.map(lambda x: x.value, means, is_leaf=is_report)
        if self.is_mutable_collection(NON_TRAINABLE) and not self.is_initializing():
            for name, value in state.items():
                self.stage.put_variable(NON_TRAINABLE, name, value)
        for collection, tree in reports.items():
            before = self.stage.variables.get(collection, {})
            for name, value in _append(before, tree).items():
                self.stage.put_variable(collection, name, value)

    # The variables, and functions that need no schedule.

    def _stacked_axes(self) -> list[tuple[str, int]]:
        """Return (name, size) of the leading axes of the stages' variables, innermost first."""
        rounds = [("layers", self.circular_repeats)] if self.circular_repeats > 1 else []
        return [("stage", self.num_stages), *rounds]

    def _stacked(self, per_copy: dict[str, Any] | None) -> dict[str, Any]:
        """Stack arrays `[repeats·stages, ...]` like the variables of the stages."""
        shape = tuple(size for _, size in reversed(self._stacked_axes()))
        return jax.tree.map(lambda leaf: leaf.reshape(shape + leaf.shape[1:]), per_copy or {})

    def _for_each(self, body: Callable[[Any], None]) -> None:
        for name, size in self._stacked_axes():
            # Flax annotates a single mesh axis; JAX supports several.
            spmd: Any = self._stage_mesh_axes() if name == "stage" else None
            body = nn.vmap(body, axis_size=size, spmd_axis_name=spmd, **lift_options(name))
        body(self.stage)

    # The microbatches.

    def _start(self, microbatches: list[jax.Array], schedule: PipelineSchedule) -> Any:
        """Return (inside, waiting, between rounds, state) before the first tick."""
        queue = partial(make_queue, num_holders=self._num_holders())
        waiting = [queue(rows) for rows in microbatches]
        inside = [jnp.zeros((self.num_stages, *m.shape[1:]), m.dtype) for m in microbatches]
        num_between = schedule.num_microbatches - self.num_stages
        between_rounds = None
        if self.circular_repeats > 1 and num_between > 0:
            between_rounds = [queue(jnp.zeros_like(m[:num_between])) for m in microbatches]
            between_rounds = self._lay_out_queue(between_rounds)
        return (
            self._lay_out(inside, "stage", "batch"),
            self._lay_out_queue(waiting),
            between_rounds,
            self._stage_variables(NON_TRAINABLE),
        )

    def _num_holders(self) -> int:
        return self.num_stages if self.stream_inputs else 1

    def _advance(self, queues: Any, inside: Any, now: Any) -> tuple[Any, Any]:
        pairs = zip(queues, inside, strict=True)
        results = [advance_queue(queue, rows, now) for queue, rows in pairs]
        leaving, queues = zip(*results, strict=True)
        return list(leaving), self._lay_out_queue(list(queues))

    def _lay_out_queue(self, queues: list[jax.Array]) -> list[jax.Array]:
        return self._lay_out(queues, "stage" if self.stream_inputs else None, None, "batch")

    def _lay_out(self, arrays: list[jax.Array], *axes: str | None) -> list[jax.Array]:
        """Constrain the leading axes of all arrays, and the last axis of the first one, the carry.

        The layers constrain the other axes.
        """
        return [lay_out(self, x, *axes, is_carry=i == 0) for i, x in enumerate(arrays)]

    def _stage_mesh_axes(self) -> tuple[str, ...] | None:
        """Return the mesh axes that shard the stages, for the constraints of inner layers."""
        sharding = self.inherited("sharding")
        return None if sharding is None else sharding.split_axes("stage") or None

    # Checks.

    def _check_fields(self) -> None:
        check_sizes(self, num_stages=self.num_stages, circular_repeats=self.circular_repeats)
        check_remat_policy(self.remat, owner=self.path_name, has_stages=True)
        # XLA (JAX 0.10) does not compile a loop over layers in the loop of ticks otherwise.
        compiles = re.search(r"offload(?!:stage_input(;|$))", self.remat) is None
        expected = "a policy that has at most the activation stage_input in host memory"
        require(compiles, self, "remat", self.remat, expected)
        self._check_layout()
        count, size = self.num_microbatches, self.microbatch_size
        expected = f"a value of this field or of microbatch_size={size}, not both"
        require((count is None) != (size is None), self, "num_microbatches", count, expected)
        check_sizes(self, microbatch_size=size, num_microbatches=count)
        if count is not None:
            self._schedule(count)

    def _check_layout(self) -> None:
        """Raise for layouts for which XLA's partitioner (JAX 0.10) computes wrong gradients."""
        sharding = self.inherited("sharding")
        if sharding is None or not sharding.is_split("act_embed") or sharding.is_split("stage"):
            return
        raise ConfigError(
            "XLA computes wrong gradients of a pipeline on such a mesh",
            owner=self.path_name,
            field="mesh axes of act_embed",
            value=sharding.rules.mesh_axes("act_embed"),
            expected="an axis act_embed that is not split, or a mesh with stages",
            hint="Use ShardingRules.replace(act_embed=None), or a stack without a pipeline.",
        )

    def _schedule_of(self, batch: int) -> PipelineSchedule | None:
        """Return the schedule of a batch, or None if its stages run in sequence."""
        if are_stages_in_sequence():
            return None
        try:
            return self._schedule(self._count_microbatches(batch))
        except ConfigError as error:
            if self.is_training:
                raise
            if self._stage_mesh_axes() is not None:
                _LOG.warning("stages run one after another: %s", error)
            return None

    def _count_microbatches(self, batch: int) -> int:
        count, size = self.num_microbatches, self.microbatch_size
        field, value = ("microbatch_size", size) if count is None else ("num_microbatches", count)
        assert value is not None
        expected = f"a divisor of the batch of {batch} rows"
        require(batch % value == 0, self, field, value, expected)
        num_microbatches = value if count is not None else batch // value
        sharding = self.inherited("sharding")
        shards = 1 if sharding is None else sharding.num_shards("batch")
        expected = (
            f"microbatches of a multiple of {shards} rows, the shards of the batch of {batch}"
        )
        require(batch // num_microbatches % shards == 0, self, field, value, expected)
        return num_microbatches

    def _schedule(self, num_microbatches: int) -> PipelineSchedule:
        """Return the schedule, or raise if there is none."""
        stages, repeats = self.num_stages, self.circular_repeats
        # Otherwise the first microbatch returns before the last one has entered.
        expected = f"at least num_stages={stages} with circular_repeats={repeats}"
        fits = repeats == 1 or num_microbatches >= stages
        require(fits, self, "num_microbatches", num_microbatches, expected)
        expected = f"a multiple of num_stages={stages} with stream_inputs=True"
        fits = not self.stream_inputs or num_microbatches % stages == 0
        require(fits, self, "num_microbatches", num_microbatches, expected)
        return PipelineSchedule(stages, num_microbatches, repeats)


def _cast_like(like: Any, tree: Any) -> Any:
    return jax.tree.map(lambda x, y: jax.lax.convert_element_type(y, x.dtype), like, tree)


def _append(before: Any, new: Any) -> Any:
    """Append the reports of layers to earlier reports. Both are trees with tuples as leaves."""
    if isinstance(new, tuple):
        return (*before, *new) if before else new
    return {name: _append((before or {}).get(name), value) for name, value in new.items()}
