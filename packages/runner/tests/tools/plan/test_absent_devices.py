"""Plans for TPUs and GPUs that are not here, by their real compilers, in processes of their own."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.slow  # the compilers take tens of seconds for the smallest step

needs_tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the compiler of TPUs is not installed"
)
needs_cuda = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="the compiler of NVIDIA GPUs is not installed",
)


def state_and_batch(result):
    kinds = ("weights", "non_trainable", "averages", "optimizer", "batch")
    return sum(result["memory"][kind] for kind in kinds)


def unread(result):
    """Bytes of the fields of a batch that the model does not read."""
    sizes = {tensor["path"]: tensor["bytes_per_device"] for tensor in result["tensors"]}
    return sizes["batch/paddings"]


@needs_cuda
def test_plan_of_gpus_in_two_nodes_counts_memory_and_slow_traffic(plan_json):
    result = plan_json("--target=h100x16", "--fdl.MESH=[1,8,1]", "--fdl.SLICES=[2,1,1]")
    assert (result["target"], result["num_devices"], result["num_slices"]) == ("h100x16", 16, 2)
    assert result["device"]["peak_flops"] == 989.4e12
    assert result["fits"] is True
    # Layouts of GPUs have no padding, so the compiler counts the bytes of the shards.
    assert result["memory"]["arguments"] == state_and_batch(result) - unread(result)
    assert result["memory"]["temporaries"] > 0
    for traffic in result["collectives"]:
        crosses = "data" in traffic["axes"] or traffic["axes"] == "mixed"
        assert (traffic["bytes_slow"] > 0) == crosses, traffic
    assert {"fsdp", "data"} <= {each["axes"] for each in result["collectives"]}
    assert any("softmax" in each["name"] for each in result["live"]["largest"])
    assert [note for note in result["notes"] if "compiled without a GPU" in note]


@needs_tpu
def test_plan_of_tpus_in_two_slices_counts_slow_traffic(plan_json):
    result = plan_json("--target=v5e:2x2*2", "--fdl.MESH=[1,4,1]", "--fdl.SLICES=[2,1,1]")
    assert (result["num_devices"], result["num_slices"]) == (8, 2)
    assert result["device"]["device_kind"] == "TPU v5 lite"
    assert result["fits"] is True
    # Each device adds up its part of the gradients with that of its partner in the other slice.
    slow = sum(each["bytes_slow"] for each in result["collectives"])
    assert slow >= result["memory"]["weights"]
    assert [each for each in result["collectives"] if each["axes"] == "fsdp"]


@needs_tpu
def test_step_that_is_too_large_for_a_tpu_does_not_fit(plan_json):
    result = plan_json(
        *("--target=v5e:1x1", "--fdl.MESH=[1,1,1]", "--fdl.MODEL_DIMS=16384"),
        *("--fdl.PERCORE_BATCH_SIZE=65536", "--fdl.NUM_LAYERS=2"),
    )
    assert result["fits"] is False
    assert "HBM" in result["refusal"]
    assert result["memory"]["peak"] > result["device"]["memory_bytes"]


@needs_tpu
def test_compiler_flags_change_the_program(plan_json):
    # One mesh axis spans a torus of three dimensions, and the weights are large.
    flags = ["--target=v4:4x4x4", "--fdl.MESH=[1,64,1]", "--fdl.MODEL_DIMS=1024"]
    plain, with_flags = (plan_json(*flags, *more) for more in ([], ["--xla_flags_preset=tpu_fsdp"]))
    begin = "compiled with LIBTPU_INIT_ARGS "
    note = begin + "--xla_enable_async_all_gather=true"
    assert [line for line in with_flags["notes"] if line.startswith(note)]
    assert not [line for line in plain["notes"] if line.startswith(begin)]
    # Weights are gathered by all-gathers, which send half of what all-reduces send.
    before, after = (
        {each["kind"] for each in result["collectives"]} for result in (plain, with_flags)
    )
    assert (before, after) == ({"all-reduce"}, {"all-reduce", "all-gather"})
    sent = [
        sum(each["bytes_sent"] for each in result["collectives"]) for result in (plain, with_flags)
    ]
    assert sent[1] < 0.75 * sent[0]


@needs_tpu
def test_optimizer_state_in_host_memory_needs_no_device_memory(plan_json):
    target = "--target=v5p:2x2x2"
    plain = plan_json(target)["memory"]
    host = plan_json(target, "--fdl.partitioner.offload_optimizer_state=True")["memory"]
    moved = plain["optimizer"] - host["optimizer"]
    assert 0 < moved <= host["host_arguments"]
    assert host["host_temporaries"] == 0
    assert plain["arguments"] - host["arguments"] >= moved
    assert host["peak"] < plain["peak"]
