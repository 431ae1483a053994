"""`run`: errors of memory, devices and layers become one-line messages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams
from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit.errors import UnknownNameError, UserError
from layerkit_runner import BaseExperiment
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.run import export, inference
from layerkit_runner.run import training_run as train
from layerkit_runner.run.job_errors import OutOfMemoryError, out_of_memory_text
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.run_mode import run
from layerkit_runner.run_options import RunOptions


class Bare(BaseExperiment):
    """Has none of the fields that one could change."""


BARE = ResolvedExperiment(Bare(), Config(dict), [], [], Config(dict))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return the path of the log of the process that `run_failing` runs."""
    return tmp_path / "logs" / "process_0000.log"


@pytest.fixture
def run_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs a mode whose work is a function that raises."""

    def start(fails: Callable[[], object], mode: str = "train") -> None:
        monkeypatch.chdir(Path(__file__).parent)
        for module, name in (
            (train, "run_train"),
            (inference, "run_inference"),
            (export, "run_export"),
        ):
            monkeypatch.setattr(module, name, lambda *_: fails())
        run(mode, BARE, RunOptions(job_log_dir=str(tmp_path)))

    return start


def no_device_memory() -> None:
    raise jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 104857600000 bytes.")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123456 bytes.",
            "Out of memory while trying to allocate 123456 bytes (123 kB)",
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory in memory space hbm."
            " Used 17.5G of 15.75G hbm.",
            "Ran out of memory in memory space hbm. Used 17.5G of 15.75G hbm",
        ),
        (
            "RESOURCE_EXHAUSTED: Failed to allocate request for 5.86GiB on device ordinal 0",
            "RESOURCE_EXHAUSTED: Failed to allocate request for 5.86GiB on device ordinal 0",
        ),
        ("RESOURCE_EXHAUSTED: Received message larger than max (5 vs. 4)", None),
    ],
)
def test_out_of_memory_errors_are_recognized(text: str, words: str | None):
    assert out_of_memory_text(text) == words


def test_run_without_device_memory_ends_with_remedies(raises: Any, run_failing: Any, log: Path):
    with raises(OutOfMemoryError, exit_code=1):
        run_failing(no_device_memory)
    assert "in no_device_memory\n    raise jax.errors.JaxRuntimeError(" in log.read_text()


def test_run_without_memory_ends_although_its_log_blocks(
    run_failing: Any, log: Path, capfd: pytest.CaptureFixture[str]
):
    log.parent.mkdir()
    os.mkfifo(log)
    with pytest.raises(OutOfMemoryError):
        run_failing(no_device_memory)
    assert "in no_device_memory\n    raise jax.errors.JaxRuntimeError(" in capfd.readouterr().err


class Failing(BaseLayer):
    def fprop(self, x: jax.Array) -> jax.Array:
        return x + jax.numpy.ones(x.shape[-1] + 1)


class Outer(BaseLayer):
    def setup(self) -> None:
        self.create_child("inner", Failing.HParams.config())

    def fprop(self, x: jax.Array) -> jax.Array:
        inner: jax.Array = self.inner(x)
        return inner


@pytest.mark.parametrize("mode", ["train", "eval_once", "decode", "export"])
def test_shape_error_of_a_layer_is_one_line_with_its_path(mode: str, run_failing: Any, log: Path):
    with pytest.raises(UsageError) as caught:
        run_failing(lambda: jax.eval_shape(Outer().apply, {}, np.ones((2, 3))), mode)
    assert str(caught.value).startswith("Failing(inner): test_run_mode.py:")
    assert "\n" not in str(caught.value)
    assert str(log) in str(caught.value)
    assert "return x + jax.numpy.ones" in log.read_text()


class Misspelled(BaseLayer):
    size: int = 2

    def setup(self) -> None:
        shape = WeightHParams((self.size,), axes=(None,))
        self.create_variable("scale", shape)
        self.create_variable("mean", shape, trainable=False)

    def fprop(self, x: Any, read: Callable[[Any, Any], Any]) -> Any:
        return read(self, x)

    @classmethod
    def trace(cls, read: Callable[[Any, Any], Any]) -> None:
        """Trace a layer whose code is `read`."""
        layer = cls()
        layer.apply(layer.init(jax.random.key(0)), NestedMap(ids=1), read)


@pytest.mark.parametrize(
    ("read", "value", "near"),
    [
        (lambda layer, x: layer.theta.scal, "scal", "scale"),
        (lambda layer, x: layer.get_var("men"), "men", "mean"),
        (lambda layer, x: x.idz, "idz", "ids"),
    ],
    ids=["weight", "variable", "batch"],
)
def test_unknown_name_in_a_layer_is_one_line_with_file_and_line(
    raises: Any, run_failing: Any, read: Any, value: str, near: str
):
    with raises(UnknownNameError, value=value) as caught:
        run_failing(lambda: Misspelled.trace(read))
    line = read.__code__.co_firstlineno
    assert caught.value.owner == f"test_run_mode.py:{line}: Misspelled()"
    assert near in caught.value.choices


class MisspelledChildren(BaseLayer):
    def setup(self) -> None:
        self.create_children("sub", [Misspelled.HParams.config()] * 2, sise=3)


def test_misspelled_field_of_a_child_names_the_line_that_creates_it(raises: Any, run_failing: Any):
    with raises(UnknownNameError, value="sise") as caught:
        run_failing(lambda: MisspelledChildren().init(jax.random.key(0)))
    line = inspect.unwrap(MisspelledChildren.setup).__code__.co_firstlineno + 1
    assert f"test_run_mode.py:{line}: " in caught.value.owner


@pytest.mark.parametrize(
    "read",
    [lambda layer, x: layer.sise, lambda layer, x: jnp.abss(x), lambda layer, x: {}["a"]],
    ids=["layer", "module", "dict"],
)
def test_errors_of_a_layers_own_code_keep_their_traceback(read: Any, run_failing: Any):
    with pytest.raises((AttributeError, KeyError)) as caught:
        run_failing(lambda: Misspelled.trace(read))
    assert "In layer Misspelled()" in caught.value.__notes__


@pytest.mark.parametrize(
    "error",
    [TypeError("no layer"), jax.errors.JaxRuntimeError("INTERNAL: the driver is gone")],
    ids=["code outside of layers", "device"],
)
def test_other_errors_stay_as_they_are(error: Exception, run_failing: Any, log: Path):
    def fails() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        run_failing(fails)
    assert caught.value is error
    assert not log.parent.exists()


def experiment_of(task: Config, dataset: Config) -> ResolvedExperiment:
    """Return an experiment that trains on one input."""
    dataset.set(name="train", is_training=True, percore_batch_size=1.0)
    members = {"task": lambda _: task, "datasets": lambda _: [dataset]}
    return resolve(type("OfOneInput", (BaseExperiment,), members)())


@pytest.mark.parametrize("text", ["NumPy", "Python"])
def test_host_without_memory_ends_with_one_message(
    tmp_path: Path, tiny: SimpleNamespace, log: Path, text: str
):
    class Enormous(tiny.Points):
        def _read_rows(self, rows: np.ndarray) -> Any:
            if text == "Python":
                return [None] * 2**60
            return np.zeros((2**20, 2**38))  # more than an address can be of

    resolved = experiment_of(tiny.task_config(), Enormous.HParams.config())
    with pytest.raises(OutOfMemoryError) as caught:
        run("train", resolved, RunOptions(job_log_dir=str(tmp_path), jax_compilation_cache="off"))
    words = {"NumPy": "Unable to allocate 2.00 EiB", "Python": "Python could not allocate memory"}
    assert words[text] in caught.value.problem
    assert str(log) in caught.value.hint
    assert "in _read_rows\n" in log.read_text()


@pytest.mark.parametrize("read", [lambda batch: batch.z, lambda batch: batch["z"]])
def test_missing_batch_key_is_one_line_with_the_keys_of_the_batch(
    tmp_path: Path, tiny: SimpleNamespace, read: Any
):
    class ReadsZ(tiny.Regression):
        def compute_predictions(self, batch: Any) -> Any:
            return read(batch)

    task = tiny.task_config().set(model=ReadsZ.HParams.config())
    options = RunOptions(job_log_dir=str(tmp_path), jax_compilation_cache="off")
    with pytest.raises(UserError) as caught:
        run("train", experiment_of(task, tiny.Points.HParams.config()), options)
    text = str(caught.value)
    assert "'z'" in text and "weights, x, y" in text and "ReadsZ()" in text
    assert "\n" not in text
