from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit_runner.tools.plan.memory import TemporaryTensor, largest_temporaries

PROGRAM = """HloModule jit_train_step, is_scheduled=true

FileNames
1 "/env/lib/python3.11/site-packages/layerkit/layers/linears.py"
2 "/home/me/mine.py"

FunctionNames
1 "fprop"

FileLocations
1 {file_name_id=1 function_name_id=1 line=88 end_line=88 column=4 end_column=9}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=0 end_column=3}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

%fused (p: f32[8]) -> f32[4096] {
  %p = f32[8]{0} parameter(0)
  ROOT %inner = f32[4096]{0} broadcast(%p), metadata={op_name="jit(f)/inside" stack_frame_id=2}
}

%body (state: (s32[], bf16[6,8])) -> (s32[], bf16[6,8]) {
  %state = (s32[], bf16[6,8]{1,0}) parameter(0)
  %up = bf16[6,8]{1,0:T(8,128)(2,1)} dot(%a, %b), UP
  %again = bf16[6,8]{1,0} dot(%a, %b), UP
  %fast = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} copy(%up)
  %kept = bf16[6,6]{1,0:T(8,128)S(5)} copy(%up), OFFLOAD
  ROOT %tuple = (s32[], bf16[6,8]{1,0}) tuple(%i, %up)
}

ENTRY %main (x: f32[4096]) -> f32[64] {
  %x = f32[4096]{0} parameter(0)
  %loop = (s32[], bf16[6,8]{1,0}) while(%x), condition=%cond, body=%body
  %two = (f32[32]{0}, f32[16]{0}) fusion(%x), kind=kLoop, calls=%fused, NORM
  %start = (f32[4096]{0}, f32[4096]{0}) all-gather-start(%x), replica_groups={}
  ROOT %done = f32[64]{0} all-gather-done(%start)
}
"""
METADATA = {
    "UP": '"jit(train_step)/jvp(lm)/while/body/closed_call/up/dot_general" stack_frame_id=2',
    "OFFLOAD": '"jit(train_step)/offload" stack_frame_id=1',
    "NORM": '"jit(train_step)/norm" source_file="/home/me/mine.py" source_line=9',
}
for name, metadata in METADATA.items():
    PROGRAM = PROGRAM.replace(name, f"metadata={{op_name={metadata}}}")


def test_results_with_their_names_and_lines():
    assert largest_temporaries(PROGRAM, most=10) == [
        TemporaryTensor(256, "f32[64]", 1, "done", ""),
        TemporaryTensor(128, "f32[32]", 1, "norm", "me/mine.py:9"),
        TemporaryTensor(
            96, "bf16[6,8]", 2, "jvp(lm)/up/dot_general", "layerkit/layers/linears.py:88"
        ),
        TemporaryTensor(72, "bf16[6,6]", 1, "offload", "me/mine.py:7", "host"),
        TemporaryTensor(64, "f32[16]", 1, "norm", "me/mine.py:9"),
    ]
    assert len(largest_temporaries(PROGRAM, most=2)) == 2


def test_temporaries_of_a_compiled_program():
    def loss(w, x):
        return jnp.tanh(x @ w).sum()  # this line

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 256), (32, 8))]
    text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text()
    largest = largest_temporaries(text, most=1)[0]
    assert (largest.bytes_per_device, largest.shape) == (32 * 256 * 4, "f32[32,256]")
    line = loss.__code__.co_firstlineno + 1
    assert largest.source == f"plan/test_temporaries.py:{line}"


def test_program_without_metadata():
    text = "ENTRY %main (x: f32[4]) -> f32[4] {\n  ROOT %y = f32[4]{0} negate(%x)\n}\n"
    assert largest_temporaries(text, most=3) == [TemporaryTensor(16, "f32[4]", 1, "y", "")]
    assert largest_temporaries("", most=3) == []
