"""Compiles a step for devices that need not be here, and takes what compilers answer alike.

A compiler of TPUs refuses a program that is too large for the device, in words that hold its
figures; those of GPUs and CPUs compile anything and leave the comparison to the reader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from layerkit_runner.training.compiled_memory import temporary_bytes

# What changes the code that is made of a program, which nobody will run, and not the program.
_CPU_OPTIONS = {"xla_backend_optimization_level": 0}
# Without a GPU no kernel can be timed against another.
_ABSENT_GPU_OPTIONS = {"xla_gpu_autotune_level": 0}
# O1 of XLA's effort levels: a third of the time goes into a program that is much the same.
_QUICK_TPU_OPTIONS = {"optimization_level": 19}

_TOO_LARGE = re.compile(r"Ran out of memory|RESOURCE_EXHAUSTED")
# A first estimate rules some programs out; the rest are refused with what they take in all.
_TEMPORARIES = re.compile(r"HLO temporaries \((?P<bytes>[\d.]+[KMGT]?)\) exceeds", re.IGNORECASE)
_USED = re.compile(r"Used (?P<bytes>[\d.]+[KMGT]?) of [\d.]+[KMGT]? hbm", re.IGNORECASE)
_SCALES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes on one device, as a compiler reports them.

    Attributes:
      arguments: What the program reads of its arguments.
      outputs: All results.
      donated: The part of them that takes the place of arguments.
      temporaries: Everything else that exists at the moment when there is most.
      host_temporaries: In the memory of the host, per device.
      host_arguments: Likewise.
    """

    arguments: int
    outputs: int
    donated: int
    temporaries: int
    host_arguments: int = 0
    host_temporaries: int = 0


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What came of compiling.

    Attributes:
      hlo_text: The program; "" where it was refused, or could not be read.
      sizes: Its memory; None where it was refused.
      refusal: Why it was: that it is too large, in the compiler's words.
      unreadable: Why its program could not be read; None where it could.
      is_quick: Whether the compiler was asked for less effort than a run asks for.
    """

    hlo_text: str = ""
    sizes: Sizes | None = None
    refusal: str | None = None
    unreadable: str | None = None
    is_quick: bool = False


def tracing_for(device: jax.Device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which steps are traced and lowered for a device that need not be here.

    Kernels of Pallas ask for the kind of device, and otherwise get that of this machine.
    """
    kind = AbstractDevice(device.device_kind, num_cores=None, platform=device.platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))


def compile_step(
    lowered: Any, *, platform: str, is_here: bool, effort: str = "full"
) -> CompiledStep:
    """Compiles a lowered step.

    Args:
      lowered: What `jax.jit(…).lower(…)` returned.
      platform: Of its devices.
      is_here: Whether these are the devices of this machine.
      effort: `full`: the program is that of a run. `quick`: compilers of TPUs that are not here
        may do less; others are quick anyway.
    """
    is_quick = effort == "quick" and platform == "tpu" and not is_here
    options: dict[str, Any] = {}
    if platform == "cpu":
        options = _CPU_OPTIONS
    elif platform == "gpu" and not is_here:
        options = _ABSENT_GPU_OPTIONS
    elif is_quick:
        options = _QUICK_TPU_OPTIONS
    try:
        step = measured_step(lowered.compile(compiler_options=options), platform=platform)
    except jax.errors.JaxRuntimeError as error:
        if not _TOO_LARGE.search(str(error)):
            raise
        step = CompiledStep(refusal=str(error))
    return dataclasses.replace(step, is_quick=is_quick)


def measured_step(compiled: Any, *, platform: str) -> CompiledStep:
    """What a function that was compiled for devices of `platform` tells of itself."""
    stats = compiled.memory_analysis()
    sizes = Sizes(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        donated=stats.alias_size_in_bytes,
        temporaries=temporary_bytes(stats, platform=platform),
        host_arguments=stats.host_argument_size_in_bytes,
        host_temporaries=stats.host_temp_size_in_bytes,
    )
    try:
        return CompiledStep(compiled.as_text(), sizes)
    except jax.errors.JaxRuntimeError as error:
        # A compiler of another version than JAX may write what JAX cannot read.
        return CompiledStep(sizes=sizes, unreadable=str(error).partition("\n")[0])


def refused_sizes(refusal: str, *, arguments: int) -> Sizes:
    """Bytes of a step that a compiler refused, from the figures in its words.

    Args:
      refusal: What it said; words that are not known leave the step without temporaries.
      arguments: Of state and batch.
    """
    temporaries = 0
    if match := _TEMPORARIES.search(refusal):
        temporaries = _bytes(match["bytes"])
    elif match := _USED.search(refusal):
        temporaries = max(0, _bytes(match["bytes"]) - arguments)
    # The state is updated in place.
    return Sizes(arguments, outputs=arguments, donated=arguments, temporaries=temporaries)


def _bytes(text: str) -> int:
    """`17.5G`, in powers of two as XLA writes them."""
    number = text.rstrip("KMGT")
    return round(float(number) * _SCALES[text[len(number) :]])
