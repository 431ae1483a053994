"""Checks of packages, host and disk, and the entry point of a process that runs one check."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from layerkit_runner.files.text import size_text

_OWN_PACKAGES = ("layerkit", "layerkit-inputs", "layerkit-runner", "layerkit-experiments")
# Each plugin has the version number of its jaxlib.
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin")
_PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "fiddle", "numpy"),
    *(*_PLUGINS, "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    *("libtpu", "grain", "seqio", "tensorflow", "transformers", "wandb"),
)
_LEAST_SHARED_MEMORY = 1 << 30
_TRIAL_BYTES = 64 << 20
_LITTLE_SPACE = 10e9
_NO_SPACE = 1e8

_REMEDIES = {
    "folder": "Choose another --job_log_dir, or check that this machine may write there.",
    "devices": "Check JAX_PLATFORMS and CUDA_VISIBLE_DEVICES, that layerkit-runner[cuda] or"
    " layerkit-runner[tpu] is installed, and with nvidia-smi that the driver works.",
}


class Problem(NamedTuple):
    """A failure, or a warning, with its remedy.

    Attributes:
      what: Sentence that states the problem.
      to_do: Sentence that states the remedy.
      fails: Whether a run would fail; False for a warning.
    """

    what: str
    to_do: str
    fails: bool = True


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
      lines: Text for people, without the name of the check.
      values: JSON values for programs.
      problems: Problems that the check found.
    """

    lines: Sequence[str] = ()
    values: Mapping[str, Any] = {}
    problems: Sequence[Problem] = ()


def check_packages() -> Finding:
    """Report versions of packages, and those that do not fit together."""
    ours, others = _versions(_OWN_PACKAGES), _versions(_PACKAGES)
    lines = [", ".join(f"{name} {version}" for name, version in g.items()) for g in (ours, others)]
    problems = list(_outside_requirements(ours))
    jaxlib = others.get("jaxlib")
    for name in _PLUGINS:
        if others.get(name, jaxlib) != jaxlib:
            what = f"{name} {others[name]} is for another jaxlib than the installed {jaxlib}."
            problems.append(Problem(what, f"pip install 'jax[{name.split('-')[1]}]=={jaxlib}'"))
    return Finding(lines, {**ours, **others}, problems)


def _versions(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _outside_requirements(ours: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the requirements of this project's packages that the installed ones do not meet."""
    from packaging.requirements import Requirement

    for name, version in ours.items():
        for wanted in map(Requirement, importlib.metadata.requires(name) or ()):
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            installed = _versions([wanted.name]).get(wanted.name)
            if installed is None or not wanted.specifier.contains(installed, prereleases=True):
                found = "it is not installed" if installed is None else f"{installed} is installed"
                spec = f"{wanted.name}{wanted.specifier}"
                yield Problem(f"{name} {version} needs {spec}: {found}.", f"pip install '{spec}'")


def check_host() -> Finding:
    """Report Python, system, processors and memory, with the limits of a container."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _text_of("/sys/fs/cgroup/memory.max").strip()
    entries = (line.partition(":") for line in _text_of("/proc/meminfo").splitlines())
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in entries}
    values: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "cpus": cpus,
        "memory_bytes": sizes.get("MemTotal"),
        "memory_available_bytes": sizes.get("MemAvailable"),
        "memory_limit_bytes": int(limit) if limit.isdecimal() else None,
    }
    parts = [f"{cpus} CPU(s)"]
    for key, text in (("", "of memory"), ("available_", "available"), ("limit_", "at most")):
        size = values[f"memory_{key}bytes"]
        parts += [] if size is None else [f"{size_text(size)} {text}"]
    lines = [f"Python {values['python']} ({sys.executable}), {values['system']}", ", ".join(parts)]
    problems = []
    shared = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
    if shared is not None and shared < _LEAST_SHARED_MEMORY:
        what = f"/dev/shm holds only {size_text(shared)}; NCCL and input workers pass data there."
        to_do = "Start the container with --ipc=host or --shm-size=16g."
        problems.append(Problem(what, to_do, fails=False))
    return Finding(lines, values, problems)


def _text_of(path: str) -> str:
    return Path(path).read_text() if os.path.exists(path) else ""


def check_folder(given: str) -> Finding:
    """Write, read back and rename files in a job folder or store; raise OSError on failure."""
    is_store = "://" in given
    where = given if is_store else os.path.abspath(os.path.expanduser(given))
    existing = folder = epath.Path(where)
    while not is_store and not existing.exists():
        existing = existing.parent
    where += "" if existing == folder else f" (does not exist; tried {existing})"
    trial = existing / f".doctor_{secrets.token_hex(8)}"
    trial.mkdir(parents=is_store)
    try:
        speeds = _try_bytes(trial / "bytes")
        if not is_store:
            _try_rename_and_append(trial)
    finally:
        trial.rmtree(missing_ok=True)
    lines = ["writes {}/s, reads {}/s".format(*map(size_text, speeds.values()))]
    if is_store:
        return Finding([f"{where}: {lines[0]}"], {"folder": where, **speeds})
    usage = shutil.disk_usage(existing)
    lines.insert(0, f"{where}: {size_text(usage.free)} free of {size_text(usage.total)}")
    problems = []
    if usage.free < _LITTLE_SPACE:
        what = f"{where}: only {size_text(usage.free)} are free."
        to_do = "Free some space. With Adam a checkpoint takes three times the weights."
        problems.append(Problem(what, to_do, fails=usage.free < _NO_SPACE))
    return Finding(lines, {"folder": where, "free_bytes": usage.free, **speeds}, problems)


def _try_bytes(path: epath.Path) -> dict[str, float]:
    """Return bytes per second of writing and reading; raise OSError if the bytes differ."""
    content = os.urandom(_TRIAL_BYTES)
    began = time.perf_counter()
    path.write_bytes(content)
    if os.path.exists(path):  # a file, not an object of a store
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # read from the disk, not from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    written = time.perf_counter()
    content_read = path.read_bytes()
    read = time.perf_counter()
    if content_read != content:
        raise OSError("the bytes read differ from those written")
    write_rate, read_rate = len(content) / (written - began), len(content) / (read - written)
    return {"write_bytes_per_second": write_rate, "read_bytes_per_second": read_rate}


def _try_rename_and_append(trial: epath.Path) -> None:
    """Rename and append as checkpoints and logs do; raise OSError if data are lost."""
    (trial / "old").write_text("old")
    (trial / "new").write_text("one ")
    (trial / "new").replace(trial / "old")
    (trial / "folder").mkdir()
    (trial / "old").rename(trial / "folder" / "log")
    (trial / "folder").rename(trial / "renamed")
    with open(trial / "renamed" / "log", "a", encoding="utf-8") as file:
        file.write("two")
    if (trial / "renamed" / "log").read_text() != "one two":
        raise OSError("data are lost by rename or append")


def main(name: str, folder: str) -> None:
    """Run a check and print its finding as JSON. An exception of the check becomes a problem."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the JSON
    try:
        if name == "folder":
            finding = check_folder(folder)
        else:
            from layerkit_runner.tools.doctor import devices  # imports JAX

            finding = devices.CHECKS[name]()
    except Exception as error:  # drivers, compilers and stores raise exceptions of any type
        text = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        what = f"{folder if name == 'folder' else name}: {text}"
        problem = Problem(what, _REMEDIES.get(name, "Search the web for this message."))
        finding = Finding(["failed, see below"], {}, [problem])
    json.dump(finding, answer)
    answer.flush()
