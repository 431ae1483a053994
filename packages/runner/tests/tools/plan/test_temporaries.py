from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit_runner.tools.plan.memory import TemporaryTensor, largest_temporaries

PROGRAM = """HloModule jit_train_step, is_scheduled=true

%fused (p: f32[8]) -> f32[4096] {
  %p = f32[8]{0} parameter(0)
  ROOT %inner = f32[4096]{0} broadcast(%p), metadata={op_name="jit(f)/inside"}
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
    "UP": '"jit(train_step)/jvp(lm)/while/body/closed_call/up/dot_general"',
    "OFFLOAD": '"jit(train_step)/offload"',
    "NORM": '"jit(train_step)/norm"',
}
for name, metadata in METADATA.items():
    PROGRAM = PROGRAM.replace(name, f"metadata={{op_name={metadata}}}")


def test_largest_temporaries_are_listed_by_operation():
    assert largest_temporaries(PROGRAM, most=10) == [
        TemporaryTensor(256, "f32[64]", 1, "done"),
        TemporaryTensor(128, "f32[32]", 1, "norm"),
        TemporaryTensor(96, "bf16[6,8]", 2, "jvp(lm)/up/dot_general"),
        TemporaryTensor(72, "bf16[6,6]", 1, "offload", "host"),
        TemporaryTensor(64, "f32[16]", 1, "norm"),
    ]
    assert len(largest_temporaries(PROGRAM, most=2)) == 2
    assert largest_temporaries("", most=2) == []


def test_temporaries_of_a_compiled_program():
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 256), (32, 8))]
    text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text()
    largest = largest_temporaries(text, most=1)[0]
    assert (largest.bytes_per_device, largest.shape) == (32 * 256 * 4, "f32[32,256]")
