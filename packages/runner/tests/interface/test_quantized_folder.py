"""`runner quantize`: the new folder holds integers, and its model is near the one before."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from flax.traverse_util import flatten_dict

import layerkit_runner
from layerkit.config import Config, Partial
from layerkit.errors import ConfigError
from layerkit.layers import add_lora, dequantize_model
from layerkit.layers.quantization.lora import LORA_WEIGHTS
from layerkit_runner.checkpointing import folders
from layerkit_runner.config.requests import parse_override
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from import InitFrom, Source
from layerkit_runner.run import job_folder
from layerkit_runner.run.programs.eval_program import EvalProgram
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools import quantize
from layerkit_runner.tools.quantize import quantize_folder, run_quantize

IDS = np.arange(12, dtype=np.int32).reshape(2, 6)


@pytest.fixture(scope="module")
def quantized(run: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with the model of `run` in int4."""
    folder = str(tmp_path_factory.mktemp("quantized") / "int4")
    assert run_quantize([str(run.job_log_dir), folder, "--weight_format=int4:8"]) == 0
    return folder


@pytest.mark.parametrize(
    ("module", "name"), [(quantize, "_write_weights"), (job_folder, "write_config")]
)
def test_interrupted_command_can_be_repeated(run, tmp_path, monkeypatch, module, name):
    out = tmp_path / "int8"

    write = getattr(module, name)

    def interrupt(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            quantize_folder(str(run.job_log_dir), str(out))
    assert not out.exists()
    quantize_folder(str(run.job_log_dir), str(out))
    assert {path.name for path in tmp_path.iterdir()} == {"int8"}
    assert {"config.json", "checkpoints"} <= {path.name for path in out.iterdir()}


def test_folder_says_that_no_training_goes_on(quantized):
    places = folders.checkpoints_folder(epath.Path(quantized))
    (step,) = folders.committed_steps(places)
    user = folders.read_metadata(folders.step_folder(places, step))["user"]
    assert user == {"ended": True}  # An evaluation of the folder would wait for later steps.


def restored_logits(model: Any, ids: Any) -> np.ndarray:
    """Return the logits of the model with its weights restored to floats."""

    def logits(stored: Any, ids: Any) -> Any:
        config, variables = dequantize_model(model.config, stored)
        network = config.Instantiate()
        return network.apply(variables, ids, method=lambda m, ids: m.lm.logits(ids))

    return np.asarray(jax.jit(logits)(model.variables, jnp.asarray(ids)))


def test_folder_holds_integers_and_no_optimizer_state(model, quantized):
    loaded = layerkit_runner.load(quantized)
    stored = flatten_dict(loaded.weights, sep="/")
    names = {name for name, leaf in stored.items() if leaf.dtype == jnp.uint8}
    assert len(names) == 6  # query, key, value, output, up, down
    assert {f"{name}_scale" for name in names} <= stored.keys()
    original = flatten_dict(model.weights, sep="/")
    for name in original.keys() - names:
        np.testing.assert_array_equal(stored[name], original[name])
    error = np.abs(loaded.logits(IDS) - model.logits(IDS)).max()
    assert 0 < error < 0.2 * np.abs(model.logits(IDS)).max()
    np.testing.assert_allclose(loaded.logits(IDS), restored_logits(loaded, IDS), atol=1e-4)


def test_folder_evaluates_and_generates(model, quantized):
    loaded = layerkit_runner.load(quantized)
    assert loaded.step == model.step
    (before,), (after,) = model.score("def f(x):"), loaded.score("def f(x):")
    assert after.log_likelihood == pytest.approx(before.log_likelihood, rel=0.1)
    (result,) = loaded.generate_ids([[1, 5, 9]], max_new_tokens=4, temperature=0)
    logits = restored_logits(loaded, [[1, 5, 9, *result[:-1]]])[0]
    assert result.tolist() == logits[2:].argmax(-1).tolist()


@pytest.mark.slow
def test_averaged_weights_are_stored_as_the_weights(lines, tmp_path):
    overrides = {
        "task.train.learner.ema_decay": 0.5,
        "task.train.eval_use_ema_states": True,
        "task.train.decode_use_ema_states": True,
    }
    layerkit_runner.train(lines.LinesLm, job_log_dir=tmp_path / "run", overrides=overrides)
    line = quantize_folder(str(tmp_path / "run"), str(tmp_path / "int8"))
    assert line.endswith("; the averaged weights (decode_use_ema_states=True)")
    before, after = (layerkit_runner.load(tmp_path / name) for name in ("run", "int8"))
    expected = before.logits(IDS)
    np.testing.assert_allclose(after.logits(IDS), expected, atol=0.05 * np.abs(expected).max())


def test_programs_of_the_new_folder_ask_for_no_averages(lines):
    class Averaged(lines.LinesLm):
        def eval_programs(self) -> list[Config]:
            return [Config(EvalProgram, dataset="heldout", use_ema_states=True)]

    resolved = resolve(Averaged(), [parse_override("task.train.learner.ema_decay", "0.5")])
    written = quantize._set_format(resolved, "int8")
    (program,) = written.eval_programs
    assert program.use_ema_states is None


@pytest.mark.slow
@pytest.mark.parametrize("source", ["integers", "floats"])
def test_adapters_train_on_the_weights_of_a_folder(lines, run, quantized, tmp_path, source):
    folder = quantized if source == "integers" else str(run.job_log_dir)

    class Adapted(lines.LinesLm):
        LEARNING_RATE = 0.02
        MAX_STEPS = 20

        def model(self) -> Config:
            return add_lora(super().model(), rank=2).set(weight_format="int4:8")

        def task(self) -> Config:
            task = super().task()
            task.train.learner.set(optimizer=Partial(optax.adam), trainable=(LORA_WEIGHTS,))
            task.initial_weights = InitFrom.HParams.config(
                sources=[Source.HParams.config(folder=folder)]
            )
            return task

    ended = layerkit_runner.train(Adapted, job_log_dir=tmp_path / "run")
    losses = ended.metrics["loss"]
    assert losses[-1] < losses[0] - 0.1
    before = flatten_dict(layerkit_runner.load(quantized).weights, sep="/")
    after = flatten_dict(ended.model.weights, sep="/")
    assert all("lora_" in name for name in after.keys() - before.keys())
    for name, leaf in before.items():
        np.testing.assert_array_equal(after[name], leaf)


def test_wrong_format_or_folder_is_an_error_and_nothing_is_written(raises, run, tmp_path):
    new = tmp_path / "new"
    # Before the model is loaded.
    with raises(ConfigError, field="weight_format", value="int2"):
        quantize_folder("missing", str(new), weight_format="int2")
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "file"):
        with raises(UsageError, field="out", value=str(folder)):
            quantize_folder("missing", str(folder))
    # The group does not divide the inputs.
    with raises(UsageError, field="group size of weight_format", value=64):
        quantize_folder(str(run.job_log_dir), str(new), weight_format="int4:64")
    assert not new.exists()
