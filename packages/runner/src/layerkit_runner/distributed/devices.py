"""Starting JAX's devices, and the settings of their compilers and allocators before that.

XLA reads its flags from the environment when the first device is used, so they are set before that
(`set_compiler_flags`). Whether they fit the devices is known only afterwards (`check_devices`).
Flags in the user's own environment come last and win.

Sources: JAX documentation, "GPU performance tips"; OpenXLA, "GPU optimization levels" (level O1);
MaxText's collected flags for TPUs and its scripts for H100; PyTorch/XLA's defaults for weights that
are fully sharded (its pull request 6528), which Google's recipes for v5p use as well.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

import jax

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import UnsafePathError, private_folder
from layerkit_runner.run_options import RunOptions

# By value of JAX_PLATFORMS: the modules of which JAX needs one, and how to install it.
_GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "cpu": ((), ""),
    "cuda": (_GPU_PLUGINS, "pip install 'jax[cuda13]'"),
    "gpu": ((*_GPU_PLUGINS, "jax_rocm7_plugin"), "pip install 'jax[cuda13]'"),
    "rocm": (("jax_rocm7_plugin", "jax_rocm60_plugin"), "pip install jax-rocm7-plugin"),
    "tpu": (("libtpu",), "pip install 'jax[tpu]'"),
}

# Share of a GPU's memory for a program, here and in plans. The rest is for CUDA's context, NCCL's
# buffers and libraries. With JAX's own default, three quarters, runs that fit would fail.
GPU_MEMORY_SHARE = 0.92

_GPU = "XLA_FLAGS"
_TPU = "LIBTPU_INIT_ARGS"
# The name that JAX reads, and its former name; JAX rejects both at a time.
_MEMORY_SHARE = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclasses.dataclass(frozen=True)
class FlagSet:
    """Flags that are recommended together.

    Attributes:
      variable: Environment variable that carries them.
      device_kind: Regular expression for the whole of `jax.Device.device_kind`.
      flags: The flags, in XLA's form.
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
    # Collectives run beside the computations that do not need them yet; small ones are joined, up
    # to these many bytes.
    "gpu_latency_hiding": FlagSet(_GPU, r"NVIDIA .*", _LATENCY_HIDING),
    # Across the iterations of the loop over layers too, for which the weights and gradients of a
    # further layer are kept: what fits by its plan may not fit with these. Plan with them.
    "gpu_pipelined_collectives": FlagSet(
        _GPU,
        r"NVIDIA .*",
        (
            *_LATENCY_HIDING,
            "--xla_gpu_enable_pipelined_all_gather=true",
            "--xla_gpu_enable_pipelined_all_reduce=true",
            "--xla_gpu_enable_pipelined_reduce_scatter=true",
            "--xla_gpu_enable_while_loop_double_buffering=true",
        ),
    ),
    # All-gathers of sharded weights overlap with the products around them. Later TPUs refuse it.
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
    # all-reduces, which send twice as much. Only all-gathers that are asynchronous are preferred to
    # them. On a v5p they would also need xla_tpu_enable_async_collective_fusion_fuse_all_gather:
    # libtpu 0.0.50 refuses it on all but v5e, since results may be wrong.
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
    # How much of a v6e's vector memory one fusion may take: in dense models, and with experts.
    "tpu_v6e_dense": FlagSet(_TPU, r"TPU v6.*", ("--xla_tpu_scoped_vmem_limit_kib=98304",)),
    "tpu_v6e_moe": FlagSet(_TPU, r"TPU v6.*", ("--xla_tpu_scoped_vmem_limit_kib=81920",)),
}


def start_devices() -> None:
    """Let JAX start its devices.

    Raises:
      UsageError: JAX cannot start them; it names what is missing and what to do.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise UsageError(_refusal(os.environ.get("JAX_PLATFORMS"), error)) from error


def _refusal(platforms: str | None, error: Exception) -> str:
    names = [name.strip() for name in (platforms or "").split(",") if name.strip()]
    known = {*_NEEDS, *_registered()}
    for name in names:
        if name not in known:
            return (
                f"JAX_PLATFORMS={platforms}: unknown platform {name!r}{near_names(name, known)}"
                f" Expected one of {', '.join(sorted(known))}."
            )
    version = importlib.metadata.version("jax")
    for name in names:
        modules, command = _NEEDS.get(name, ((), ""))
        if modules and not any(map(importlib.util.find_spec, modules)):
            return (
                f"JAX_PLATFORMS={platforms}: JAX {version} is installed without its plugin for"
                f" {name} ({' or '.join(modules)}). Install it ({command}), or set"
                " JAX_PLATFORMS=cpu."
            )
    # An AssertionError says nothing: the plugin is there and found no device.
    reason = f": {error}" if str(error) else ", since it finds none"
    where = f"JAX_PLATFORMS={platforms}: " if platforms else ""
    return (
        f"{where}JAX {version} cannot start its devices{reason.splitlines()[0]}. Run `runner"
        " doctor` to check this machine, or set JAX_PLATFORMS=cpu."
    )


def _registered() -> set[str]:
    """Return the platforms of installed plugins, also those that JAX does not come with."""
    # Not public, and nothing public tells them before the devices are started.
    from jax._src import xla_bridge

    return set(getattr(xla_bridge, "_backend_factories", {})) - {"interpreter"}


def set_compiler_flags(
    options: RunOptions, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Put the flags that the options name into the environment, before any device is used.

    Raises:
      UsageError: The file of --pgle_profile does not exist.
    """
    for variable, flags in _chosen(options):
        environment[variable] = " ".join([*flags, environment.get(variable, "")]).strip()


def set_gpu_memory_share(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give a program the share of a GPU's memory that plans assume, unless the user set another.

    To be called before any device is used.
    """
    if not any(environment.get(name) for name in _MEMORY_SHARE):
        environment[_MEMORY_SHARE[0]] = str(GPU_MEMORY_SHARE)


def check_devices(options: RunOptions, device_kind: str) -> None:
    """Raise an error if flags are for other devices than these.

    Args:
      options: The flags.
      device_kind: Value of `jax.Device.device_kind`.

    Raises:
      UsageError: They are; it names both, and the sets of flags for these devices.
    """
    name = options.xla_flags_preset
    if name is not None and not re.fullmatch(PRESETS[name].device_kind, device_kind):
        fitting = [
            name for name, one in PRESETS.items() if re.fullmatch(one.device_kind, device_kind)
        ]
        raise UsageError(
            f"--xla_flags_preset={name} is not for the devices at hand, which are {device_kind};"
            f" for these there is {' or '.join(fitting) or 'none'}"
        )
    if options.pgle_profile is not None and not re.fullmatch(r"NVIDIA .*", device_kind):
        raise UsageError(
            f"--pgle_profile={options.pgle_profile} guides the scheduler of NVIDIA GPUs; the"
            f" devices at hand are {device_kind}"
        )


def check_no_automatic_profile() -> None:
    """Raise an error if JAX's automatic profile guidance is set, which would have no effect.

    Raises:
      UsageError: `jax_enable_pgle` is set.
    """
    if getattr(jax.config, "jax_enable_pgle", False):
        raise UsageError(
            "jax_enable_pgle does nothing for a training step that is compiled ahead of time, as"
            " ours is. Capture a profile and give it as --pgle_profile=FILE;"
            " `python -m layerkit_runner.tools.pgle_profile --help` says how."
        )


def flag_lines(options: RunOptions) -> Iterator[str]:
    """Yield the lines of the start report."""
    for variable, flags in _chosen(options):
        yield f"{variable} {' '.join(flags)}"


def _chosen(options: RunOptions) -> Iterator[tuple[str, list[str]]]:
    """Yield (environment variable, flags) of what the options name."""
    chosen: dict[str, list[str]] = {}
    if options.xla_flags_preset is not None:
        preset = PRESETS[options.xla_flags_preset]
        chosen[preset.variable] = list(preset.flags)
    if options.pgle_profile is not None:
        if not os.path.exists(options.pgle_profile):
            raise UsageError(f"--pgle_profile={options.pgle_profile}: there is no such file")
        # Only the latency hiding scheduler reads a profile.
        guided = [
            "--xla_gpu_enable_latency_hiding_scheduler=true",
            f"--xla_gpu_pgle_profile_file_or_directory_path={options.pgle_profile}",
        ]
        flags = chosen.setdefault(_GPU, [])
        flags += [flag for flag in guided if flag not in flags]
    yield from chosen.items()


def enable_compilation_cache(flag: str | None) -> None:
    """Keep compiled programs on disk, so that a restart or a second run starts fast.

    Args:
      flag: Value of --jax_compilation_cache.
    """
    folder = cache_folder(flag, os.environ)
    try:
        if folder is not None:
            make_private(folder, os.environ)
    except UnsafePathError as error:
        print(f"runner: compiled programs are not kept: {error}", file=sys.stderr, flush=True)
        folder = None
    except OSError:
        pass  # a home folder that cannot be written; JAX reports it and compiles
    if folder is None:
        jax.config.update("jax_enable_compilation_cache", False)  # noqa: FBT003
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def cache_folder(flag: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the folder of the compilation cache as an absolute path; None for no cache.

    It is set by --jax_compilation_cache, else by JAX's variable; the default is below the user's
    own cache. It may be in a store.
    """
    folder = flag or environ.get("JAX_COMPILATION_CACHE_DIR") or _default_folder(environ)
    if folder == "off":
        return None
    # A shell leaves the ~ of --jax_compilation_cache=~/x as it is.
    return folder if "://" in folder else os.path.abspath(os.path.expanduser(folder))


def make_private(folder: str, environ: Mapping[str, str]) -> None:
    """Create the default folder for this user alone; leave a folder that was chosen as it is.

    JAX runs the programs that it finds there, so whoever can write them can run code in a job.

    Raises:
      UnsafePathError: The default folder belongs to another user.
      OSError: The default folder cannot be created.
    """
    if folder == os.path.abspath(_default_folder(environ)):
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        private_folder(Path(folder))


def _default_folder(environ: Mapping[str, str]) -> str:
    cache_home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache_home, "layerkit", "jax")
