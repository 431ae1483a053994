"""The fields that users override most change the planned program of Pile126M as they should.

The model is that of Pile126M at a small size; what is planned is its training step, on some of the
eight simulated devices, and what is asserted is what `--mode=plan --json` prints. What a CPU would
compute in float32 anyway, or keep anyway, is asked of the compiler of GPUs, where it is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from typing import Any

import jax
import pytest

from layerkit_experiments.lm.pile import Pile126M
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools.plan.plan import make_plan
from layerkit_runner.tools.plan.targets import planned_target, target_devices

SMALL: dict[str, Any] = {
    "NUM_LAYERS": 2,
    "MODEL_DIMS": 64,
    "HIDDEN_DIMS": 256,
    "NUM_HEADS": 4,
    "DIMS_PER_HEAD": 16,
    "VOCAB_SIZE": 512,
    "MAX_SEQ_LEN": 32,
    "PERCORE_BATCH_SIZE": 1.0,
    "ICI_MESH_SHAPE": [2, 1, 1],
    "DCN_MESH_SHAPE": None,
}


def planned(target: str = "cpux2", **fields: Any) -> dict[str, Any]:
    return _planned(target, json.dumps(fields, sort_keys=True))


@functools.cache
def _planned(name: str, fields: str) -> dict[str, Any]:
    resolved = resolve(Pile126M(**{**SMALL, **json.loads(fields)}))
    parts = build_parts(resolved)
    target = planned_target(parts[0], target=name)
    simulated = jax.devices("cpu")[: target.num_devices]
    devices = simulated if name.startswith("cpu") else target_devices(target)
    made = make_plan(resolved, devices, parts=parts, target=target)
    plan: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(made)))
    return plan


def planned_for_tpus(target: str, **fields: Any) -> dict[str, Any]:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'layerkit-runner[plan-tpu]'")
    return planned(target, **fields)


def planned_for_gpus(target: str = "h100x2", **fields: Any) -> dict[str, Any]:
    if not any(map(importlib.util.find_spec, ["jax_cuda12_plugin", "jax_cuda13_plugin"])):
        pytest.skip("JAX's CUDA plugin is not installed: pip install 'layerkit-runner[plan-cuda]'")
    return planned(target, **fields)


def matrix(plan: dict[str, Any], path: str) -> dict[str, Any]:
    (result,) = [each for each in plan["tensors"] if each["path"] == f"params/lm/{path}"]
    return result


def traffic(plan: dict[str, Any]) -> set[str]:
    """The mesh axes over which something is sent."""
    return {each["axes"] for each in plan["collectives"]}


@pytest.mark.experiments
def test_half_a_row_on_each_of_two_devices_that_share_it():
    plan = planned(ICI_MESH_SHAPE=[1, 1, 2], PERCORE_BATCH_SIZE=0.5)
    batch = plan["batch"]
    assert (batch["rows"], batch["rows_per_device"], batch["num_shards"]) == (1, 0.5, 1)
    assert batch["fields"]["ids"] == "int32[1, 32]"
    up = matrix(plan, "stack/layers_0/feed_forward/up/w")
    assert up["sharding"] == [[], ["tensor"]]
    assert up["bytes_per_device"] == 64 * 256 * 4 // 2


@pytest.mark.experiments
def test_plan_follows_ici_mesh_shape():
    by_data, by_fsdp = planned(), planned(ICI_MESH_SHAPE=[1, 2, 1])
    assert (by_data["mesh"]["data"], by_fsdp["mesh"]["fsdp"]) == (2, 2)
    assert by_data["memory"]["weights"] == 4 * by_data["num_params"]
    assert by_fsdp["memory"]["weights"] < 0.51 * by_data["memory"]["weights"]
    assert by_fsdp["memory"]["optimizer"] < 0.51 * by_data["memory"]["optimizer"]
    assert traffic(by_data) == {"data"}
    assert "fsdp" in traffic(by_fsdp)
    kinds = {each["kind"] for each in by_fsdp["collectives"]}
    assert "all-gather" in kinds
    assert by_data["flops_per_step"] == by_fsdp["flops_per_step"]


@pytest.mark.experiments
def test_plan_follows_dcn_mesh_shape():
    one, two = planned(), planned("cpux4", DCN_MESH_SHAPE=[2, 1, 1])
    assert (one["mesh"]["data"], two["mesh"]["data"]) == (2, 4)
    assert (one["batch"]["rows"], two["batch"]["rows"]) == (2, 4)
    assert two["flops_per_step"] == 2 * one["flops_per_step"]
    assert two["flops_per_device"] == one["flops_per_device"]
    # What an ICI_MESH_SHAPE of the same size does not do: gradients go from slice to slice.
    flat = planned("cpux4", ICI_MESH_SHAPE=[4, 1, 1])
    assert flat["mesh"] == two["mesh"]
    assert [plan["num_slices"] for plan in (one, flat, two)] == [1, 1, 2]
    slow = [sum(each["bytes_slow"] for each in plan["collectives"]) for plan in (flat, two)]
    assert slow[0] == 0
    assert slow[1] > 0


@pytest.mark.experiments
def test_plan_follows_fprop_dtype():
    bfloat16, float32 = planned_for_gpus(), planned_for_gpus(FPROP_DTYPE="float32")
    assert bfloat16["param_dtypes"] == float32["param_dtypes"] == ["float32"]
    assert bfloat16["memory"]["weights"] == float32["memory"]["weights"]
    assert bfloat16["memory"]["temporaries"] < float32["memory"]["temporaries"]
    kinds = [
        {each["shape"].partition("[")[0] for each in p["live"]["largest"]}
        for p in (bfloat16, float32)
    ]
    assert "bf16" in kinds[0]
    assert "bf16" not in kinds[1]


@pytest.mark.experiments
def test_full_checkpoint_policy_keeps_only_the_inputs_of_layers():
    rows, length, dims = 8, 2048, 768
    fields = {
        "PERCORE_BATCH_SIZE": float(rows),
        "MAX_SEQ_LEN": length,
        "MODEL_DIMS": dims,
        "HIDDEN_DIMS": 4 * dims,
        "NUM_HEADS": 12,
        "DIMS_PER_HEAD": 64,
    }
    kept, recomputed, by_pax, deeper = (
        planned_for_gpus(**fields, NUM_LAYERS=layers, CHECKPOINT_POLICY=policy)
        for policy, layers in (("none", 2), ("full", 2), ("SAVE_NOTHING", 2), ("full", 4))
    )
    assert by_pax["memory"] == recomputed["memory"]
    assert recomputed["flops_per_step"] == kept["flops_per_step"]  # those of the model
    assert recomputed["memory"]["temporaries"] < 0.7 * kept["memory"]["temporaries"]
    growth = deeper["memory"]["temporaries"] - recomputed["memory"]["temporaries"]
    layer_input = rows * length * dims * 2  # in bfloat16
    gradients = 2 * (4 * dims * dims + 2 * dims * 4 * dims)  # of the weights, in bfloat16
    assert growth < 2.1 * (layer_input + gradients)


@pytest.mark.experiments
def test_checkpoint_policy_of_repeated_layers():
    fields = {"USE_REPEATED_LAYER": True, "NUM_LAYERS": 8, "PERCORE_BATCH_SIZE": 8.0}
    kept, recomputed, by_pax = (
        planned(**fields, CHECKPOINT_POLICY=policy) for policy in ("none", "full", "SAVE_NOTHING")
    )
    assert recomputed["memory"]["temporaries"] < 0.5 * kept["memory"]["temporaries"]
    assert by_pax["memory"] == recomputed["memory"]
    assert recomputed["flops_per_step"] == kept["flops_per_step"]


@pytest.mark.experiments
@pytest.mark.parametrize("target", ["h100x4", "v5e:2x2"])
def test_sequence_parallelism_scatters_the_sums_of_products(target):
    fields = {
        "USE_REPEATED_LAYER": True,
        "NUM_LAYERS": 16,
        "CHECKPOINT_POLICY": "full",
        "MAX_SEQ_LEN": 256,
        "ICI_MESH_SHAPE": [1, 1, 4],
    }
    planned_on = planned_for_tpus if target.startswith("v5e") else planned_for_gpus
    whole, split = (planned_on(target, **fields, SEQUENCE_PARALLEL=on) for on in (False, True))
    sent = [{each["kind"]: each["bytes_sent"] for each in p["collectives"]} for p in (whole, split)]
    # The loss of a GPU gathers four numbers of each token from each of the other three devices.
    assert sent[0].pop("all-gather", 0) == (4 * 256 * 4 * 4 * 3 if target == "h100x4" else 0)
    assert set(sent[0]) == {"all-reduce"}
    # Forward, recomputed (attention alone) and backward, a layer adds five outputs over tensor.
    row = 256 * 64 * 2 * 4  # the 4 rows of the batch in bfloat16
    assert sent[1]["reduce-scatter"] >= 16 * 5 * row * 3 / 4
    # What remains are gradients of norms and sums of the loss.
    assert sent[1]["all-reduce"] < 0.05 * sent[0]["all-reduce"]
    if target == "h100x4":  # a TPU pads 64 features to 128
        assert split["memory"]["temporaries"] < 0.8 * whole["memory"]["temporaries"]


@pytest.mark.experiments
def test_muon_exchanges_no_more_at_a_time_than_the_gather_of_a_layer():
    dims, layers = 128, 16
    fields = {
        "USE_REPEATED_LAYER": True,
        "NUM_LAYERS": layers,
        "MODEL_DIMS": dims,
        "HIDDEN_DIMS": dims,
        "NUM_HEADS": 4,
        "DIMS_PER_HEAD": 32,
        "ICI_MESH_SHAPE": [1, 8, 1],
    }
    adamw, muon = (
        planned_for_gpus("h100x8", **fields, OPTIMIZER=name) for name in ("adamw", "muon")
    )
    exchanges = [one for one in muon["collectives"] if one["kind"] == "all-to-all"]
    assert [one for one in muon["collectives"] if one not in exchanges] == adamw["collectives"]
    gather = dims * dims * 2 * 7 / 8  # of one matrix, in bfloat16
    assert (
        0
        < sum(one["bytes_sent"] for one in exchanges)
        <= gather * sum(one["executions"] for one in exchanges)
    )
    # A device holds whole matrices of one exchange, not of the stack.
    growth = muon["memory"]["temporaries"] - adamw["memory"]["temporaries"]
    assert growth < layers * dims * dims * 4
