"""The stages of a training data set as the inputs of a job, one after another in place of a round.

All stages share the data set, its feed and its position. Each has batches of its own shape, and so
its own compiled step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from layerkit.config import Config, assigned_fields, copy_config, walk_configs
from layerkit.config.checks import check_choice, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.mixing.staged_rows import StagedRows, StageRows, token_ranges
from layerkit_runner.config.stages import StageSteps
from layerkit_runner.data.host_inputs import (
    HostTopology,
    dataset_name,
    local_topology,
    make_input,
    plan_input,
    prefetched,
)
from layerkit_runner.data.train_inputs import TrainInput
from layerkit_runner.errors import as_usage_error
from layerkit_runner.partitioning import Partitioner


def stage_rows(
    config: Config,
    stages: Sequence[StageSteps],
    partitioner: Partitioner,
    host: HostTopology | None = None,
) -> list[StageRows]:
    """Return the batches of stages of a data set; a stage without rows has those of `config`.

    Raises:
      UsageError: A batch cannot be split evenly over the devices, or a mixture names a component
        that the data set lacks.
    """
    plan, rows = plan_input(config, partitioner, host or local_topology()), []
    components = getattr(config, "components", None) or ()
    for index, stage in enumerate(stages):
        owner, mixture = f"STAGES[{index}]", stage.stage.get("mixture")
        batch = stage.batch or plan.batch_size * plan.num_infeed_hosts
        partitioner.check_batch_size(batch, owner=owner, field="batch", value=batch)
        expected = "none, since the training data are no Mixture; see CORPORA"
        with as_usage_error():
            require(components or not mixture, owner, "mixture", mixture, expected)
            for name in mixture or ():
                check_choice(owner, components, mixture=name)
        rows.append(StageRows(stage.num_steps, batch, stage.length or 1, mixture))
    return rows


def stage_batch(batch: NestedMap, rows: StageRows, *, length: int) -> NestedMap:
    """Return the shapes of a stage's global batches from those of batches of another length.

    Raises:
      ConfigError: The length differs, and an array has no axis of positions.
    """

    def resize(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = leaf.shape[1:]
        if rows.length != length:
            expected = f"[rows, {length}, ...], for rows of another length"
            require(shape[:1] == (length,), None, "shape", list(leaf.shape), expected)
            shape = (rows.length, *shape[1:])
        return jax.ShapeDtypeStruct((rows.batch, *shape), leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(resize, batch)


class StageInput(TrainInput):
    """A stage of a data set, whose feed all stages share.

    Attributes:
      stage: Steps of the stage.
      rows: Batches of the stage.
      num_left_out: Number of tokens before the stage that no stage reads.
    """

    def __init__(
        self, shared: TrainInput, stage: StageSteps, rows: Sequence[StageRows], index: int
    ):
        """Share a data set; `rows` are the batches of all stages, and `index` that of the stage."""
        vars(self).update(vars(shared))
        self.steps, self.last_step, self.stage = stage.num_steps, stage.last_step, stage
        before, tokens = [range(0), *token_ranges(rows)][index : index + 2]
        self.rows, self.num_left_out = rows[index], tokens.start - before.stop
        self._shared, self._first_length = shared, rows[0].length

    @property
    def abstract_batch(self) -> NestedMap:
        """Shapes, dtypes and shardings of a global batch, from those of the first stage."""
        return stage_batch(self._shared.abstract_batch, self.rows, length=self._first_length)

    def __str__(self) -> str:
        """Return steps, shape, tokens and mixture of the stage."""
        stage, rows = self.stage, self.rows
        text = f"steps {stage.first_step} → {stage.last_step}: {rows.batch} rows"
        if stage.length is not None:
            tokens = rows.num_steps * rows.batch * rows.length
            text += f" of {rows.length} tokens, {tokens:,} tokens"
        if "mixture" in stage.stage:
            parts = (f"{name} {weight}" for name, weight in stage.stage["mixture"].items())
            text += f"; mixture {', '.join(parts)}"
        if "rate" in stage.stage:
            text += f"; rate {stage.stage['rate']}"
        if self.num_left_out:
            text += f"; {self.num_left_out:,} tokens before it are left out, to begin a whole row"
        return text

    def restore(self, state: dict[str, Any] | None, step: int) -> None:
        """Restore the position of the data set for the stage of a step; see `TrainInput`."""
        source: Any = self.dataset.source
        self.feed.set_state(source.state_at(step, state or self.feed.state()))


def staged_inputs(
    config: Config, stages: Sequence[StageSteps], partitioner: Partitioner
) -> list[StageInput]:
    """Open a training data set and return its stages."""
    rows = stage_rows(config, stages, partitioner)
    staged = staged_config(config, rows, row_length=stages[0].row_length or 1)
    staged.set(percore_batch_size=rows[0].batch / partitioner.mesh.size)
    shared = TrainInput(prefetched(make_input(staged, partitioner)), partitioner)
    return [StageInput(shared, stage, rows, index) for index, stage in enumerate(stages)]


def staged_config(config: Config, rows: Sequence[StageRows], *, row_length: int) -> Config:
    """Return the config of a training data set in stages, without a batch size."""
    source = copy_config(config)
    for inner in walk_configs(source):  # components of a mixture may repeat its rows per device
        if "percore_batch_size" in assigned_fields(inner):
            inner.set(percore_batch_size=None)
    staged: Config = StagedRows.HParams.config(
        name=dataset_name(config),
        is_training=True,
        source=source.set(batch_size=None),
        row_length=row_length,
        stages=rows,
    )
    return staged
