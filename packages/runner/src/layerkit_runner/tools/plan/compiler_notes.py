"""What a reader must know of a compiler to believe its figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from layerkit.layers.attention.cudnn import has_cudnn
from layerkit_runner.tools.plan.compiling import CompiledStep

QUICK_NOTE = (
    "compiled with less effort than a run asks for, which takes a third of the time; memory and"
    " traffic of large steps came within 3 % of a run's. --plan_effort=full compiles as a run does"
)


def compiler_notes(
    lowered: Any, step: CompiledStep, *, platform: str, is_here: bool
) -> Iterator[str]:
    """What the devices themselves would do differently with a step than its plan says.

    Args:
      lowered: The step before it was compiled.
      step: And after.
      platform: Of the devices that it was compiled for.
      is_here: Whether these are the devices of this machine.
    """
    if step.unreadable is not None:
        yield (
            "collectives and the largest results are not known, since JAX cannot read the program"
            f" ({step.unreadable}). The compiler may be newer than JAX: pip install"
            f" 'jax[tpu]=={jax.__version__}' installs the one that belongs to it"
        )
    if step.is_quick:
        yield QUICK_NOTE
    if platform == "cpu":
        yield from _cpu_notes(lowered.as_text(), step.hlo_text)
    if platform == "gpu" and not is_here:
        yield from _absent_gpu_notes(step.hlo_text)


def _absent_gpu_notes(hlo_text: str) -> Iterator[str]:
    """What cannot be known without a GPU."""
    yield (
        "compiled without a GPU: no kernels were timed against each other (autotuning), so a run"
        " may take others, with other workspace"
    )
    if "__cudnn$" in hlo_text:
        yield "cuDNN was not asked for its kernels, so that their workspace is not counted"
    elif not has_cudnn():
        yield (
            "cuDNN is not installed here, as it will be there: attention is planned without it."
            " pip install nvidia-cudnn-cu12 plans with it, and needs no GPU"
        )


def _cpu_notes(lowered_text: str, hlo_text: str) -> Iterator[str]:
    """What an accelerator would do differently with this step."""
    if "all-reduce(" in hlo_text:
        yield (
            "compiled for CPU, where XLA adds up gradients by all-reduce; on accelerators it uses"
            " reduce-scatter where they are sharded, half of the bytes"
        )
    if "bf16[" in hlo_text:
        yield (
            "compiled for CPU, where XLA computes bfloat16 in float32; temporaries and traffic of"
            " bfloat16 values are up to twice those of an accelerator"
        )
    # What jax.checkpoint puts around a recomputation that is not in a loop of its own.
    if "optimization_barrier" in lowered_text:
        yield (
            "compiled for CPU, where XLA undoes rematerialisation outside of repeated layers;"
            " temporaries are as if everything were kept, which an accelerator would not do"
        )
