"""`run`: errors of memory, devices and layers become one-line messages."""

from __future__ import annotations

import dataclasses
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

from layerkit.base_layer import BaseLayer
from layerkit.config import Config
from layerkit.nested_map import NestedMap
from layerkit.weights import WeightHParams
from layerkit_runner import BaseExperiment
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment, resolve
from layerkit_runner.errors import UsageError, to_usage_error, unknown_name_text
from layerkit_runner.modes import export, inference, train
from layerkit_runner.modes.run import OutOfMemoryError, memory_remedies, out_of_memory_text, run
from layerkit_runner.partitioning import SpmdPartitioner


@dataclasses.dataclass
class Input:
    """An input with a batch size for each core."""

    percore_batch_size: float
    is_training: bool = True


@dataclasses.dataclass
class Stack:
    """A stack of layers."""

    remat: str


class Large(BaseExperiment):
    """A model, a partitioner and an input, with fields for what takes memory."""

    PERCORE: float = 8.0
    ICI_MESH_SHAPE: list[int] | None = None

    def task(self) -> Config:
        return Config(Stack, remat="save_all")

    def datasets(self) -> list[Config]:
        return [Config(Input, percore_batch_size=self.PERCORE)]

    def partitioner(self) -> Config:
        return SpmdPartitioner.HParams.config(ici_mesh_shape=self.ICI_MESH_SHAPE)


class Bare(BaseExperiment):
    """Has none of the fields that one could change."""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123456 bytes.",
            "Out of memory while trying to allocate 123456 bytes (123 kB)",
        ),
        (
            "INTERNAL: Error dispatching computation: %s Out of memory allocating 104857600000"
            " bytes.\nBuffer assignment:\n  value: 1",
            "Out of memory allocating 104857600000 bytes (105 GB)",
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
        ("INTERNAL: the driver is gone", None),
    ],
)
def test_out_of_memory_errors_are_recognized(text: str, words: str | None):
    assert out_of_memory_text(text) == words


def test_long_out_of_memory_message_is_shortened():
    words = out_of_memory_text("Out of memory: " + "buffer " * 100)
    assert words is not None
    assert len(words) <= 200
    assert words.endswith(" …")


def test_remedies_name_fields_and_paths():
    large, name = resolve(Large()), f"{__name__}.Large"
    remedies = memory_remedies("train", large)
    for flag in ("PERCORE", "task.remat", "ICI_MESH_SHAPE"):
        assert f"--fdl.{flag} " in remedies.replace(",", " ").replace("=", " ")
    assert f"runner --exp={name} --mode=plan --search" in remedies
    remedies = memory_remedies("eval", large)
    assert "--fdl.PERCORE" in remedies and "ICI_MESH_SHAPE" in remedies
    assert "remat" not in remedies and "plan" not in remedies
    bare = ResolvedExperiment(Bare(), Config(dict), [], [], Config(dict))
    assert memory_remedies("eval", bare) == ""


def test_run_without_device_memory_ends_with_remedies(
    raises: Any, tmp_path: Path, monkeypatch: Any
):
    def fails(resolved: ResolvedExperiment, options: RunOptions) -> int:
        raise jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 104857600000 bytes.")

    monkeypatch.setattr(train, "run_train", fails)
    resolved = ResolvedExperiment(Bare(), Config(dict), [], [], Config(dict))
    with raises(OutOfMemoryError, owner=f"{__name__}.Bare", exit_code=1):
        run("train", resolved, RunOptions(job_log_dir=str(tmp_path)))
    log = tmp_path / "logs" / "process_0000.log"
    assert "in fails\n    raise jax.errors.JaxRuntimeError(" in log.read_text()


def test_run_without_memory_ends_although_its_log_blocks(
    tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
):
    def fails(resolved: ResolvedExperiment, options: RunOptions) -> int:
        raise jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 104857600000 bytes.")

    monkeypatch.setattr(train, "run_train", fails)
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "process_0000.log")
    resolved = ResolvedExperiment(Bare(), Config(dict), [], [], Config(dict))
    with pytest.raises(OutOfMemoryError):
        run("train", resolved, RunOptions(job_log_dir=str(tmp_path)))
    assert "in fails\n    raise jax.errors.JaxRuntimeError(" in capfd.readouterr().err


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
def test_shape_error_of_a_layer_is_one_line_with_its_path(
    mode: str, tmp_path: Path, monkeypatch: Any
):
    def fails(*_: Any) -> int:
        jax.eval_shape(Outer().apply, {}, np.ones((2, 3)))
        return 0

    monkeypatch.setattr(train, "run_train", fails)
    monkeypatch.setattr(inference, "run_inference", fails)
    monkeypatch.setattr(export, "run_export", fails)
    monkeypatch.chdir(Path(__file__).parent)
    resolved = ResolvedExperiment(Bare(), Config(dict), [], [], Config(dict))
    with pytest.raises(UsageError) as caught:
        run(mode, resolved, RunOptions(job_log_dir=str(tmp_path)))
    assert "in layer Failing(inner), test_run.py:" in str(caught.value)
    assert "\n" not in str(caught.value)
    log = tmp_path / "logs" / "process_0000.log"
    assert str(log) in str(caught.value)
    assert "return x + jax.numpy.ones" in log.read_text()


class Misspelled(BaseLayer):
    size: int = 2

    def setup(self) -> None:
        shape = WeightHParams((self.size,), axes=(None,))
        self.create_variable("scale", shape)
        self.create_variable("mean", shape, trainable=False)

    def fprop(self, x: Any, case: str) -> Any:
        return _MISSPELLED[case][0](self, x)


_MISSPELLED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "attribute": (
        lambda layer, x: layer.sise,
        "Misspelled has no attribute 'sise'; did you mean 'size'? In layer Misspelled().",
    ),
    "weight": (
        lambda layer, x: layer.theta.scal,
        "Misspelled(): unknown weight: 'scal'. Did you mean 'scale'?",
    ),
    "variable": (
        lambda layer, x: layer.get_var("men"),
        "Misspelled(): unknown variable: 'men'. Did you mean 'mean'?",
    ),
    "batch": (
        lambda layer, x: x.idz,
        "Misspelled(): NestedMap has no such key: 'idz'. Did you mean 'ids'?",
    ),
}


@pytest.mark.parametrize("case", _MISSPELLED)
def test_unknown_name_in_a_layer_is_one_line_with_file_and_line(
    case: str, tmp_path: Path, monkeypatch: Any
):
    def fails(*_: Any) -> int:
        layer = Misspelled()
        layer.apply(layer.init(jax.random.key(0)), NestedMap(ids=1), case)
        return 0

    monkeypatch.setattr(train, "run_train", fails)
    monkeypatch.chdir(Path(__file__).parent)
    resolved = ResolvedExperiment(Bare(), Config(dict), [], [], Config(dict))
    with pytest.raises(UsageError) as caught:
        run("train", resolved, RunOptions(job_log_dir=str(tmp_path)))
    run_of_case, text = _MISSPELLED[case]
    line = run_of_case.__code__.co_firstlineno
    log = tmp_path / "logs" / "process_0000.log"
    assert str(caught.value) == (
        f"{resolved.name}: test_run.py:{line}: {text} The traceback is in {log}."
    )
    assert "Traceback" in log.read_text()


class MisspelledChildren(BaseLayer):
    def setup(self) -> None:
        self.create_children("sub", [Misspelled.HParams.config()] * 2, sise=3)


def test_misspelled_field_of_a_child_names_the_line_that_creates_it(monkeypatch: Any):
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(AttributeError) as caught:
        MisspelledChildren().init(jax.random.key(0))
    line = inspect.unwrap(MisspelledChildren.setup).__code__.co_firstlineno + 1
    text = unknown_name_text(caught.value)
    assert text is not None
    assert text.startswith(
        f"test_run.py:{line}: Misspelled: unknown field: 'sise'. Did you mean 'size'?"
    )
    assert text.endswith(" In layer MisspelledChildren().")


@pytest.mark.parametrize(
    "error_of",
    [lambda layer, x: jnp.abss(x), lambda layer, x: {}["a"], lambda layer, x: [].a],
    ids=["module", "dict", "list"],
)
def test_errors_of_a_layers_own_code_keep_their_traceback(
    error_of: Any, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setitem(_MISSPELLED, "own", (error_of, ""))

    def fails(*_: Any) -> int:
        layer = Misspelled()
        layer.apply(layer.init(jax.random.key(0)), NestedMap(ids=1), "own")
        return 0

    monkeypatch.setattr(train, "run_train", fails)
    resolved = ResolvedExperiment(Bare(), Config(dict), [], [], Config(dict))
    with pytest.raises((AttributeError, KeyError)) as caught:
        run("train", resolved, RunOptions(job_log_dir=str(tmp_path)))
    assert "In layer Misspelled()" in caught.value.__notes__


def test_unknown_name_in_code_of_this_project_is_no_user_error():
    with pytest.raises(AttributeError) as missing:
        exec("layer.sise", {"__name__": "layerkit.layers.mine", "layer": Misspelled()})
    assert unknown_name_text(missing.value) is None


def test_an_error_outside_of_layers_stays_as_it_is(tmp_path: Path, monkeypatch: Any):
    def fails(*_: Any) -> int:
        raise TypeError("no layer")

    monkeypatch.setattr(train, "run_train", fails)
    resolved = ResolvedExperiment(Bare(), Config(dict), [], [], Config(dict))
    with pytest.raises(TypeError, match="no layer"):
        run("train", resolved, RunOptions(job_log_dir=str(tmp_path)))


def test_an_error_that_names_its_layer_is_not_given_another():
    error = ValueError("Linear(lm/softmax): input_dims=0, expected at least 1")
    error.add_note("In layer Outer(lm)")
    assert str(to_usage_error(error)) == "Linear(lm/softmax): input_dims=0, expected at least 1"


def test_another_error_of_a_device_stays_as_it_is(tmp_path: Path, monkeypatch: Any):
    def fails(resolved: ResolvedExperiment, options: RunOptions) -> int:
        raise jax.errors.JaxRuntimeError("INTERNAL: the driver is gone")

    monkeypatch.setattr(train, "run_train", fails)
    resolved = ResolvedExperiment(Bare(), Config(dict), [], [], Config(dict))
    with pytest.raises(jax.errors.JaxRuntimeError, match="driver is gone"):
        run("train", resolved, RunOptions(job_log_dir=str(tmp_path)))
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("text", ["NumPy", "Python"])
def test_host_without_memory_ends_with_one_message(
    tmp_path: Path, tiny: SimpleNamespace, text: str
):
    class Enormous(tiny.Points):
        def _read_rows(self, rows: np.ndarray) -> Any:
            if text == "Python":
                return [None] * 2**60
            return np.zeros((2**20, 2**38))  # more than an address can be of

    class OfOneInput(BaseExperiment):
        def task(self) -> Config:
            return tiny.task_config()

        def datasets(self) -> list[Config]:
            return [Enormous.HParams.config(name="train", is_training=True, percore_batch_size=1.0)]

    resolved = resolve(OfOneInput())
    with pytest.raises(OutOfMemoryError) as caught:
        run("train", resolved, RunOptions(job_log_dir=str(tmp_path), jax_compilation_cache="off"))
    log = tmp_path / "logs" / "process_0000.log"
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

    class OfOneInput(BaseExperiment):
        def task(self) -> Config:
            return tiny.task_config().set(model=ReadsZ.HParams.config())

        def datasets(self) -> list[Config]:
            return [tiny.Points.HParams.config(is_training=True, percore_batch_size=1.0)]

    options = RunOptions(job_log_dir=str(tmp_path), jax_compilation_cache="off")
    with pytest.raises(UsageError) as caught:
        run("train", resolve(OfOneInput()), options)
    text = str(caught.value)
    assert "'z'" in text and "weights, x, y" in text and "ReadsZ()" in text
    assert "\n" not in text
