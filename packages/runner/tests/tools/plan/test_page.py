from __future__ import annotations

import pytest

from layerkit_runner.files.text import size_text
from layerkit_runner.tools.plan.bounds import PipelinePlan, device_work, step_bounds
from layerkit_runner.tools.plan.collectives import Traffic
from layerkit_runner.tools.plan.hardware import device_kind
from layerkit_runner.tools.plan.memory import Memory, TemporaryTensor, TensorMemory
from layerkit_runner.tools.plan.page import plan_page
from layerkit_runner.tools.plan.plan import BatchPlan, Plan

H100 = device_kind("h100")
MEMORY = Memory(
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
)
COLLECTIVES = [
    Traffic("all-gather", "fsdp", 1200, 1_500_000, is_exact=True, bytes_slow=500_000),
    Traffic("all-reduce", "data+tensor", 3, 96, is_exact=False),
]
PLAN = Plan(
    experiment="lm.Small",
    target="h100x16",
    num_devices=16,
    versions={"layerkit": "0.1.0", "jax": "0.10.2"},
    partitioner="SpmdPartitioner",
    mesh={"stage": 2, "data": 1, "fsdp": 4, "tensor": 2},
    num_params=1_234_567,
    param_dtypes=["float32"],
    batch=BatchPlan(
        rows=8,
        rows_per_device=0.5,
        num_shards=4,
        split_over=["data", "fsdp"],
        length=1024,
        tokens=8192,
        fields={"ids": "int32[8, 1024]", "labels": "int32[8, 1024]"},
        parts=2,
    ),
    flops_per_step=6.4e14,
    flops_per_device=4e13,
    memory=MEMORY,
    tensors=[
        TensorMemory("params/w", "weights", [8, 64], "float32", [["fsdp", "tensor"], []], 256),
        TensorMemory("params/b", "weights", [], "bfloat16", [], 2),
    ],
    collectives=COLLECTIVES,
    notes=["attention backend: xla"],
    trace_seconds=1.25,
    compile_seconds=3.5,
    device=H100,
    num_slices=2,
    fits=True,
    temporaries=[TemporaryTensor(1_000_000_000, "f32[2,1024,122]", 3, "jvp(lm)/softmax")],
    bounds=step_bounds(
        device_work(MEMORY, COLLECTIVES, flops=5e13), H100, model_flops_per_device=4e13, tokens=8192
    ),
    pipelines=[PipelinePlan(2, 4, 1, 1, 5, 0.2)],
)

PAGE = """\
plan of lm.Small
for h100x16: 16 × NVIDIA H100 80GB HBM3 in 2 nodes; layerkit 0.1.0, jax 0.10.2
fits: 2.5 GB on each device, 3 % of the 78.1 GB available to programs of 84.9 GB

parameters   1,234,567 (float32)
mesh         stage 2 × data 1 × fsdp 4 × tensor 2 (SpmdPartitioner)
batch        0.5 rows per device × 16 = 8 rows; over data × fsdp 4 shard(s) of 2
             in 2 parts of 4 rows, gradients added up
             × 1024 positions = 8,192 tokens per step
             ids, labels
pipeline     2 stages, 4 microbatches of 1 rows; idle 1 of 5 ticks, 20.0 % bubble
model FLOPs  6.400e+14 per step, 4.000e+13 per device

memory per device
  weights           617 kB
  optimizer        1.23 MB
  batch            8.19 kB
  temporaries       2.5 GB  gradients, activations, workspace
  outputs            100 B  besides 1.85 MB in place of the old state
  peak              2.5 GB  inputs that the step reads + temporaries + outputs

largest of 2 tensors of state and batch, per device
       256 B  params/w  float32[8/fsdp/tensor, 64]
         2 B  params/b  bfloat16[]

largest results of the step, per device; not all exist at the same time
        1 GB  3 × f32[2,1024,122]  jvp(lm)/softmax

collectives of one step, bytes sent by each device
  all-gather         fsdp              1,200 ×      1.5 MB  500 kB of it slow
  all-reduce         data+tensor           3 ×        96 B  (not exact: branch or unknown loop)

lower bounds of the step time
  compute          50.5 ms  1.25 × the model's FLOPs at 989.4 TFLOP/s  ← the bound
  memory           1.49 ms  5 GB at 3.35 TB/s
  fast network     2.22 µs  1 MB at 450 GB/s
  slow network       10 µs  500 kB at 50 GB/s
  full overlap     50.5 ms  162,103 tokens/s, MFU 80 %, if all communication overlaps with compute
  no overlap       50.5 ms  162,064 tokens/s, MFU 80 %, if no communication overlaps with compute

note: attention backend: xla
traced in 1.2 s, compiled in 3.5 s; nothing was run or written"""


def test_page_equals_the_expected_text():
    assert plan_page(PLAN) == PAGE


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
def test_sizes_are_rounded_to_three_digits(size, text):
    assert size_text(size) == text
