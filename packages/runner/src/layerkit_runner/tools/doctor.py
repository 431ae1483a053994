"""`runner doctor`: one page on versions, memory, disk and devices of this machine.

    runner doctor                       this machine and the current folder
    runner doctor --job_log_dir=DIR     this machine and the folder of a job, or gs://bucket/run

A check that uses a disk or a device runs in a separate process with a time limit: a hanging driver
cannot be interrupted from Python, and a wrong flag of XLA ends its process.

Exit codes: 0 if all checks passed, 1 if one failed.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from etils import epath

from layerkit.errors import pip_install
from layerkit_runner.config.help import read_words
from layerkit_runner.files.text import color_text, size_text
from layerkit_runner.run_options import FLAGS
from layerkit_runner.tools.commands import DOCTOR

# Each plugin has the version number of its jaxlib.
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin")
_PACKAGES = (
    *("layerkit", "layerkit-inputs", "layerkit-runner", "layerkit-experiments"),
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "fiddle", "numpy"),
    *(*_PLUGINS, "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    *("libtpu", "grain", "seqio", "tensorflow", "transformers", "wandb", "trackio"),
)
_LITTLE_SPACE = 10e9
_NO_SPACE = 1e8
# The driver creates these folders, whether JAX uses the devices or not.
_NVIDIA_GPUS = "/proc/driver/nvidia/gpus/*"
_MATRIX = 256

# Seconds. The first use of devices waits for their driver.
TIME_LIMITS = {"folder": 60.0, "devices": 150.0}
_REMEDIES = {
    "folder": "Choose another --job_log_dir, or check that this machine may write there and that a"
    " network file system is reachable.",
    "devices": "Check JAX_PLATFORMS, CUDA_VISIBLE_DEVICES, XLA_FLAGS and LIBTPU_INIT_ARGS, that"
    " layerkit-runner[cuda] or layerkit-runner[tpu] is installed, with nvidia-smi that the driver"
    " works, and that no other program holds the devices. If devices do not reach each other, read"
    " the output with NCCL_DEBUG=INFO and try NCCL_P2P_DISABLE=1. On a slice of several hosts run"
    " `runner doctor` on all of them at once.",
}
# Exit code of the process of a check that has printed a failure.
_FAILED = 10


class Problem(NamedTuple):
    """A sentence with a failure, or a warning if a run would not fail, and one with the remedy."""

    what: str
    to_do: str
    fails: bool = True


Report = Iterable[str | Problem]
"""The lines of a check, with its problems among them."""


def run_doctor(words: Sequence[str]) -> int:
    """Check this machine, print the page, and return the exit code."""
    rows = [row for row in FLAGS if row.name == "job_log_dir"]
    page = f"runner doctor [flags]\n\n{DOCTOR.help}"
    if (read := read_words(words, rows, page=page, takes_words=False)) is None:
        return 0
    values, _ = read
    fails = print_report("packages", examine_packages()) | print_report("host", examine_host())
    for name, limit in TIME_LIMITS.items():
        fails |= run_check(name, values["job_log_dir"] or ".", limit=limit)
    verdict = ("some checks failed", "red") if fails else ("all checks passed", "green")
    print(f"\n{color_text(*verdict)}")
    return 1 if fails else 0


def print_report(name: str, report: Report) -> bool:
    """Print the lines and problems of a check; return whether one of the problems is a failure."""
    fails, heading = False, name
    for line in report:
        text, style = line, ""
        if isinstance(line, Problem):
            fails |= line.fails
            text = f"{'FAILS' if line.fails else 'warning'}: {line.what} → {line.to_do}"
            style = "red" if line.fails else "yellow"
        text = textwrap.fill(f"{heading:<13}{text}", 100, subsequent_indent=" " * 15)
        print(color_text(text, style), flush=True)
        heading = ""
    return fails


def run_check(
    name: str,
    folder: str,
    *,
    limit: float,
    command: Sequence[str] = (sys.executable, "-m", __name__),
) -> bool:
    """Run a check in a separate process, which prints its report; return whether it failed.

    Args:
      name: Key of `TIME_LIMITS`.
      folder: Folder for the check `folder`.
      limit: Seconds after which the process is killed.
      command: Command line, without name and folder.
    """
    # Other programs may need the memory of the devices.
    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen([*command, name, folder], stderr=stderr, env=environ)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)  # a process that waits inside the kernel is left behind
            what = f"no answer within {limit:g} s."
            return print_report(name, [Problem(what, _REMEDIES[name])])
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").split("\n")
    if code in (0, _FAILED):
        return code == _FAILED
    last = " ".join(line.strip() for line in lines[-5:])
    what = f"the process ended with exit code {code}: {last}"
    return print_report(name, [Problem(what, _REMEDIES[name])])


def main(name: str, folder: str) -> int:
    """Run a check in this process; return its exit code. An exception becomes a problem."""

    def examine() -> Report:
        try:
            yield from examine_folder(folder) if name == "folder" else examine_devices()
        except Exception as error:  # drivers, compilers and stores raise exceptions of any type
            text = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            yield Problem(text, _REMEDIES[name])

    return _FAILED if print_report(name, examine()) else 0


def examine_packages() -> Report:
    """Report versions of packages, and plugins that do not fit jaxlib; see also `pip check`."""
    installed: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    yield ", ".join(f"{name} {version}" for name, version in installed.items())
    jaxlib = installed.get("jaxlib")
    for name in _PLUGINS:
        if installed.get(name, jaxlib) != jaxlib:
            what = f"{name} {installed[name]} is for another jaxlib than the installed {jaxlib}."
            yield Problem(what, f"pip install 'jax[{name.split('-')[1]}]=={jaxlib}'")


def examine_host() -> Report:
    """Report Python, system, processors and memory."""
    system = f"{platform.system()} {platform.release()} ({platform.machine()})"
    yield f"Python {platform.python_version()} ({sys.executable}), {system}"
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield f"{cpus} CPU(s), {size_text(memory)} of memory"


def examine_folder(folder: str) -> Report:
    """Write a file in a job folder or store and read it back; raise OSError on failure."""
    is_store = "://" in folder
    path = epath.Path(folder if is_store else os.path.abspath(os.path.expanduser(folder)))
    existing = path
    while not is_store and not existing.exists():
        existing = existing.parent
    where = str(path) if existing == path else f"{path} (does not exist; tried {existing})"
    yield where
    trial, content = existing / f".doctor_{secrets.token_hex(8)}", os.urandom(1 << 20)
    trial.mkdir(parents=is_store)
    try:
        (trial / "bytes").write_bytes(content)
        if (trial / "bytes").read_bytes() != content:
            raise OSError("the bytes read differ from those written")
    finally:
        trial.rmtree(missing_ok=True)
    if is_store:
        return
    usage = shutil.disk_usage(existing)
    yield f"{size_text(usage.free)} free of {size_text(usage.total)}"
    if usage.free < _LITTLE_SPACE:
        to_do = "Free some space. With Adam a checkpoint takes three times the weights."
        yield Problem("The disk is nearly full.", to_do, fails=usage.free < _NO_SPACE)


def examine_devices() -> Report:
    """Report the devices, multiply matrices on each of them, and sum the products over all."""
    from layerkit_runner.distributed.devices import use_cpu_without_accelerators

    use_cpu_without_accelerators()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    devices = jax.local_devices()
    count, platform = len(devices), devices[0].platform
    yield f"{count} × {devices[0].device_kind} ({platform}), JAX {jax.__version__}"
    stats = [device.memory_stats() or {} for device in devices]
    if limits := [known["bytes_limit"] for known in stats if "bytes_limit" in known]:
        used = max(known.get("bytes_in_use", 0) for known in stats)
        yield f"{size_text(min(limits))} of memory each, {size_text(used)} in use"
    yield from _unused_gpus(platform)
    draw = np.random.default_rng(0)
    factors = draw.integers(-1, 2, (2, _MATRIX, _MATRIX)).astype(np.float32)
    expected = factors[0] @ factors[1]  # integers up to 256, which bfloat16 gives exactly

    def multiply(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
        left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
        product = jnp.matmul(left, right, preferred_element_type=jnp.float32)
        return product[None], jax.lax.psum(product, "all")

    specs = PartitionSpec("all"), PartitionSpec()
    mesh = Mesh(np.asarray(devices), ("all",))
    on_all = jax.shard_map(multiply, mesh=mesh, in_specs=(specs[1], specs[1]), out_specs=specs)
    products, total = jax.jit(on_all)(*factors)
    for device, product in zip(devices, np.asarray(products), strict=True):
        if not np.array_equal(product, expected):
            what = f"Device {device.id} multiplies matrices wrongly."
            yield Problem(what, "Remove it and have it examined.")
    sums = [np.asarray(shard.data) for shard in total.addressable_shards]
    whole = np.asarray(products).sum(0)
    if all(np.array_equal(summed, whole) for summed in sums):
        yield "all devices compute, and their sum is correct"
    else:
        to_do = "For NVIDIA GPUs try NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1."
        yield Problem(f"A sum over the {count} devices gives wrong numbers.", to_do)


def _unused_gpus(platform: str) -> Iterator[Problem]:
    count, chosen = len(glob.glob(_NVIDIA_GPUS)), os.environ.get("JAX_PLATFORMS")
    if platform == "cpu" and count:
        install = f"{pip_install('layerkit-runner', 'cuda')}, and check CUDA_VISIBLE_DEVICES."
        yield Problem(
            f"This machine has {count} NVIDIA GPU(s), and JAX sees only the CPU.",
            f"Unset JAX_PLATFORMS={chosen} to use them." if chosen else install,
            fails=not chosen,
        )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
