from __future__ import annotations

import math

import jax
import pytest

from layerkit_runner.data.host_inputs import make_input
from layerkit_runner.errors import UsageError
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools.plan.collectives import collective_traffic
from layerkit_runner.tools.plan.compiling import measured_step
from layerkit_runner.tools.plan.memory import step_memory, tensor_memory
from layerkit_runner.tools.plan.plan import make_plan

# Of SmallLm: embedding 32·16; per layer four attention projections 16·16, two of the feed-forward
# 16·32, and two norms with scale and bias; one such norm at the end.
NUM_PARAMS = 32 * 16 + 3 * (4 * 16 * 16 + 2 * 16 * 32 + 2 * 2 * 16) + 2 * 16


def live_bytes(tree, device):
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def check_live_arrays(resolved, devices, plan):
    """Compares a plan with the arrays of a real step, on every device and to the byte."""
    memory = plan.memory
    partitioner, task = build_parts(resolved)
    partitioner.start(devices)
    partitioner.bind(task)
    state = partitioner.init_fn(task)()
    batch = partitioner.put_batch(make_input(resolved.datasets[0], partitioner).get_next())
    compiled = partitioner.train_step_fn(task).lower(state, batch).compile()
    for device in devices:
        assert memory.weights == live_bytes(state.params, device)
        assert memory.non_trainable == live_bytes(state.non_trainable, device)
        assert memory.optimizer == live_bytes((state.opt_state, state.step), device)
        assert memory.batch == live_bytes(batch, device)
        # Of the fields of a batch, the model reads all but `paddings`.
        unread = live_bytes(batch.paddings, device)
        assert memory.arguments == live_bytes((state, batch), device) - unread
        assert memory.donated == live_bytes(state, device)
    abstract = partitioner.abstract_state(task)
    stored = partitioner.abstract_stored_state(task)
    tensors = tensor_memory(abstract, batch, stored=stored)
    assert plan.memory == step_memory(tensors, measured_step(compiled, platform="cpu"))
    assert plan.collectives == collective_traffic(compiled.as_text(), plan.mesh)
    results = compiled(state, batch)
    # On CPU, XLA counts the table of pointers to the results too.
    pointers = 8 * len(jax.tree.leaves(results))
    for device in devices:
        assert memory.outputs == live_bytes(results, device) + pointers
    assert memory.peak == memory.arguments + memory.temporaries + memory.outputs - memory.donated
    # A gradient of every weight is there at once.
    assert memory.temporaries > memory.weights


def test_plan_matches_the_live_arrays_of_a_step(planned):
    check_live_arrays(*planned)


@pytest.mark.slow  # one of each kind is above
@pytest.mark.parametrize("mesh", [[1, 2, 2], [1, 4, 1], [2, 1, 2], [1, 3, 1]])
def test_plan_matches_the_live_arrays_on_other_meshes(small_lm, mesh):
    resolved = resolve(small_lm(MESH=mesh, NUM_LAYERS=1))
    devices = jax.devices("cpu")[: math.prod(mesh)]
    plan = make_plan(resolved, devices)
    assert (plan.mesh["fsdp"] == 3) == any(note.startswith("padded: ") for note in plan.notes)
    check_live_arrays(resolved, devices, plan)


def test_plan_describes_model_batch_and_tensors(plan_of):
    plan = plan_of("spmd").plan
    assert plan.mesh == {"data": 2, "fsdp": 2, "tensor": 2}
    assert plan.num_params == NUM_PARAMS
    assert plan.param_dtypes == ["float32"]

    # Two rows of 8 tokens for each pair of tensor-parallel devices.
    assert (plan.batch.rows, plan.batch.rows_per_device, plan.batch.tokens) == (8, 1, 64)
    assert (plan.batch.num_shards, plan.batch.split_over) == (4, ["data", "fsdp"])
    assert plan.batch.fields["ids"] == "int32[8, 8]"

    # Per token and layer, 2 FLOPs for each weight of a product and, attention being causal, half of
    # 2 · 2 · length · dims; then the softmax. Three times that for forward and backward.
    layer = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 2 * 8 * 16 / 2
    assert plan.flops_per_step == 3 * 64 * (3 * layer + 2 * 16 * 32)
    assert plan.flops_per_device == plan.flops_per_step / 8

    tensors = {tensor.path: tensor for tensor in plan.tensors}
    up = tensors["params/lm/stack/repeat/sub/feed_forward/up/w"]
    assert (up.kind, up.shape, up.dtype) == ("weights", [3, 16, 32], "float32")
    assert up.sharding == [[], ["fsdp"], ["tensor"]]
    assert up.bytes_per_device == 3 * 8 * 16 * 4
    assert tensors["batch/ids"].sharding == [["data", "fsdp"], []]
    sizes = [tensor.bytes_per_device for tensor in plan.tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert [note for note in plan.notes if "all-reduce" in note]
    assert not [note for note in plan.notes if "undoes rematerialization" in note]


@pytest.mark.slow
def test_traffic_of_repeated_layers_grows_with_their_number(small_lm):
    def gathers(num_layers):
        plan = make_plan(resolve(small_lm(NUM_LAYERS=num_layers, MESH=[1, 4, 1])), devices)
        (result,) = [each for each in plan.collectives if each.kind == "all-gather"]
        assert result.axes == "fsdp"
        return result

    devices = jax.devices("cpu")[:4]
    # Forward and again backward, each layer's six matrices of 16·16 or 16·32 floats are gathered
    # from four devices, three quarters of them from others.
    few, many = gathers(3), gathers(5)
    assert many.bytes_sent - few.bytes_sent == 2 * 2 * (4 * 16 * 16 + 2 * 16 * 32) * 4 * 3 // 4
    assert many.executions - few.executions == 2 * 2 * 6


def test_under_pmap_each_gradient_is_added_over_all_devices(plan_of):
    (reduce,) = plan_of("pmap").plan.collectives
    assert (reduce.kind, reduce.axes) == ("all-reduce", "batch")
    # 2 · size · 7/8; beside the gradients there are some scalars, metrics and their weights.
    gradients = 2 * 4 * NUM_PARAMS * 7 // 8
    assert 0 < reduce.bytes_sent - gradients < 200


def test_sizes_that_the_mesh_does_not_divide_raise(raises, small_lm):
    resolved = resolve(small_lm(MESH=[1, 1, 4]))
    with raises(UsageError, problem="cannot be split evenly", value=2):
        make_plan(resolved, jax.devices("cpu")[:4])


@pytest.mark.slow
def test_padding_counts_as_memory_and_not_as_parameters(small_lm):
    plan = make_plan(resolve(small_lm(MESH=[1, 3, 1], NUM_LAYERS=1)), jax.devices("cpu")[:3])
    assert plan.num_params == 32 * 16 + 4 * 16 * 16 + 2 * 16 * 32 + 2 * 2 * 16 + 2 * 16
    (embedding,) = [each for each in plan.tensors if each.path == "params/lm/softmax/w"]
    assert (embedding.shape, embedding.bytes_per_device) == ([32, 16], 32 * 6 * 4)
    (note,) = [note for note in plan.notes if note.startswith("padded: ")]
    assert "embed 16 → 18 over fsdp (lm/softmax/w, " in note
