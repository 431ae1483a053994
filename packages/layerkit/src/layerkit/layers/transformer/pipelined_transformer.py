"""PipelinedTransformer: a stack of Transformer layers whose depth is split over devices.

The stack has the fields and methods of `StackedTransformer` and can replace it in any model. Its
layers form num_stages · circular_repeats equal runs of consecutive layers, each a
`StackedTransformerRepeated`; stage i % num_stages computes run i in round i // num_stages. Weights
are stacked `[stage, layers, ...]` or, in a circular pipeline, `[repeats, stage, layers, ...]`, in
the order of the depth, so merging these axes gives the weights of a repeated stack.

Training and scoring use the pipeline. Cached decoding, with one token per row, runs the stages in
sequence, and so does scoring of a batch that cannot be split into the microbatches.
"""

from __future__ import annotations

from typing import Any

import jax

from layerkit.config import Config
from layerkit.config.checks import check_divisible, check_sizes, require
from layerkit.layers.transformer.pipeline import Pipeline
from layerkit.layers.transformer.stacks import StackedTransformer, StackedTransformerRepeated


class PipelinedTransformer(StackedTransformer):
    """A stack of Transformer layers, split into the stages of a pipeline.

    The fields of the pipeline are those of `Pipeline`.

    A bias or a memory moves from stage to stage with its rows. One that all rows share
    (`relative_bias_tpl` with rows that are not packed) does not move.

    Attributes:
      stage_remat: Name of the rematerialization policy of one pass of one stage; see
        `Pipeline.remat`. Where it saves activations, `remat`, the policy of each layer, has no
        effect.

    Raises:
      ConfigError: The layers cannot be divided into equal runs, or the pattern of layers does not
        divide a run.
    """

    num_stages: int = 1
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    circular_repeats: int = 1
    stream_inputs: bool = True
    gather_weights_once: bool = False
    stage_remat: str = "full"

    def _create_layers(self, sizes: dict[str, Any]) -> None:
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
            gather_weights_once=self.gather_weights_once,
            remat=self.stage_remat,
        )
        self.create_child("pipeline", pipeline)

    def _locate_repeated(self, layer: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        run, layer_of_run = divmod(layer, self._layers_per_run())
        period, block = divmod(layer_of_run, len(self.pattern))
        repeat, stage = divmod(run, self.num_stages)
        place = () if len(self.pattern) == 1 else (f"layers_{block}",)
        rounds = (repeat,) if self.circular_repeats > 1 else ()
        return ("pipeline", "stage", "repeat", "sub", *place), (*rounds, stage, period)

    def _run_layers(
        self, method: str, x: jax.Array, differing: dict[str, jax.Array], shared: dict[str, Any]
    ) -> jax.Array:
        layer_inputs, layers = differing.get("layer_input"), self._layers_per_run()
        expected = "a stack without a pipeline, which does not split the inputs of layers"
        require(layer_inputs is None, self, "layer_inputs", "an array", expected)
        per_copy = {f"{name}s": values.reshape(-1, layers) for name, values in differing.items()}
        if method == "__call__":
            x = self.cast(x)
            return self.pipeline(x, per_copy=per_copy, **shared)
        return self.pipeline.run(method, x, per_copy=per_copy, **shared)

    def _init_layer_caches(self, *args: Any, **kwargs: Any) -> None:
        self.pipeline.init_cache(*args, **kwargs)

    def _layers_per_run(self) -> int:
        """Return the number of consecutive layers that one stage runs in one round."""
        check_sizes(self, num_stages=self.num_stages, circular_repeats=self.circular_repeats)
        num_runs = self.num_stages * self.circular_repeats
        by = "num_stages" if self.circular_repeats == 1 else "num_stages * circular_repeats"
        check_divisible(self, by=(by, num_runs), num_layers=self._num_repeated)
        layers, period = self._num_repeated // num_runs, len(self.pattern)
        # All stages run the same program, so each run starts with the first template.
        expected = f"a divisor of {layers}, the layers of a run"
        require(layers % period == 0, self, "length of block_tpls", period, expected)
        return layers
