"""Pipeline: stages on devices of their own, through which a batch passes in microbatches.

Every stage runs the same layer with weights of its own, stacked on an axis named `stage`. At each
tick all stages compute at once (one vmapped call, split over the stages' devices), each on another
microbatch; then what they computed moves on to the next stage (one collective-permute). The ticks
are a scan, so the program holds the stage once. `layerkit.layers.pipeline_schedule` says who works
when; pipelines as a sharded program are from GSPMD (Xu et al., 2021, arXiv:2105.04663).

With `circular_repeats`, what leaves the last stage enters the first one again, where it meets the
weights of the next round: weights are then `[repeats, stage, ...]`.

While the pipeline fills and empties, some stages compute on nothing. Nothing of these bubbles is
used: neither values nor gradients, auxiliary losses, summaries or updates of state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from layerkit.base_layer import (
    AUX_LOSS,
    NON_TRAINABLE,
    OVERWRITE_WITH_GRADIENT,
    PARAMS,
    RANDOM,
    SUMMARIES,
    SUMMARY_ARRAYS,
    BaseLayer,
)
from layerkit.checks import check_sizes
from layerkit.config import is_config, sub_config_field
from layerkit.layers.microbatches import Arguments, cut, dequeue, enqueue, join, pass_on
from layerkit.layers.pipeline_schedule import PipelineSchedule, Work
from layerkit.layers.remat import check_remat_policy, remat_in_scan
from layerkit.layers.repeat import check_handed_on, stacked_on
from layerkit.layers.selections import as_float, gradient_where, take, where
from layerkit.summaries import Summary
from layerkit.weights import unbox

_REPORTS = (AUX_LOSS, SUMMARIES, SUMMARY_ARRAYS)


class Pipeline(BaseLayer):
    """`stage(stage(…stage(x, …), …), …)`, the stages side by side on different microbatches.

    The first argument is handed from stage to stage. Further arrays either have the batch as their
    first axis, and then travel with their rows, or one of size 1 or none, and then all rows share
    them. What is not an array goes to every stage as it is.

    Auxiliary losses and scalar summaries are means over the microbatches, stacked `[stage]`, or
    `[repeats, stage]` where there are repeats: those of the whole batch, where they are means over
    its rows. Histograms are added up, and images are those of the first microbatch. Non-trainable
    state is updated once per microbatch. Random keys differ by stage, round and microbatch.

    Attributes:
      stage_tpl: The layer that one stage runs; its result has the shape and dtype of its first
        argument.
      num_stages: How many stages; the mesh axes of the rule for `stage` must divide it.
      num_microbatches: How many pieces a batch is cut into. More make bubbles smaller.
      microbatch_size: Rows of one piece, instead of `num_microbatches`.
      circular_repeats: How often a microbatch goes around; above 1, there must be at least as many
        microbatches as stages.
      stream_inputs: The microbatches that wait (to enter, to go around again, or for the others to
        leave) are spread over the stages and passed on one at a time, which takes a number of
        microbatches that the number of stages divides. If not, each stage holds them all.
      remat: Name of the rematerialisation policy around one pass of one stage; see
        `layerkit.layers.remat`. What is kept is kept for every tick, so the default keeps only what
        stages hand on (as Huang et al., 2019, do).

    Raises:
      ValueError: sizes below one, microbatches and stages that do not fit together, or a policy
        that cannot do what its name says.
    """

    stage_tpl: Any = sub_config_field(None)
    num_stages: int = 1
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    circular_repeats: int = 1
    stream_inputs: bool = True
    remat: str = "full"

    def setup(self) -> None:
        self._check_fields()
        self.keep_shared_weights_inside(self.stage_tpl)
        stage_tpl = self.stage_tpl
        if is_config(stage_tpl) and stage_tpl.shared_weight_id is not None:
            raise ValueError(
                f"{self.path_name}: every stage has weights of its own;"
                f" unset shared_weight_id={stage_tpl.shared_weight_id!r} of stage_tpl"
            )
        self.create_child("stage", stage_tpl)

    def fprop(
        self, x: jax.Array, *args: Any, each: dict[str, Any] | None = None, **kwargs: Any
    ) -> jax.Array:
        """`x` through all stages in all rounds.

        Args:
          x: `[batch, ...]`.
          *args: Given to every stage: arrays cut into microbatches as `x` is, or shared by them.
          each: Keyword arguments that differ from pass to pass: pytrees of arrays `[repeats·stages,
            ...]`, round after round.
          **kwargs: Like `args`.

        Returns:
          The shape and dtype of `x`.

        Raises:
          ValueError: a batch that cannot be cut into the microbatches, an argument that neither has
            the batch as its first axis nor is shared by all rows, or a stage that changes shapes.
        """
        schedule = self._schedule(self._count_microbatches(x.shape[0]))
        arguments = Arguments(args, kwargs, batch=x.shape[0], owner=self.path_name)
        # What travels from stage to stage: x and the rows of the arguments that go with it.
        microbatches = [cut(rows, schedule.num_microbatches) for rows in (x, *arguments.by_row)]
        run_stages = self._run_stages(arguments)
        read = {kind: self._stage_variables(kind) for kind in (PARAMS, OVERWRITE_WITH_GRADIENT)}
        constants = read, self._stacked(each)
        shared = [
            jnp.broadcast_to(leaf, (self.num_stages, *leaf.shape)) for leaf in arguments.shared
        ]
        shared = self._lay_out(shared, "stage")

        def tick(carry: Any, now: jax.Array) -> tuple[Any, Any]:
            inside, waiting, between_rounds, state = carry
            entering, waiting = self._pass_on(waiting, inside, now)
            moved = [jnp.roll(rows, 1, axis=0) for rows in inside]
            if self.circular_repeats > 1:
                returning = moved
                if between_rounds is not None:
                    returning, between_rounds = self._pass_on(between_rounds, inside, now)
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
        # Those that have left the last stage wait in the places of those that had entered.
        _, (outputs,) = self._pass_on(waiting[:1], inside[:1], schedule.num_ticks)
        self._keep(state, reports, schedule)
        outputs = join(dequeue(outputs, schedule.num_ticks + 1))
        return self._lay_out([outputs], "batch")[0]

    def run(
        self, method: str, x: Any, *args: Any, each: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Runs `method` of all stages in turn on the whole of `x`, for decoding; see `Repeat.run`.

        Args:
          method: Of the stages.
          x: The first argument, a pytree of arrays `[batch, ...]`.
          *args: Given to every stage as they are.
          each: As for `fprop`.
          **kwargs: Given to every stage as they are.

        Returns:
          The last result, with the structure, shapes and dtypes of `x`.
        """

        def body(stage: Any, carry: Any, own: dict[str, Any]) -> tuple[Any, None]:
            result = getattr(stage, method)(carry, *args, **own, **kwargs)
            check_handed_on(carry, result, owner=self.path_name, runs="stage")
            return result, None

        for name, size in self._stacked_axes():
            body = nn.scan(body, length=size, in_axes=0, **stacked_on(name))
        return body(self.stage, x, self._stacked(each))[0]

    def init_cache(self, *args: Any, **kwargs: Any) -> None:
        """Creates the decoding caches of all stages, stacked like their weights."""
        self._for_each(lambda stage: stage.init_cache(*args, **kwargs))

    def create_weights(self) -> None:
        self._for_each(lambda stage: stage.create_weights())

    # The stages.

    @nn.nowrap
    def _run_stages(self, arguments: Arguments) -> Callable[..., Any]:
        """A function of all stages: (…, state, inside) → (state and inside after it, reports).

        It takes the work; the constants, which are the variables that stages only read and the
        arguments that differ from pass to pass, stacked alike; and the shared arguments, state, and
        inside, all `[stage, ...]` (state with the rounds before the stages, if there are several).

        A stage is applied as a function of its variables, rather than by a lifted transform, since
        it depends on the tick which of them it reads, and whether anything it writes counts.
        """
        stage, _ = self.stage.unbind()
        mutable = [c for c in (NON_TRAINABLE, *_REPORTS) if self.is_mutable_collection(c)]
        key = self.next_prng_key() if self.has_rng(RANDOM) else None

        def run_stage(work: Work, constants: Any, shared: Any, state: Any, inside: Any) -> Any:
            own_constants = self._of_round(jax.tree.map(as_float, constants), work)
            own_state = self._of_round(state, work)
            guard = partial(jax.tree.map, partial(gradient_where, work.is_real))
            if_real = partial(jax.tree.map, partial(where, work.is_real))
            own_constants, shared = guard((own_constants, shared))
            read, own = _with_dtypes_of(constants, own_constants)
            x, *rows = if_real(inside, jax.tree.map(jnp.zeros_like, inside))
            args, kwargs = arguments.replaced(rows, shared)
            result, updates = stage.apply(
                {**read, NON_TRAINABLE: own_state},
                x,
                *args,
                rngs={} if key is None else {RANDOM: jax.random.fold_in(key, work.serial)},
                mutable=mutable,
                **own,
                **kwargs,
            )
            check_handed_on(x, result, owner=self.path_name, runs="stage")
            own_state = if_real(updates.pop(NON_TRAINABLE, own_state), own_state)
            return [result, *rows], self._with_round(state, own_state, work), updates

        stacked = len(self._stacked_axes()) - 1  # the axis of the stages in their variables
        return jax.vmap(
            remat_in_scan(run_stage, self.remat),
            in_axes=(0, stacked, 0, stacked, 0),
            out_axes=(0, stacked, 0),
            spmd_axis_name=self._stage_mesh_axes(),
        )

    @nn.nowrap
    def _of_round(self, variables: Any, work: Work) -> Any:
        """The variables `[repeats, ...]` of one stage → those of the round it is in, `[...]`."""
        if self.circular_repeats == 1:
            return variables
        return jax.tree.map(lambda stacked: take(stacked, work.round), variables)

    @nn.nowrap
    def _with_round(self, variables: Any, new: Any, work: Work) -> Any:
        if self.circular_repeats == 1:
            return new
        put = partial(jax.lax.dynamic_update_index_in_dim, index=work.round, axis=0)
        return jax.tree.map(put, variables, new)

    @nn.nowrap
    def _stage_variables(self, collection: str) -> Any:
        return unbox(self.stage.variables.get(collection, {}))

    @nn.nowrap
    def _keep(self, state: Any, reports: Any, schedule: PipelineSchedule) -> None:
        """Writes what the stages updated and reported to their collections."""
        if self.is_mutable_collection(NON_TRAINABLE) and not self.is_initializing():
            for name, value in state.items():
                self.stage.put_variable(NON_TRAINABLE, name, value)
        ticks = schedule.ticks_of_work()
        stages = np.arange(self.num_stages)

        def mean(values: jax.Array) -> jax.Array:
            """`[tick, stage, ...]` → `[repeats, stage, ...]`, of the ticks that are no bubbles."""
            means = jnp.mean(values[ticks, stages], axis=1)
            return means if self.circular_repeats > 1 else means[0]

        def together(summary: Summary) -> Summary:
            values = jax.tree.map(lambda leaf: leaf[ticks, stages], summary).merged(axis=1)
            if self.circular_repeats > 1:
                return values
            return jax.tree.map(lambda leaf: leaf[0], values)

        for collection, tree in reports.items():
            if collection == SUMMARY_ARRAYS:
                tree = jax.tree.map(together, tree, is_leaf=lambda x: isinstance(x, Summary))
            else:
                tree = jax.tree.map(mean, tree)
            before = self.stage.variables.get(collection, {})
            for name, value in _appended(before, tree).items():
                self.stage.put_variable(collection, name, value)

    # The variables, and what runs over them without a schedule.

    @nn.nowrap
    def _stacked_axes(self) -> list[tuple[str, int]]:
        """The leading axes of the stages' variables, the innermost first."""
        rounds = [("layers", self.circular_repeats)] if self.circular_repeats > 1 else []
        return [("stage", self.num_stages), *rounds]

    @nn.nowrap
    def _stacked(self, each: dict[str, Any] | None) -> dict[str, Any]:
        """Arrays `[repeats·stages, ...]`, stacked as the variables of the stages are."""
        shape = tuple(size for _, size in reversed(self._stacked_axes()))
        return jax.tree.map(lambda leaf: leaf.reshape(shape + leaf.shape[1:]), each or {})

    @nn.nowrap
    def _for_each(self, body: Callable[[Any], None]) -> None:
        for name, size in self._stacked_axes():
            # Flax's annotation knows only one mesh axis; JAX takes several.
            spmd: Any = self._stage_mesh_axes() if name == "stage" else None
            body = nn.vmap(body, axis_size=size, spmd_axis_name=spmd, **stacked_on(name))
        body(self.stage)

    # The microbatches.

    @nn.nowrap
    def _start(self, microbatches: list[jax.Array], schedule: PipelineSchedule) -> Any:
        """(inside, waiting, between rounds, state) before the first tick."""
        queue = partial(enqueue, num_holders=self._num_holders())
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

    @nn.nowrap
    def _num_holders(self) -> int:
        return self.num_stages if self.stream_inputs else 1

    @nn.nowrap
    def _pass_on(self, queues: Any, inside: Any, now: Any) -> tuple[Any, Any]:
        results = [pass_on(queue, rows, now) for queue, rows in zip(queues, inside, strict=True)]
        leaving, queues = zip(*results, strict=True)
        return list(leaving), self._lay_out_queue(list(queues))

    @nn.nowrap
    def _lay_out_queue(self, queues: list[jax.Array]) -> list[jax.Array]:
        return self._lay_out(queues, "stage" if self.stream_inputs else None, None, "batch")

    @nn.nowrap
    def _lay_out(self, arrays: list[jax.Array], *axes: str | None) -> list[jax.Array]:
        """Constrains the leading axes of arrays, and the features of the first, what is handed on.

        The layers know the other axes; see `Repeat._lay_out` for why they do not decide that one.
        """
        sharding = self.inherited("sharding")
        if sharding is None or sharding.mesh is None:
            return arrays

        def constrain(x: jax.Array, *, is_handed_on: bool) -> jax.Array:
            entries = [PartitionSpec.UNCONSTRAINED] * x.ndim
            leading = sharding.spec(axes, shape=x.shape[: len(axes)], owner=self.path_name)
            entries[: len(axes)] = leading
            if is_handed_on and x.ndim > len(axes):
                features = sharding.spec(("act_embed",), shape=x.shape[-1:], owner=self.path_name)
                entries[-1] = features[0]
            place = NamedSharding(sharding.mesh, PartitionSpec(*entries))
            return jax.lax.with_sharding_constraint(x, place)

        return [constrain(x, is_handed_on=index == 0) for index, x in enumerate(arrays)]

    @nn.nowrap
    def _stage_mesh_axes(self) -> tuple[str, ...] | None:
        """The mesh axes over which the stages are split, for what the layers inside constrain."""
        sharding = self.inherited("sharding")
        if sharding is None or not sharding.is_split("stage"):
            return None
        axes = sharding.rules.mesh_axes("stage")
        return tuple(axis for axis in axes if sharding.mesh.shape.get(axis, 1) > 1)

    # Checks.

    @nn.nowrap
    def _check_fields(self) -> None:
        check_sizes(self, num_stages=self.num_stages, circular_repeats=self.circular_repeats)
        self._check_remat()
        self._check_layout()
        count, size = self.num_microbatches, self.microbatch_size
        if (count is None) == (size is None):
            raise ValueError(
                f"{self.path_name}: num_microbatches={count} and microbatch_size={size}; set one"
                " of them, and the other follows from the batch"
            )
        if size is not None:
            check_sizes(self, microbatch_size=size)
        if count is not None:
            check_sizes(self, num_microbatches=count)
            self._schedule(count)

    @nn.nowrap
    def _check_remat(self) -> None:
        check_remat_policy(self.remat, owner=self.path_name, sharding=self.inherited("sharding"))
        if self.remat == "none" and self.circular_repeats > 1:
            raise ValueError(
                f"{self.path_name}: remat='none' with circular_repeats={self.circular_repeats}"
                " would keep, for every tick, a copy of the weights that its round asks for; use"
                " 'dots', 'projections', 'residual' or 'full'"
            )
        check_remat_of_stages(self.remat, field="remat", owner=self.path_name)

    @nn.nowrap
    def _check_layout(self) -> None:
        """Refuses what XLA's partitioner (that of JAX 0.10) gives wrong gradients for."""
        sharding = self.inherited("sharding")
        if sharding is None or not sharding.is_split("act_embed") or sharding.is_split("stage"):
            return
        raise ValueError(
            f"{self.path_name}: the mesh splits act_embed over"
            f" {sharding.rules.mesh_axes('act_embed')} but no stages, and XLA computes wrong"
            " gradients of such a pipeline; use ShardingRules.replace(act_embed=None), a mesh with"
            " stages, or a stack that is no pipeline"
        )

    @nn.nowrap
    def _count_microbatches(self, batch: int) -> int:
        count, size = self.num_microbatches, self.microbatch_size
        field, value = ("microbatch_size", size) if count is None else ("num_microbatches", count)
        assert value is not None
        if batch % value:
            raise ValueError(
                f"{self.path_name}: {field}={value} does not divide the batch of {batch} rows;"
                f" the next batch that it divides has {batch + -batch % value}"
            )
        return value if count is not None else batch // value

    @nn.nowrap
    def _schedule(self, num_microbatches: int) -> PipelineSchedule:
        """The schedule, after refusing what has none."""
        stages, batch_says = self.num_stages, ""
        if self.num_microbatches is None:
            batch_says = f" (microbatch_size={self.microbatch_size})"
        if self.circular_repeats > 1 and num_microbatches < stages:
            raise ValueError(
                f"{self.path_name}: num_microbatches={num_microbatches}{batch_says} must be at"
                f" least num_stages={stages} where circular_repeats={self.circular_repeats}: the"
                " first microbatch comes around while the last one has not entered yet"
            )
        if self.stream_inputs and num_microbatches % stages:
            near = num_microbatches + -num_microbatches % stages
            raise ValueError(
                f"{self.path_name}: num_microbatches={num_microbatches}{batch_says} cannot be"
                f" spread over num_stages={stages}; use {near}, or stream_inputs=False"
            )
        return PipelineSchedule(stages, num_microbatches, self.circular_repeats)


def check_remat_of_stages(policy: str, *, field: str, owner: str) -> None:
    """Raises ValueError for a rematerialisation policy that would keep nothing within stages."""
    if policy == "dots_no_batch":
        raise ValueError(
            f"{owner}: {field}={policy!r} would keep nothing, since the products of all stages are"
            " one product with a batch axis; use 'projections' or 'dots'"
        )


def _with_dtypes_of(like: Any, tree: Any) -> Any:
    return jax.tree.map(lambda x, y: jax.lax.convert_element_type(y, x.dtype), like, tree)


def _appended(before: Any, new: Any) -> Any:
    """Two trees of what layers reported, whose leaves are tuples of values."""
    if isinstance(new, tuple):
        return (*before, *new) if before else new
    return {name: _appended((before or {}).get(name), value) for name, value in new.items()}
