"""Record what TimesFM's decoder computes, for the test of the experiment `time_series.timesfm`.

It runs on Python 3.10 with TimesFM's own package for Pax, and imports nothing of this project:

    pip install paxml==1.4.0 jaxlib==0.4.26 'scipy<1.13' einshape
    pip install --no-deps timesfm==1.2.9
    python scripts/timesfm_reference.py packages/experiments/tests/time_series/timesfm.npz

The archive holds a small decoder's inputs, weights under Praxis' names (`params/…`), outputs in
evaluation and in training mode, a forecast of two steps, and Pax's fine-tuning loss. `released`
lists name and shape of every weight of the released checkpoint of 200M weights.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from praxis import base_layer, pax_fiddle, py_utils
from praxis.layers import normalizations, transformers


def load_decoder():
    """Return the module of the decoder alone; the package imports much that it does not need."""
    (folder,) = importlib.util.find_spec("timesfm").submodule_search_locations
    spec = importlib.util.spec_from_file_location(
        "patched_decoder", Path(folder) / "patched_decoder.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


patched_decoder = load_decoder()
SMALL = {"num_heads": 2, "num_layers": 2, "model_dims": 8, "patch_len": 4, "horizon_len": 6}
# https://huggingface.co/google/timesfm-1.0-200m
RELEASED = {"num_heads": 16, "num_layers": 20, "model_dims": 1280, "patch_len": 32}
RELEASED["horizon_len"] = 128
QUANTILES = [0.1, 0.5, 0.9]


def decoder_config(cls=patched_decoder.PatchedTimeSeriesDecoder, *, num_heads, num_layers, **sizes):
    """Return the config of the decoder as `timesfm_jax.TimesFmJax` makes it."""
    layer = pax_fiddle.Config(
        transformers.Transformer, ln_tpl=pax_fiddle.Config(normalizations.RmsNorm)
    )
    stack = pax_fiddle.Config(
        transformers.StackedTransformer,
        num_heads=num_heads,
        num_layers=num_layers,
        transformer_layer_params_tpl=layer,
    )
    return pax_fiddle.Config(
        cls,
        name="decoder",
        hidden_dims=sizes["model_dims"],
        residual_block_tpl=pax_fiddle.Config(patched_decoder.ResidualBlock),
        use_freq=True,
        stacked_transformer_params_tpl=stack,
        **sizes,
    )


def batch_of(rows, length):
    """Return zeros as inputs of the decoder."""
    return py_utils.NestedMap(
        input_ts=jnp.zeros((rows, length)),
        input_padding=jnp.zeros((rows, length)),
        freq=jnp.zeros((rows, 1), jnp.int32),
    )


def released_weights():
    """Return one line, `name shape`, for each weight of the released checkpoint."""
    decoder = base_layer.instantiate(decoder_config(**RELEASED))
    declared = decoder.abstract_init_with_metadata(batch_of(1, 64), do_eval=True)["params"]
    result = py_utils.NestedMap.FromNestedDict(declared).FlattenItems()
    return [
        f"{name.replace('.', '/')} {'x'.join(map(str, weight.shape))}" for name, weight in result
    ]


def main(path):
    """Write the archive."""
    random = np.random.default_rng(7)
    small = decoder_config(quantiles=QUANTILES, **SMALL)
    decoder = base_layer.instantiate(small)
    batch = batch_of(3, 16)
    batch.input_ts = jnp.asarray(random.normal(3.0, 2.0, (3, 16)), jnp.float32)
    # A row whose first patch is padding, and one that begins within a patch.
    paddings = np.zeros((3, 16), np.float32)
    paddings[1, :4], paddings[2, :6] = 1.0, 1.0
    batch.input_padding, batch.freq = jnp.asarray(paddings), jnp.array([[0], [1], [2]])

    def context(*, do_eval):
        return base_layer.JaxContext.new_context(
            hparams=base_layer.JaxContext.HParams(do_eval=do_eval)
        )

    with context(do_eval=True):
        variables = decoder.init(jax.random.PRNGKey(0), batch)
        weights = jax.tree_util.tree_map(
            lambda w: np.asarray(random.normal(0.0, 0.4, w.shape), np.float32),
            variables["params"],
        )
        evaluated = decoder.apply({"params": weights}, batch).output_ts
        forecast = decoder.apply(
            {"params": weights},
            py_utils.NestedMap(
                input_ts=batch.input_ts,
                input_padding=jnp.pad(batch.input_padding, ((0, 0), (0, 10))),
                freq=batch.freq,
            ),
            horizon_len=10,
            output_patch_len=6,
            method=decoder.decode,
        )[1]
    with context(do_eval=False):
        trained = decoder.apply({"params": weights}, batch).output_ts
        tune = pax_fiddle.Config(
            patched_decoder.PatchedDecoderFinetuneModel, name="tune", core_layer_tpl=small, freq=1
        )
        model = base_layer.instantiate(tune)
        future = jnp.asarray(random.normal(3.0, 2.0, (3, 6)), jnp.float32)
        pair = py_utils.NestedMap(input_ts=batch.input_ts, actual_ts=future)
        metrics, _ = model.apply({"params": {"core_layer": weights}}, pair)
    flat = py_utils.NestedMap.FromNestedDict(weights).FlattenItems()
    np.savez_compressed(
        path,
        series=batch.input_ts,
        paddings=paddings,
        frequency=batch.freq[:, 0],
        future=future,
        evaluated=evaluated,
        trained=trained,
        forecast=forecast,
        loss=metrics["avg_qloss"][0],
        released=released_weights(),
        **{f"params/{name.replace('.', '/')}": weight for name, weight in flat},
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(Path(sys.argv[1]))
