"""Start of JAX's devices, and the settings of their compilers and allocators.

XLA reads its flags from the environment when the first device is used: `set_compiler_flags` runs
before that, and `check_devices` afterwards. Flags in the user's own environment come last and win.
`keep_freed_memory` runs before JAX is imported, so this module imports JAX only inside functions.

Sources: JAX documentation, "GPU performance tips"; NVIDIA JAX-Toolbox, "GPU performance"; OpenXLA,
"XLA flags guidance" and "GPU optimization levels"; MaxText's collected flags; PyTorch/XLA's
defaults for fully sharded weights (pull request 6528). docs/profiling.md has the reasons.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import glob
import importlib.metadata
import importlib.util
import os
import pkgutil
import platform
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from layerkit.config.checks import require
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import UnsafePathError, private_folder
from layerkit_runner.run_options import RunOptions

# Share of a GPU's memory for a program, here and in plans. The rest is for CUDA's context, NCCL's
# buffers and libraries. With JAX's own default, three quarters, runs that fit would fail.
GPU_MEMORY_SHARE = 0.92

_GPU = "XLA_FLAGS"
_TPU = "LIBTPU_INIT_ARGS"
# From which compile time and size on programs are cached: the many small ones of a start, too.
_CACHED_FROM = {
    "jax_persistent_cache_min_compile_time_secs": 0.01,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}
# The name that JAX reads, and its former name. JAX rejects an environment that sets both.
_MEMORY_SHARE = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# Parameters of `mallopt` in <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = -1
_ACCELERATOR_PLUGINS = ("jax_plugins", "libtpu")
# By these, JAX finds devices too: files of NVIDIA's drivers, and the vendor of TPUs on the PCI bus.
_CUDA_PLUGINS = frozenset({"xla_cuda12", "xla_cuda13"})
_NVIDIA_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
_PCI_VENDORS, _TPU_VENDOR = "/sys/bus/pci/devices/*/vendor", "0x1ae0"


@dataclasses.dataclass(frozen=True)
class FlagSet:
    """Flags of XLA for one kind of device.

    Attributes:
      variable: Environment variable that XLA reads them from.
      device_kind: Regular expression that matches the whole of JAX's device kind.
      flags: Flags in XLA's form.
    """

    variable: str
    device_kind: str
    flags: tuple[str, ...]


_LATENCY_HIDING = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_all_gather_combine_threshold_bytes=134217728",
    "--xla_gpu_all_reduce_combine_threshold_bytes=134217728",
    "--xla_gpu_reduce_scatter_combine_threshold_bytes=67108864",
)

PRESETS: Mapping[str, FlagSet] = {
    # Collectives overlap with computations that do not need their results yet. Small collectives
    # are combined up to these sizes in bytes.
    "gpu_latency_hiding": FlagSet(_GPU, r"NVIDIA .*", _LATENCY_HIDING),
    # Collectives also overlap across iterations of the loop over layers, which keeps the weights
    # and gradients of a further layer. Plan with this preset: a plan without it may not fit. XLA
    # pipelines reduce-scatters by default.
    "gpu_pipelined_collectives": FlagSet(
        _GPU,
        r"NVIDIA .*",
        (
            *_LATENCY_HIDING,
            "--xla_gpu_enable_pipelined_all_gather=true",
            "--xla_gpu_enable_pipelined_all_reduce=true",
            "--xla_gpu_enable_while_loop_double_buffering=true",
        ),
    ),
    # The flags of NVIDIA's scripts for Pax that XLA still has. Collectives are asynchronous by
    # default; the scripts' flags for that, xla_gpu_enable_async_*, no longer exist.
    "gpu_nvidia_pax": FlagSet(
        _GPU,
        r"NVIDIA .*",
        (
            "--xla_gpu_enable_latency_hiding_scheduler=true",
            "--xla_gpu_enable_triton_gemm=false",
            "--xla_gpu_all_reduce_combine_threshold_bytes=51200",
            "--xla_gpu_enable_command_buffer=",
        ),
    ),
    # All-gathers of sharded weights overlap with the products around them. Later TPUs reject it.
    "tpu_v5e_collective_fusion": FlagSet(
        _TPU,
        r"TPU v5 lite|TPU v5e",
        (
            "--xla_tpu_enable_async_collective_fusion=true",
            "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
            "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
            "--xla_tpu_overlap_compute_collective_tc=true",
            "--xla_enable_async_all_gather=true",
        ),
    ),
    # Weights that are sharded along one axis of a torus of three dimensions would be gathered by
    # all-reduces, which send twice as much. XLA prefers only asynchronous all-gathers to them.
    # On a v5p these also need xla_tpu_enable_async_collective_fusion_fuse_all_gather, which
    # libtpu 0.0.50 rejects on all but v5e, since results may be wrong.
    "tpu_fsdp": FlagSet(
        _TPU,
        r"TPU v4",
        (
            "--xla_enable_async_all_gather=true",
            "--xla_tpu_prefer_async_allgather_to_allreduce=true",
        ),
    ),
    # All-reduces of gradients between slices overlap with the backward pass.
    "tpu_multislice": FlagSet(
        _TPU,
        r"TPU v[456].*",
        (
            "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
            "--xla_tpu_data_parallel_opt_different_sized_ops=true",
        ),
    ),
    # Share of a v6e's vector memory for one fusion, in dense models and in mixtures of experts.
    "tpu_v6e_dense": FlagSet(_TPU, r"TPU v6.*", ("--xla_tpu_scoped_vmem_limit_kib=98304",)),
    "tpu_v6e_moe": FlagSet(_TPU, r"TPU v6.*", ("--xla_tpu_scoped_vmem_limit_kib=81920",)),
}


@functools.cache
def unused_plugins() -> tuple[str, ...]:
    """Return the installed plugins of JAX, if this machine has a device of none of them.

    Plans need the compilers in such plugins and no device. JAX would print an error for each.
    """
    spec = importlib.util.find_spec("jax_plugins")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    plugins = {module.name for module in pkgutil.iter_modules(folders)}
    plugins |= {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}
    has_libtpu = importlib.util.find_spec("libtpu") is not None
    # Which devices another plugin has is unknown.
    if plugins - _CUDA_PLUGINS or any(map(os.path.exists, _NVIDIA_FILES)):
        return ()
    if any(Path(file).read_text().strip() == _TPU_VENDOR for file in glob.glob(_PCI_VENDORS)):
        return ()
    return (*sorted(plugins), *(["libtpu"] if has_libtpu else []))


def use_cpu_without_accelerators() -> None:
    """Have JAX start the CPU alone if no device of an installed plugin is on this machine.

    JAX_PLATFORMS of the environment takes precedence. Child processes are not affected.
    """
    if not os.environ.get("JAX_PLATFORMS") and unused_plugins():
        import jax

        if not getattr(jax.config, "jax_platforms", None):
            jax.config.update("jax_platforms", "cpu")


def start_devices() -> None:
    """Let JAX start its devices; raise `UsageError` if it cannot."""
    import jax

    use_cpu_without_accelerators()
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        # An AssertionError without text means that the plugin found no device.
        reason = str(error).partition("\n")[0] or "no device was found"
        raise UsageError(
            f"JAX {importlib.metadata.version('jax')} cannot start its devices: {reason}",
            owner=f"JAX_PLATFORMS={platforms}" if platforms else None,
            hint="Install the plugin of the platform, such as by pip install 'jax[cuda13]' or"
            " 'jax[tpu]', check this machine with `runner doctor`, or set JAX_PLATFORMS=cpu.",
        ) from error


def set_compiler_flags(
    options: RunOptions, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Put the selected flags into the environment, before any device is used."""
    for variable, flags in _chosen(options).items():
        environment[variable] = " ".join([*flags, environment.get(variable, "")]).strip()


def set_gpu_memory_share(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the share of a GPU's memory that plans assume, unless the user set another."""
    if not any(environment.get(name) for name in _MEMORY_SHARE):
        environment[_MEMORY_SHARE[0]] = str(GPU_MEMORY_SHARE)


def keep_freed_memory() -> bool:
    """Let the process keep freed memory for the next step, if JAX will compute on the CPU.

    XLA allocates the temporaries of each step on the CPU anew. glibc returns blocks of this size to
    the kernel when they are freed, so that every step waits for the kernel to map and clear them
    again.

    Call this before JAX or NumPy is imported. The resident memory stays at its maximum. False with
    another C library, if an accelerator may be used, or if the environment sets the allocator.
    """
    if platform.libc_ver()[0] != "glibc" or not _computes_on_cpu():
        return False
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1))
    return all(library.mallopt(name, value) for name, value in settings)


def _computes_on_cpu() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return bool(unused_plugins()) or not any(map(importlib.util.find_spec, _ACCELERATOR_PLUGINS))


def check_devices(options: RunOptions, device_kind: str) -> None:
    """Raise `UsageError` for a preset or profile of other devices, or for JAX's own profiling."""
    import jax

    if getattr(jax.config, "jax_enable_pgle", False):
        expected = "false, since a step is compiled once; see --pgle_profile in docs/profiling.md"
        raise UsageError(field="JAX_ENABLE_PGLE", value="true", expected=expected)
    preset = options.xla_flags_preset
    if preset is not None:
        fitting = [
            name for name, one in PRESETS.items() if re.fullmatch(one.device_kind, device_kind)
        ]
        expected = f"a preset for {device_kind} devices: {' or '.join(fitting) or 'none'}"
        require(preset in fitting, None, "--xla_flags_preset", preset, expected, UsageError)
    is_valid = options.pgle_profile is None or re.fullmatch(r"NVIDIA .*", device_kind)
    expected = f"NVIDIA GPUs, whose scheduler reads the profile, not {device_kind}"
    require(is_valid, None, "--pgle_profile", options.pgle_profile, expected, UsageError)


def flag_lines(options: RunOptions) -> Iterator[str]:
    """Yield lines of the start report: each environment variable with its flags."""
    for variable, flags in _chosen(options).items():
        yield f"{variable} {' '.join(flags)}"


def _chosen(options: RunOptions) -> dict[str, list[str]]:
    chosen: dict[str, list[str]] = {}
    if options.xla_flags_preset is not None:
        preset = PRESETS[options.xla_flags_preset]
        chosen[preset.variable] = list(preset.flags)
    if options.pgle_profile is not None:
        # XLA splits its flags at spaces.
        if not os.path.exists(options.pgle_profile) or " " in options.pgle_profile:
            expected = "an existing file, without spaces in its path"
            raise UsageError(field="--pgle_profile", value=options.pgle_profile, expected=expected)
        # Only the latency-hiding scheduler reads a profile.
        guided = [
            "--xla_gpu_enable_latency_hiding_scheduler=true",
            f"--xla_gpu_pgle_profile_file_or_directory_path={options.pgle_profile}",
        ]
        flags = chosen.setdefault(_GPU, [])
        flags += [flag for flag in guided if flag not in flags]
    return chosen


def enable_compilation_cache(flag: str | None) -> None:
    """Cache compiled programs on disk, so that a restart or a second run starts fast.

    `flag` is a folder, `off`, or None for that of JAX_COMPILATION_CACHE_DIR or the default.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = flag or os.environ.get("JAX_COMPILATION_CACHE_DIR") or _default_folder()
    if "://" not in folder:
        # A shell does not expand the ~ of --jax_compilation_cache=~/x.
        folder = os.path.abspath(os.path.expanduser(folder)) if folder != "off" else ""
    # JAX decides at its first compilation whether it caches, and another run in this process may
    # have another folder.
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", folder or None)
    for name, value in _CACHED_FROM.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def _default_folder() -> str:
    """Create the default folder for this user only; return `off` if another user owns it."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "layerkit" / "jax"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        private_folder(folder)
    except UnsafePathError as error:
        print(f"runner: no compilation cache: {error}", file=sys.stderr, flush=True)
        return "off"
    except OSError:
        pass  # a read-only home folder, which JAX reports
    return str(folder)
