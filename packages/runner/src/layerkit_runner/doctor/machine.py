"""Packages, host, launcher and environment: what can be read without trying anything."""

from __future__ import annotations

import glob
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from layerkit_runner.byte_sizes import size_text
from layerkit_runner.doctor.finding import Finding, Problem
from layerkit_runner.errors import UsageError
from layerkit_runner.processes.launchers import find_launch

# What decides whether a run works, and how fast.
_NEEDED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "fiddle", "numpy")
_OURS = ("layerkit", "layerkit-inputs", "layerkit-runner", "layerkit-experiments")
_PLUGINS = (
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "jax-rocm7-plugin",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "libtpu",
)
_OPTIONAL = ("grain", "seqio", "tensorflow", "transformers", "wandb")
# Released together with jaxlib, under its number.
_OF_JAXLIB = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin")

_VARIABLES = (
    *("XLA_", "JAX_", "LIBTPU", "TPU_", "NCCL_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_", "TF_XLA"),
    *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "OMPI_COMM_WORLD_", "MASTER_", "RANK"),
    *("WORLD_SIZE", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_", "OMP_NUM_THREADS", "NPROC"),
)
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")

_LEAST_SHARED_MEMORY = 1 << 30
_LEAST_OPEN_FILES = 4096


def check_packages() -> Finding:
    """Versions, and whether they fit together."""
    groups = {"ours": _OURS, "needed": _NEEDED, "devices": _PLUGINS, "optional": _OPTIONAL}
    found = {name: _versions(names) for name, names in groups.items()}
    lines = [
        ", ".join(f"{name} {version}" for name, version in versions.items())
        for versions in found.values()
        if versions
    ]
    if not found["ours"]:
        lines.insert(0, "layerkit from its source tree, not installed as a package")
    known = {name: version for versions in found.values() for name, version in versions.items()}
    problems = [*_missing(known), *_unlike_jaxlib(known), *_outside_requirements(known)]
    return Finding(lines, known, problems)


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _missing(known: Mapping[str, str]) -> Iterator[Problem]:
    for name in _NEEDED:
        if name not in known:
            yield Problem(f"{name} is not installed.", f"pip install {name}")


def _unlike_jaxlib(known: Mapping[str, str]) -> Iterator[Problem]:
    for name in _OF_JAXLIB:
        if name in known and known[name] != known.get("jaxlib", known[name]):
            yield Problem(
                f"{name} {known[name]} is for another jaxlib than {known['jaxlib']}, which is"
                " installed.",
                f"pip install 'jax[{name.split('-')[1]}]=={known['jaxlib']}'",
            )


def _outside_requirements(known: Mapping[str, str]) -> Iterator[Problem]:
    """Packages of versions that ours were not made for."""
    from packaging.requirements import Requirement

    for ours in _OURS:
        if ours not in known:
            continue
        for text in importlib.metadata.requires(ours) or ():
            wanted = Requirement(text)
            is_asked = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            version = known.get(wanted.name.lower())
            if not is_asked or version is None:
                continue
            if not wanted.specifier.contains(version, prereleases=True):
                yield Problem(
                    f"{ours} {known[ours]} needs {wanted.name}{wanted.specifier}, and {version} is"
                    " installed.",
                    f"pip install '{wanted.name}{wanted.specifier}'",
                )


def check_host() -> Finding:
    """Python, system, processors, memory, and what containers limit."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = _cgroup_cpus()
    memory, free = _memory()
    limit = _cgroup_memory()
    values: dict[str, object] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{_system()} ({platform.machine()})",
        "cpus": cpus,
        "cpus_allowed": allowed,
        "memory_bytes": memory,
        "memory_available_bytes": free,
        "memory_limit_bytes": limit,
    }
    cpu_text = f"{cpus} CPU(s)" + ("" if allowed is None else f", of which {allowed:g} may be used")
    text = "memory unknown" if memory is None else f"{size_text(memory)} of memory"
    text += "" if free is None else f", {size_text(free)} available"
    text += "" if limit is None else f", limited to {size_text(limit)}"
    lines = [
        f"Python {values['python']} ({sys.executable}), {values['system']}",
        f"{cpu_text}, {text}",
    ]
    return Finding(lines, values, list(_host_problems()))


def _host_problems() -> Iterator[Problem]:
    if os.path.isdir("/dev/shm"):
        size = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
        if size < _LEAST_SHARED_MEMORY:
            yield Problem(
                f"/dev/shm holds {size_text(size)} only, through which NCCL and worker processes of"
                " inputs hand data on.",
                "Start the container with --ipc=host or --shm-size=16g.",
                fails=False,
            )
    try:
        import resource  # not on every system
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_OPEN_FILES:
        yield Problem(
            f"At most {soft} files may be open at once, which many record files use up.",
            f"ulimit -n {hard if hard > 0 else 65536}",
            fails=False,
        )


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def _memory() -> tuple[int | None, int | None]:
    """(all, available) bytes."""
    sizes = {}
    for line in _text_of("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) * 1024
    return sizes.get("MemTotal"), sizes.get("MemAvailable")


def _cgroup_memory() -> int | None:
    text = _text_of("/sys/fs/cgroup/memory.max").strip()
    return int(text) if text.isdecimal() else None


def _cgroup_cpus() -> float | None:
    quota, _, period = _text_of("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def num_nvidia_gpus() -> int:
    """How many the driver of this machine has, whatever JAX makes of them."""
    return len(glob.glob("/proc/driver/nvidia/gpus/*"))


def check_launcher(environ: Mapping[str, str]) -> Finding:
    """Who started this process, and with how many others."""
    try:
        launch = find_launch(environ)
    except UsageError as error:
        return Finding(["not understood"], {}, [Problem(str(error), "Correct that variable.")])
    if launch is not None:
        line = f"{launch.name}: process {launch.process_id} of {launch.num_processes}"
        values = {
            "name": launch.name,
            "num_processes": launch.num_processes,
            "process_id": launch.process_id,
        }
        return Finding([line, "each process looks at its own machine here"], values)
    workers = environ.get("TPU_WORKER_HOSTNAMES", "")
    if "," in workers:
        hosts = workers.count(",") + 1
        return Finding([f"a TPU slice of {hosts} hosts"], {"name": "TPU", "num_processes": hosts})
    where = "in Kubernetes; " if "KUBERNETES_SERVICE_HOST" in environ else ""
    return Finding([f"{where}no launcher of several processes"], {"name": None})


def check_environment(environ: Mapping[str, str]) -> Finding:
    """The variables that change what JAX, XLA and NCCL do; never a secret."""
    found = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_VARIABLES) and not any(word in name for word in _SECRET)
    }
    lines = [f"{name}={value}" for name, value in found.items()]
    return Finding(lines or ["no variable of XLA, JAX, TPU, CUDA or NCCL is set"], found)
