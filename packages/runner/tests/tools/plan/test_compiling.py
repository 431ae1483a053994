from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.layers import PipelinedTransformer
from layerkit_runner.tools.plan.compiling import (
    CompiledStep,
    Sizes,
    compile_step,
    compiler_notes,
    measured_step,
    offloads_activations,
    refused_sizes,
)
from layerkit_runner.tools.plan.memory import TensorMemory, step_memory

ESTIMATED = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory"
    " required for HLO temporaries (828.98G) exceeds available HBM (15.75G). HLO module: jit_f."
)
COUNTED = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.5G of 15.75G hbm."
    " Exceeded hbm capacity by 1.75G."
)
GIB = 2**30


@pytest.mark.parametrize(
    ("refusal", "temporaries"),
    [
        (ESTIMATED, round(828.98 * GIB)),
        (COUNTED, round(16.5 * GIB)),  # a GiB of them is the arguments'
        ("RESOURCE_EXHAUSTED: a message of an unknown form", 0),
    ],
)
def test_sizes_are_read_from_the_compilers_error(refusal, temporaries):
    assert refused_sizes(refusal, arguments=GIB) == Sizes(GIB, GIB, GIB, temporaries)


def test_memory_of_a_step_that_the_compiler_rejects():
    state = TensorMemory("params/w", "weights", [2**28], "float32", [[]], GIB)
    memory = step_memory([state], CompiledStep(refusal=COUNTED))
    assert (memory.weights, memory.arguments, memory.outputs - memory.donated) == (GIB, GIB, 0)
    assert memory.peak == round(17.5 * GIB)


def test_measured_step_has_program_and_sizes():
    lowered = jax.jit(lambda x: jnp.sin(x) * 2, donate_argnums=0).lower(np.ones(256, np.float32))
    step = compile_step(lowered, platform="cpu", is_here=True)
    assert step.refusal is None
    assert step.sizes is not None
    assert (step.sizes.arguments, step.sizes.outputs, step.sizes.donated) == (1024, 1024, 1024)
    assert "sine" in step.hlo_text


@pytest.mark.parametrize(
    ("policy", "in_host_memory", "count"),
    [("offload:stage_input", 0, 1), ("offload:stage_input", 1024, 0), ("full", 0, 0)],
)
def test_a_note_says_that_nothing_is_offloaded(policy, in_host_memory, count):
    task = PipelinedTransformer.HParams.config(stage_remat=policy)
    step = CompiledStep(sizes=Sizes(1, 1, 1, 1, host_temporaries=in_host_memory))
    offloads = offloads_activations(task)
    assert len([*compiler_notes(step, platform="tpu", is_here=True, offloads=offloads)]) == count


def test_other_errors_of_a_compiler_are_not_taken_for_a_lack_of_memory():
    lowered = jax.jit(jnp.sin).lower(1.0)
    broken = SimpleNamespace(compile=lambda **_: lowered.compile({"no_such_option": 1}))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        compile_step(broken, platform="cpu", is_here=True)


def test_absent_gpu_whose_first_tiles_do_not_fit_is_planned_without_triton():
    lowered = jax.jit(jnp.sin).lower(np.ones(256, np.float32))

    def compile_for_gpu(compiler_options):
        if "xla_gpu_enable_triton_gemm" not in compiler_options:
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that …")
        return lowered.compile(compiler_options)

    step = compile_step(SimpleNamespace(compile=compile_for_gpu), platform="gpu", is_here=False)
    assert step.sizes is not None
    notes = compiler_notes(step, platform="gpu", is_here=False)
    assert any("cuBLAS alone" in note for note in notes)


def test_a_program_that_jax_cannot_read_leaves_its_sizes():
    compiled = jax.jit(jnp.sin).lower(np.ones(256, np.float32)).compile()

    class Unreadable:
        memory_analysis = compiled.memory_analysis

        def as_text(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: an instruction that is not known")

    step = measured_step(Unreadable(), platform="cpu")
    assert (step.hlo_text, step.refusal) == ("", None)
    assert step.sizes is not None
    assert step.sizes.arguments == 1024
    (note,) = compiler_notes(step, platform="tpu", is_here=False)
    assert "an instruction that is not known" in note
    assert f"'jax[tpu]=={jax.__version__}'" in note
