"""Compilation of a step, with uniform results from the compilers of all platforms.

The TPU compiler rejects a program that is too large for the device, with figures in its message.
Those of GPUs and CPUs compile a program of any size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from layerkit.config import Config, field_names, walk_configs
from layerkit_runner.step.step_cost import temporary_bytes

# This changes the machine code, which is never run, and not the program.
_CPU_OPTIONS = {"xla_backend_optimization_level": 0}
# Without a GPU no kernel can be timed against another.
_ABSENT_GPU_OPTIONS = {"xla_gpu_autotune_level": 0}
# Autotuning would pass over tiles that do not fit a product. Without it they end the compilation.
_TILES_DO_NOT_FIT = "Couldn't find output tile sizes"

_TOO_LARGE = re.compile(r"Ran out of memory|RESOURCE_EXHAUSTED")
# Some programs are rejected by a first estimate of temporaries, others with their total bytes.
_TEMPORARIES = re.compile(r"HLO temporaries \((?P<bytes>[\d.]+[KMGT]?)\) exceeds", re.IGNORECASE)
_USED = re.compile(r"Used (?P<bytes>[\d.]+[KMGT]?) of [\d.]+[KMGT]? hbm", re.IGNORECASE)
_SCALES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes on one device, as a compiler reports them.

    `temporaries` are those at the peak. `donated` is the part of the outputs that replaces the old
    state in its memory.
    """

    arguments: int
    outputs: int
    donated: int
    temporaries: int
    host_arguments: int = 0
    host_temporaries: int = 0


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The result of compiling a step.

    Without a program, `refusal` is the compiler's message that the step is too large, or
    `unreadable` the error of reading it. `has_triton` is False if products are computed by cuBLAS
    alone.
    """

    hlo_text: str = ""
    sizes: Sizes | None = None
    refusal: str | None = None
    unreadable: str | None = None
    has_triton: bool = True


@contextlib.contextmanager
def tracing_for(device: jax.Device) -> Iterator[None]:
    """Return a context in which steps are traced and lowered for a device of another machine.

    Kernels ask for the kind of device, those of Tokamax for JAX's default device. Without this
    context they get that of this machine.
    """
    kind = AbstractDevice(device.device_kind, num_cores=None, platform=device.platform)
    mesh = AbstractMesh((), (), abstract_device=kind)
    with use_abstract_mesh(mesh), jax.default_device(device):
        yield


def compile_step(lowered: Any, *, platform: str, is_here: bool) -> CompiledStep:
    """Compile a lowered step."""
    options: dict[str, Any] = {}
    if platform == "cpu":
        options = _CPU_OPTIONS
    elif platform == "gpu" and not is_here:
        options = _ABSENT_GPU_OPTIONS
    try:
        return measured_step(lowered.compile(compiler_options=options), platform=platform)
    except jax.errors.JaxRuntimeError as error:
        if _TOO_LARGE.search(str(error)):
            return CompiledStep(refusal=str(error))
        if options is not _ABSENT_GPU_OPTIONS or _TILES_DO_NOT_FIT not in str(error):
            raise
    compiled = lowered.compile(compiler_options={**options, "xla_gpu_enable_triton_gemm": False})
    return dataclasses.replace(measured_step(compiled, platform=platform), has_triton=False)


def measured_step(compiled: Any, *, platform: str) -> CompiledStep:
    """Return program and sizes of a function that was compiled for devices of `platform`."""
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
    """Return the sizes of a step that a compiler rejected, from the figures in its message."""
    temporaries = 0
    if match := _TEMPORARIES.search(refusal):
        temporaries = _bytes(match["bytes"])
    elif match := _USED.search(refusal):
        temporaries = max(0, _bytes(match["bytes"]) - arguments)
    # The state is updated in place.
    return Sizes(arguments, outputs=arguments, donated=arguments, temporaries=temporaries)


def _bytes(text: str) -> int:
    """Read `17.5G`, in powers of two as XLA writes them."""
    number = text.rstrip("KMGT")
    return round(float(number) * _SCALES[text[len(number) :]])


def offloads_activations(task: Config) -> bool:
    """Return whether a policy of rematerialization copies activations to host memory."""
    return any(
        "offload" in str(getattr(config, field))
        for config in walk_configs(task)
        for field in {"remat", "stage_remat"} & {*field_names(config)}
    )


def compiler_notes(
    step: CompiledStep, *, platform: str, is_here: bool, offloads: bool = False
) -> Iterator[str]:
    """Yield notes on differences between the compiled step and that of a run on the devices.

    `offloads` is the result of `offloads_activations`.
    """
    if offloads and step.sizes is not None and step.sizes.host_temporaries == 0:
        yield (
            "the compiler reports nothing in host memory here, so activations that a policy of"
            " rematerialization offloads count as device memory"
        )
    if step.unreadable is not None:
        yield (
            "collectives and temporaries are not known, since JAX cannot read the program"
            f" ({step.unreadable}). The compiler may be newer than JAX: pip install"
            f" 'jax[tpu]=={jax.__version__}' installs the matching one"
        )
    if platform == "gpu" and not is_here:
        yield (
            "compiled without a GPU: no kernels were timed against each other (autotuning), and the"
            " workspace of cuDNN's kernels is not counted"
        )
        if not step.has_triton:
            yield (
                "products are planned by cuBLAS alone, since XLA's first choice of Triton tiles"
                f" fails ({_TILES_DO_NOT_FIT!r}). A GPU tries other tiles; if a run fails with this"
                " message, set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false"
            )
    if platform == "cpu":
        yield (
            "compiled for CPU: bfloat16 is computed in float32, gradients are summed by all-reduce,"
            " and rematerialization outside of repeated layers is undone; an accelerator needs less"
            " memory and traffic"
        )
