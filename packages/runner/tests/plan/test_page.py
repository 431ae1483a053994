from __future__ import annotations

import json

import pytest

from layerkit_runner.byte_sizes import size_text
from layerkit_runner.plan import BatchPlan, Plan
from layerkit_runner.plan.collectives import Traffic
from layerkit_runner.plan.memory import Memory, TensorMemory
from layerkit_runner.plan.page import plan_json, plan_page

PLAN = Plan(
    experiment="lm.Small",
    target="cpu",
    num_devices=8,
    versions={"layerkit": "0.1.0", "jax": "0.10.2"},
    partitioner="SpmdPartitioner",
    mesh={"data": 1, "fsdp": 4, "tensor": 2},
    num_params=1_234_567,
    param_dtypes=["float32"],
    batch=BatchPlan(
        rows=4,
        rows_per_device=0.5,
        num_shards=4,
        split_over=["data", "fsdp"],
        length=1024,
        tokens=4096,
        fields={"ids": "int32[4, 1024]", "labels": "int32[4, 1024]"},
    ),
    flops_per_step=3.2e12,
    flops_per_device=4e11,
    memory=Memory(
        weights=617_284,
        non_trainable=0,
        averages=0,
        optimizer=1_234_572,
        batch=8_192,
        temporaries=2_500_000_000,
        outputs=1_851_956,
        donated=1_851_856,
        arguments=1_856_048,
        peak=2_501_856_148,
    ),
    tensors=[
        TensorMemory("params/w", "weights", [8, 64], "float32", [["fsdp", "tensor"], []], 256),
        TensorMemory("params/b", "weights", [], "bfloat16", [], 2),
    ],
    collectives=[
        Traffic("all-gather", "fsdp", 1200, 1_500_000, is_exact=True),
        Traffic("all-reduce", "data+tensor", 3, 96, is_exact=False),
    ],
    notes=["attention backend: xla"],
    trace_seconds=1.25,
    compile_seconds=3.5,
)

PAGE = """\
plan of lm.Small
for 8 simulated cpu device(s), layerkit 0.1.0, jax 0.10.2

parameters   1,234,567 (float32)
mesh         data 1 × fsdp 4 × tensor 2 (SpmdPartitioner)
batch        0.5 rows per device × 8 = 4 rows; over data × fsdp 4 shard(s) of 1
             × 1024 positions = 4,096 tokens per step
             ids, labels
model FLOPs  3.200e+12 per step, 4.000e+11 per device

memory per device
  weights           617 kB
  non-trainable        0 B
  averages             0 B
  optimizer        1.23 MB
  batch            8.19 kB
  temporaries       2.5 GB  gradients, activations, workspace
  outputs            100 B  besides 1.85 MB in place of the old state
  peak              2.5 GB  inputs that the step reads + temporaries + outputs

largest of 2 tensors, per device
       256 B  params/w  float32[8/fsdp/tensor, 64]
         2 B  params/b  bfloat16[]

collectives of one step, bytes sent by each device
  all-gather         fsdp              1,200 ×      1.5 MB
  all-reduce         data+tensor           3 ×        96 B  (not exact: a loop of unknown length)

note: attention backend: xla
traced in 1.2 s, compiled in 3.5 s; nothing was run or written"""


def test_the_page():
    assert plan_page(PLAN) == PAGE


def test_json_has_everything_under_the_names_of_the_attributes():
    text = plan_json(PLAN)
    assert "\n" not in text
    found = json.loads(text)
    assert found["mesh"] == {"data": 1, "fsdp": 4, "tensor": 2}
    assert found["batch"]["rows_per_device"] == 0.5
    assert found["memory"]["peak"] == 2_501_856_148
    assert found["tensors"][0]["sharding"] == [["fsdp", "tensor"], []]
    assert found["collectives"][0] == {
        "kind": "all-gather",
        "axes": "fsdp",
        "executions": 1200,
        "bytes_sent": 1_500_000,
        "is_exact": True,
    }
    assert set(found) == set(Plan.__dataclass_fields__)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (1_540_000_000, "1.54 GB"),
        (2_000_000_000_000_000, "2000 TB"),
    ],
)
def test_sizes_for_people(size, text):
    assert size_text(size) == text
