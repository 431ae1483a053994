from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from layerkit_runner.tools.plan.live_memory import LiveMemory, TemporaryTensor, live_memory

# Sizes are 256, 128 and 64 bytes. `a` and `b` overlap, and so do `b` and the temporaries of the
# loop; the state of the loop, `kept` and the result take no further memory.
PROGRAM = """HloModule jit_step, is_scheduled=true

%body (state: (s32[], f32[32])) -> (s32[], f32[32]) {
  %state = (s32[], f32[32]{0}) parameter(0)
  %old = f32[32]{0} get-tuple-element(%state), index=1
  %inside = f32[16]{0:T(128)} slice(%old), metadata={op_name="jit(step)/transpose(jvp(lm))/x"}
  %fast = f32[512]{0:S(1)} copy(%inside)
  %new = f32[32]{0} dot(%inside, %old)
  ROOT %next = (s32[], f32[32]{0}) tuple(%state, %new)
}

%cond (state.1: (s32[], f32[32])) -> pred[] {
  %state.1 = (s32[], f32[32]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %a = f32[64]{0} exponential(%x), metadata={op_name="jit(step)/jvp(lm)/while/body/lm.fprop/a"}
  %b = f32[32]{0} slice(%a)
  %zero = s32[] constant(0)
  %init = (s32[], f32[32]{0}) tuple(%zero, %b)
  %loop = (s32[], f32[32]{0}) while(%init), condition=%cond, body=%body
  %last = f32[32]{0} get-tuple-element(%loop), index=1
  %start = (f32[32]{0}, f32[64]{0}) all-gather-start(%last), replica_groups={}
  %done = f32[64]{0} all-gather-done(%start)
  ROOT %result = f32[64]{0} add(%done, %x)
}
"""


def test_results_are_in_memory_from_their_instruction_to_their_last_use():
    memory = live_memory(PROGRAM)
    # x, a, b (with a), 0, init, loop, 2 + 6 instructions inside, last, start (with b), done, add.
    inside = [128, 128, 128, 128, 192, 192, 192, 128]
    assert memory == LiveMemory(
        bytes=[0, 256, 384, 128, 128, 128, *inside, 128, 384, 256, 256],
        backward=[10, 10],
        largest=[
            TemporaryTensor(256, "f32[64]", 1, "jvp(lm)/a"),
            TemporaryTensor(128, "f32[32]", 1, "b"),
        ],
    )
    assert live_memory("") is None


@pytest.mark.parametrize("num_layers", [2, 7])
def test_estimate_is_near_the_temporaries_of_the_compiler(num_layers):
    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x, weights)[0].sum()

    shapes = [(num_layers, 256, 256), (512, 256)]
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(jax.grad(loss)).lower(*inputs).compile()
    memory = live_memory(compiled.as_text())
    assert memory is not None
    reported = compiled.memory_analysis().temp_size_in_bytes
    # Compilers that reuse the array of an input in place save up to one result of a layer.
    assert max(memory.bytes) == pytest.approx(reported, abs=512 * 256 * 4)
    assert memory.largest[0].shape == f"f32[{num_layers},512,256]"
