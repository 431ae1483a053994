"""PipelinedTransformer: a stack of Transformer layers whose depth is split over devices.

The stack has the fields and methods of `StackedTransformer`, so it takes its place in any model.
Its layers are cut into num_stages · circular_repeats equal runs of consecutive layers, each a
`StackedTransformerRepeated`; run i is what stage i % num_stages computes in round i // num_stages.
Weights lie stacked `[stage, layers, ...]` or, in a circular pipeline, `[repeats, stage, layers,
...]`: in the order of the depth, so that merging these axes makes them those of a repeated stack.

Training and scoring go through the pipeline. Cached decoding has one token per row, which makes no
microbatches worth the name, and runs the stages one after the other over the same weights.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from layerkit.checks import check_sizes
from layerkit.config import Config
from layerkit.layers.pipeline import Pipeline, check_remat_of_stages
from layerkit.layers.stacks import StackedTransformer, StackedTransformerRepeated


class PipelinedTransformer(StackedTransformer):
    """The same stack as a pipeline; see `layerkit.layers.pipeline`.

    A bias or a memory travels from stage to stage with its rows; one that all rows share
    (`relative_bias_tpl` on rows that are not packed) does not.

    Attributes:
      num_stages: How many stages; the mesh axes of the rule for `stage` must divide it.
      num_microbatches: How many pieces a batch is cut into. More make bubbles smaller.
      microbatch_size: Rows of one piece, instead of `num_microbatches`.
      circular_repeats: How often a microbatch goes around, through a shorter run of layers each.
      stream_inputs: Whether waiting microbatches are spread over the stages; see `Pipeline`.
      stage_remat: Name of the rematerialisation policy around one pass of one stage; see
        `Pipeline.remat`. Where it keeps anything, `remat`, that around each layer, has no say.

    Raises:
      ValueError: layers that cannot be cut into equal runs, or a pattern of layers that does not
        come out even in each.
    """

    num_stages: int = 1
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    circular_repeats: int = 1
    stream_inputs: bool = True
    stage_remat: str = "full"

    @nn.nowrap
    def _create_layers(self, sizes: dict[str, Any]) -> None:
        check_remat_of_stages(self.remat, field="remat", owner=self.path_name)
        stage: Config = StackedTransformerRepeated.HParams.config(
            num_layers=self._layers_per_run(), remat=self.remat, **sizes
        )
        if self.block_tpls is None:
            stage.layer_tpl = self.layer_tpl
        else:
            stage.block_tpls = self.block_tpls
        pipeline: Config = Pipeline.HParams.config(
            stage_tpl=stage,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            microbatch_size=self.microbatch_size,
            circular_repeats=self.circular_repeats,
            stream_inputs=self.stream_inputs,
            remat=self.stage_remat,
        )
        self.create_child("pipeline", pipeline)

    @nn.nowrap
    def locate_layer(self, layer: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        self._check_layer(layer)
        run, layer_of_run = divmod(layer, self._layers_per_run())
        period, block = divmod(layer_of_run, len(self.pattern))
        repeat, stage = divmod(run, self.num_stages)
        place = () if len(self.pattern) == 1 else (f"layers_{block}",)
        rounds = (repeat,) if self.circular_repeats > 1 else ()
        return ("pipeline", "stage", "repeat", "sub", *place), (*rounds, stage, period)

    @nn.nowrap
    def _run_layers(
        self, method: str, x: jax.Array, rates: jax.Array | None, shared: dict[str, Any]
    ) -> jax.Array:
        each = {}
        if rates is not None:
            each["droppath_rates"] = rates.reshape(-1, self._layers_per_run())
        if method == "__call__":
            x = self.cast(x)
            return self.pipeline(x, each=each, **shared)
        return self.pipeline.run(method, x, each=each, **shared)

    @nn.nowrap
    def _init_layer_caches(self, *args: Any, **kwargs: Any) -> None:
        self.pipeline.init_cache(*args, **kwargs)

    @nn.nowrap
    def _layers_per_run(self) -> int:
        """How many consecutive layers one stage runs in one round."""
        check_sizes(self, num_stages=self.num_stages, circular_repeats=self.circular_repeats)
        num_runs = self.num_stages * self.circular_repeats
        parts = f"num_stages={self.num_stages}"
        if self.circular_repeats > 1:
            parts += f" times circular_repeats={self.circular_repeats}"
        if self.num_layers % num_runs:
            near = max(1, round(self.num_layers / num_runs)) * num_runs
            raise ValueError(
                f"{self.path_name}: num_layers={self.num_layers} cannot be cut into {num_runs}"
                f" equal runs, {parts}; the nearest number that can is {near}"
            )
        layers, period = self.num_layers // num_runs, len(self.pattern)
        if layers % period:
            raise ValueError(
                f"{self.path_name}: block_tpls has {period} layers, which do not come out even in"
                f" runs of {layers} layers ({parts}); all stages run the same program, so each must"
                " begin with the first of the pattern"
            )
        return layers
