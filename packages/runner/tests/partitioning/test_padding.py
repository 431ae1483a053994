"""Weights that the mesh does not divide: padded on the devices, and nowhere else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from layerkit.config import Partial, build
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit.interop.hugging_face import export_model, model_config
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.models import LanguageModel, TransformerLm
from layerkit_runner.checkpointing import CheckpointManager
from layerkit_runner.checkpointing.handlers import stored_leaves
from layerkit_runner.checkpointing.stored_state import join, named_leaves
from layerkit_runner.init_from import InitFrom, Source, plan_first_state
from layerkit_runner.optim.optimizer_updates import declare_per_layer
from layerkit_runner.optim.sharded_adafactor import sharded_adafactor
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.partitioning.padding import UnevenArray
from layerkit_runner.step.task import SingleTask
from layerkit_runner.tools.inspect.model import parameter_table, table_text
from layerkit_runner.tools.plan.memory import tensor_memory

VOCAB, STEPS = 13, 3


def uneven_model(**fields: Any) -> Any:
    """13 words, 21 hidden units and 5 heads, of which a mesh of 2 divides none."""
    sizes = {"model_dims": 20, "hidden_dims": 21, "num_layers": 1, "num_heads": 5, **fields}
    return LanguageModel.HParams.config(
        lm_tpl=TransformerLm.HParams.config(vocab_size=VOCAB, **sizes)
    )


# The epsilon of the optimizers. They divide by it where a gradient is near 0, so that rounding
# errors, which differ from one mesh to another, grow by up to its inverse. With 1e-3 an error of
# 1e-8 in a gradient becomes 1e-5 in an update: some machines are within the tolerance, others not.
EPSILON = 1e-1


@declare_per_layer(lambda **_: True)
def factored_adam(learning_rate: Any) -> optax.GradientTransformation:
    """Moments shaped like the weights (Adam's), and means over their rows and columns."""
    return optax.chain(
        optax.scale_by_adam(eps=EPSILON),
        optax.scale_by_factored_rms(min_dim_size_to_factor=4, epsilon=EPSILON),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(learning_rate),
    )


def batch_of(arrangements: Any, seed: int) -> NestedMap:
    rng = np.random.default_rng(seed)
    batch = arrangements.unequal_batch()
    for name in ("ids", "labels"):
        batch[name] = rng.integers(VOCAB, size=batch[name].shape).astype(np.int32)
    return batch


@dataclasses.dataclass
class Run:
    """What came of some steps; the state as storage holds it, on the host."""

    task: SingleTask
    partitioner: Partitioner
    state: Any
    stored: Any
    reported: list[dict[str, float]]
    evaluated: float
    consumes_the_state: bool
    aliased_bytes: int


def start(
    arrangements: Any,
    shape: list[int] | None,
    *,
    model: Any = None,
    optimizer: Any = factored_adam,
    accumulation: int = 1,
    axes: tuple[str, ...] = ("data", "fsdp", "tensor"),
) -> tuple[Partitioner, SingleTask]:
    learner = {"clip_global_norm": 1.0, "ema_decay": 0.9, "learning_rate": 1e-2}
    model = uneven_model() if model is None else model
    task = arrangements.sgd_task(model, optimizer=Partial(optimizer), **learner)
    task.train.gradient_accumulation_steps = accumulation
    return arrangements.start(shape, task, mesh_axis_names=axes), task


def train(arrangements: Any, shape: list[int] | None, **how: Any) -> Run:
    partitioner, task = start(arrangements, shape, **how)
    first = partitioner.init_fn(task)()
    batches = [batch_of(arrangements, seed) for seed in range(STEPS)]
    specs = partitioner.abstract_batch(batches[0])
    step = partitioner.train_step_fn(task).lower(first, specs).compile()
    state, reported = arrangements.train(partitioner, step, first, batches)
    evaluated = partitioner.eval_step_fn(task)(state, partitioner.put_batch(batches[-1]))
    return Run(
        task,
        partitioner,
        state,
        jax.device_get(partitioner.stored_state(task, state)),
        reported,
        float(evaluated["loss"].value),
        consumes_the_state=all(leaf.is_deleted() for leaf in jax.tree.leaves(first)),
        aliased_bytes=step.memory_analysis().alias_size_in_bytes,
    )


def assert_same_run(arrangements: Any, ours: Run, reference: Run) -> None:
    arrangements.assert_trees_close(ours.stored, reference.stored, rtol=1e-5, atol=1e-6)
    for result, required in zip(ours.reported, reference.reported, strict=True):
        assert result == pytest.approx(required, rel=1e-5, abs=1e-6)
    assert ours.evaluated == pytest.approx(reference.evaluated, rel=1e-6)


@pytest.fixture(scope="module")
def alone(arrangements: Any) -> Run:
    """The reference."""
    return train(arrangements, arrangements.one_device)


@pytest.fixture(scope="module")
def spread(arrangements: Any) -> Run:
    return train(arrangements, [2, 2, 2])


def bits(tree: Any) -> dict[str, bytes]:
    return {join(path): np.asarray(leaf).tobytes() for path, leaf in named_leaves(tree).items()}


# One array.


@pytest.fixture(scope="module")
def cube() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize(
    ("shape", "spec", "padded", "stored"),
    [
        ((13, 16), P("tensor", "fsdp"), (14, 16), P(None, ("fsdp", "tensor"))),
        ((13, 16, 64), P("tensor"), (14, 16, 64), P(None, None, "tensor")),
        ((13, 9), P("tensor", None), (14, 9), P(None, None)),
        ((13,), P(("fsdp", "tensor")), (16,), P(None)),
        ((13, 7, 8), P("tensor", "fsdp", "data"), (14, 8, 8), P(None, None, ("data",))),
    ],
)
def test_forms_of_an_uneven_array(cube: Any, shape: Any, spec: P, padded: Any, stored: P):
    names = ("vocab", "embed", "mlp")[: len(shape)]
    array = UnevenArray(shape, np.dtype(np.float32), names, NamedSharding(cube, spec))
    assert array.on_devices.shape == array.padded_shape == padded
    assert array.stored_spec.shape == shape
    if shape == (13, 7, 8):  # both axes do not fit a dimension of 8 that is in two parts
        stored = P(None, None, ("data", "tensor", "fsdp"))
    assert array.stored_spec.sharding.is_equivalent_to(NamedSharding(cube, stored), len(shape))
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    on_devices = jax.jit(array.padded, out_shardings=array.sharding)(x)
    here = tuple(slice(size) for size in shape)
    np.testing.assert_array_equal(np.asarray(on_devices)[here], x)
    assert np.count_nonzero(on_devices) == x.size
    np.testing.assert_array_equal(jax.jit(array.cut)(on_devices), x)


# A training run.


def test_training_equals_that_of_one_device(arrangements: Any, alone: Run, spread: Run):
    assert alone.partitioner.padding_text(alone.task) == ""
    assert_same_run(arrangements, spread, alone)


def test_only_the_ends_are_padded_and_only_on_the_devices(spread: Run):
    told = spread.partitioner.abstract_state(spread.task)
    stored = spread.partitioner.abstract_stored_state(spread.task)
    num_padded = 0
    for path, leaf in named_leaves(spread.state).items():
        assert leaf.sharding == named_leaves(told)[path].sharding
        true = named_leaves(spread.stored)[path]
        assert true.shape == named_leaves(stored)[path].shape
        num_padded += leaf.shape != true.shape
        whole = np.array(leaf)
        whole[tuple(slice(size) for size in true.shape)] = 0
        assert not whole.any(), join(path)
    # The embedding, 4 projections and 2 of the feed-forward, each with 2 moments and an average;
    # what the optimizer holds in factors is whole.
    assert num_padded == 4 * 7
    # Each device has an even part.
    embedding = spread.state.params["lm"]["softmax"]["w"]
    assert {shard.data.shape for shard in embedding.addressable_shards} == {(7, 10)}
    moments = [leaf for leaf in jax.tree.leaves(spread.state.opt_state) if leaf.shape == (14, 20)]
    assert [leaf.sharding.spec for leaf in moments] == [P("tensor", "fsdp")] * 2


def test_padding_is_described_and_counted(spread: Run):
    partitioner, task = spread.partitioner, spread.task
    text = partitioner.padding_text(task)
    assert text.startswith("vocab 13 → 14 over tensor (lm/softmax/w), ")
    assert "heads 5 → 6 over tensor (" in text
    assert "mlp 21 → 22 over tensor (" in text
    on_devices = partitioner.abstract_state(task)
    stored = partitioner.abstract_stored_state(task)
    tensors = tensor_memory(on_devices, {}, stored=stored)
    held = sum(tensor.bytes_per_device for tensor in tensors)
    device = jax.devices()[3]
    shards = [s for leaf in jax.tree.leaves(spread.state) for s in leaf.addressable_shards]
    assert held == sum(s.data.nbytes for s in shards if s.device == device)
    table = parameter_table("tests.Experiment", partitioner, task)
    assert table.totals["weights"].count == sum(x.size for x in jax.tree.leaves(stored.params))
    assert f"padded on the devices: {text}" in table_text(table).splitlines()
    row = next(row for row in table.parameters if row.path == "lm/softmax/w")
    assert (row.shape, row.count, row.bytes_per_device) == ([13, 20], 13 * 20, 7 * 10 * 4)


def test_step_donates_the_memory_of_the_state(spread: Run):
    shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(spread.state)]
    assert spread.aliased_bytes == sum(s.nbytes for s in shards)
    assert spread.consumes_the_state


def test_even_arrays_change_no_program(arrangements: Any, tiny: Any):
    partitioner, task = start(arrangements, [8, 1, 1], model=tiny.Regression.HParams.config())
    state, shardings = partitioner.abstract_state(task), partitioner.state_shardings(task)
    rows = NestedMap(x=np.ones((8, 2)), y=np.ones(8), weights=np.ones(8)).transform(np.float32)
    batch = partitioner.abstract_batch(rows)

    def train_step(state: Any, batch: Any) -> Any:
        return partitioner._spread(task.train_step, P(), P("batch"), P())(state, batch)

    plain = jax.jit(
        train_step,
        in_shardings=(shardings, partitioner.batch_sharding()),
        out_shardings=(shardings, partitioner.replicated()),
        donate_argnums=0,
    )
    ours = partitioner.train_step_fn(task).lower(state, batch)
    assert ours.as_text() == plain.lower(state, batch).as_text()
    assert partitioner.stored_state(task, state) is state
    assert partitioner.device_state(task, state) is state
    assert partitioner.abstract_stored_state(task) is state


def pipeline() -> Any:
    """Two stages of two layers; two microbatches."""
    stack = PipelinedTransformer.HParams.config(num_stages=2, num_microbatches=2)
    return uneven_model(num_layers=4, stack_tpl=stack)


def repeated(**sizes: Any) -> Any:
    stack = StackedTransformerRepeated.HParams.config()
    return uneven_model(num_layers=2, stack_tpl=stack, **sizes)


@declare_per_layer(lambda **_: False)
def adamw(learning_rate: Any) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, eps=EPSILON, weight_decay=0.1)


@declare_per_layer(lambda **_: True)
def adafactor(learning_rate: Any) -> optax.GradientTransformation:
    return optax.adafactor(learning_rate, min_dim_size_to_factor=4)


@declare_per_layer(lambda **_: True)
def factors_of_same_rank(learning_rate: Any) -> optax.GradientTransformation:
    # In integers, a rounding error that differs between meshes may grow to a whole unit.
    return sharded_adafactor(learning_rate, quantized_dtype="float32", epsilon1_grad_sq_reg=EPSILON)


# Vocabulary and hidden units over 8: the last devices hold padding alone.
EIGHT = {"model_dims": 32, "hidden_dims": 21, "num_heads": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        pytest.param([2, 2, 2], {"model": repeated, "accumulation": 2}, id="accumulation"),
        pytest.param([2, 2, 2], {"model": repeated, "optimizer": adamw}, id="AdamW"),
        pytest.param([1, 2, 4], {"model": repeated, "optimizer": adafactor}, id="Adafactor"),
        pytest.param(
            [2, 2, 2], {"model": repeated, "optimizer": factors_of_same_rank}, id="factors"
        ),
        pytest.param([1, 8, 1], {"model": repeated}, id="fsdp"),
        pytest.param([1, 1, 8], {"model": lambda: repeated(**EIGHT)}, id="empty parts"),
        pytest.param(
            [2, 2, 2], {"model": pipeline, "axes": ("data", "stage", "tensor")}, id="pipeline"
        ),
    ],
)
def test_training_of_models_and_optimizers_equals_that_of_one_device(
    arrangements: Any, shape: list[int], how: dict[str, Any]
):
    how = {**how, "model": how["model"]()}
    ours = train(arrangements, shape, **how)
    assert ours.partitioner.padding_text(ours.task)
    assert_same_run(arrangements, ours, train(arrangements, arrangements.one_device, **how))


@pytest.mark.slow
def test_decoding_equals_that_of_one_device(arrangements: Any, alone: Run):
    rng = np.random.default_rng(3)
    prompts = NestedMap(
        ids=rng.integers(VOCAB, size=(8, 4)).astype(np.int32),
        prompt_lengths=np.array([4, 3, 2, 1] * 2, np.int32),
    )
    result = []
    for shape in ([1, 1, 1], [2, 2, 2]):
        model = uneven_model()
        model.decoder.set(max_decode_steps=5, top_k=4)
        partitioner, task = start(arrangements, shape, model=model)
        stored = jax.tree.map(
            lambda leaf, like: jax.device_put(leaf, like.sharding),
            alone.stored,
            partitioner.abstract_stored_state(task),
        )
        state = partitioner.device_state(task, stored)
        decode = partitioner.decode_step_fn(task)
        result.append(jax.device_get(decode(state, partitioner.put_batch(prompts), np.int32(0))))
    np.testing.assert_array_equal(result[0].ids, result[1].ids)
    np.testing.assert_allclose(result[0].log_probs, result[1].log_probs, atol=1e-5)
    assert len(np.unique(result[0].ids)) > 3


# Storage.


@pytest.mark.slow  # the next one restores on another mesh
@pytest.mark.parametrize(
    "shapes",
    [[None], [[1, 1, 4], None, [1, 1, 1]]],
    ids=["pmap", "tensor 4, pmap, one"],
)
def test_checkpoints_restore_on_other_meshes_and_back(
    arrangements: Any, spread: Run, tmp_path: Path, shapes: list[list[int] | None]
):
    """From 2 × 2 × 2 over other meshes to 2 × 2 × 2, to the bit."""
    partitioner, task, state = spread.partitioner, spread.task, spread.state
    expected = bits(spread.stored)
    for number, shape in enumerate([*shapes, [2, 2, 2]]):
        stored = partitioner.stored_state(task, state)
        partitioner, task = start(arrangements, shape)
        target, folder = partitioner.abstract_stored_state(task), tmp_path / str(number)
        restored = arrangements.through_checkpoint(folder, stored, target)
        state = partitioner.device_state(task, restored)
        leaves = stored_leaves(folder / "checkpoint_00000001" / "state")
        assert leaves[("params", "lm", "softmax", "w")].shape == (13, 20)
        told = jax.tree.leaves(partitioner.abstract_state(task))
        for leaf, required in zip(jax.tree.leaves(state), told, strict=True):
            assert (leaf.shape, leaf.sharding) == (required.shape, required.sharding)
        assert bits(partitioner.stored_state(task, state)) == expected


def test_initial_weights_of_a_checkpoint_are_padded(arrangements: Any, alone: Run, tmp_path: Path):
    with CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(STEPS, alone.state, input_states={}, metadata={}, force=True)
    partitioner, task = start(arrangements, [2, 2, 2])
    task.initial_weights = InitFrom(sources=[Source(folder=str(tmp_path))])
    state = plan_first_state(partitioner, task)().state
    assert bits(partitioner.stored_state(task, state).params) == bits(alone.stored.params)
    shardings = partitioner.state_shardings(task)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings


@pytest.mark.slow
def test_hugging_face_folder_is_loaded_and_exported(arrangements: Any, tmp_path: Path):
    """GPT-2 with 13 words, from a folder onto a mesh and back."""
    described, written, back = (tmp_path / name for name in ("described", "written", "back"))
    described.mkdir()
    sizes = {"vocab_size": 13, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 17}
    (described / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    config = model_config(described)
    export_model(written, config, jax.jit(lambda: build(config).init(jax.random.key(5)))())
    partitioner, task = start(arrangements, [2, 2, 2], model=model_config(written))
    task.initial_weights = InitFrom(sources=[Source(folder=str(written))])
    state = plan_first_state(partitioner, task)().state
    assert state.params["lm"]["softmax"]["w"].shape == (14, 8)
    export_model(back, config, {"params": partitioner.stored_state(task, state).params})
    name = "model.safetensors"
    assert (back / name).read_bytes() == (written / name).read_bytes()


def test_uneven_experts_are_an_error(raises, arrangements: Any):
    """Evaluation runs them by `shard_map`, which training with a capacity does not."""
    model = uneven_model(num_heads=4)
    layer = MoeFeedForward.HParams.config(num_experts=3, capacity_factor=2.0)
    model.lm_tpl.stack_tpl.layer_tpl.feed_forward_tpl = layer
    axes = ("data", "expert", "tensor")
    partitioner, task = start(arrangements, [2, 2, 2], model=model, axes=axes)
    with raises(ConfigError, field="dimension 'expert'", value=3):
        partitioner.abstract_state(task)
