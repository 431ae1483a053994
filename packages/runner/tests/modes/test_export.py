"""What `--mode=export` does before it writes; the integration tests look at what it writes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config import build
from layerkit.layers import RotaryPositionalEmbedding
from layerkit.layers.adapters import with_lora
from layerkit.models import LanguageModel
from layerkit_runner.command_line.flags import RunOptions, parse_flags
from layerkit_runner.errors import UsageError
from layerkit_runner.modes.export import run_export, without_adapters


def test_adapters_are_added_to_the_weights_beside_them():
    plain = LanguageModel.HParams.config()
    plain.lm_tpl.set(vocab_size=8, model_dims=8, hidden_dims=8, num_layers=1, num_heads=2)
    attention = plain.lm_tpl.stack_tpl.layer_tpl.attention_tpl
    attention.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
    adapted = with_lora(plain, rank=2)
    model, ids = build(adapted), jnp.arange(5)[None]
    variables = jax.tree.map(lambda w: w + 0.1, jax.jit(model.init)(jax.random.key(0)))
    config, merged = without_adapters(adapted, variables)
    assert config == plain

    def logits(model: LanguageModel, variables: object) -> np.ndarray:
        run = jax.jit(lambda v: model.apply(v, ids, method=lambda m, x: m.lm.logits(x)))
        return np.asarray(run(variables))

    expected = logits(model, variables)
    np.testing.assert_allclose(logits(build(config), merged), expected, rtol=1e-4, atol=1e-5)


def test_a_model_without_adapters_stays_as_it_is():
    config, variables = LanguageModel.HParams.config(), {"params": {}}
    assert without_adapters(config, variables) == (config, variables)


def test_export_needs_a_folder():
    with pytest.raises(UsageError, match="--mode=export needs a folder to write: --export_dir=DIR"):
        run_export(None, RunOptions(job_log_dir="job"))  # type: ignore[arg-type]


def test_the_folder_belongs_to_the_mode():
    flags = parse_flags(["--exp=x", "--mode=export", "--export_dir=out", "--job_log_dir=job"])
    assert flags.options.export_dir == "out"
    with pytest.raises(
        UsageError, match="--export_dir belongs to --mode=export, and the mode is t"
    ):
        parse_flags(["--exp=x", "--export_dir=out", "--job_log_dir=job"])
