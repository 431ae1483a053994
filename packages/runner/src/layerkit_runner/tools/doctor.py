"""`runner doctor`: one page on versions, memory, disk, devices and collectives of this machine.

    runner doctor                       this machine and the current folder
    runner doctor --job_log_dir=DIR     this machine and the folder of a job, or gs://bucket/run
    runner doctor --json                the same as one JSON object

A check that uses a disk or a device runs in a separate process with a time limit: a hanging driver
cannot be interrupted from Python, and a wrong flag of XLA ends its process. Only the checks of
devices import JAX.

Exit codes: 0 if all checks passed, 1 if one failed.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath

from layerkit.errors import pip_install
from layerkit_runner.config.flags import read_flags
from layerkit_runner.config.help import flag_rows, table
from layerkit_runner.files.text import size_text
from layerkit_runner.run_options import FLAGS

if TYPE_CHECKING:
    import jax

_OWN_PACKAGES = ("layerkit", "layerkit-inputs", "layerkit-runner", "layerkit-experiments")
# Each plugin has the version number of its jaxlib.
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin")
_PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "fiddle", "numpy"),
    *(*_PLUGINS, "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    *("libtpu", "grain", "seqio", "tensorflow", "transformers", "wandb"),
)
_TRIAL_BYTES = 64 << 20
_LITTLE_SPACE = 10e9
_NO_SPACE = 1e8
# The driver creates these folders, whether JAX uses the devices or not.
_NVIDIA_GPUS = "/proc/driver/nvidia/gpus/*"
_MATRIX = 256
_REDUCED_BYTES = 64 << 20
_REDUCED_BYTES_ON_CPU = 1 << 20
_RUNS = 5

_REMEDIES = {
    "folder": "Choose another --job_log_dir, or check that this machine may write there.",
    "devices": "Check JAX_PLATFORMS and CUDA_VISIBLE_DEVICES, that layerkit-runner[cuda] or"
    " layerkit-runner[tpu] is installed, and with nvidia-smi that the driver works.",
}
# Seconds. The first use of devices waits for their driver.
TIME_LIMITS = {"folder": 60.0, "devices": 150.0, "collectives": 150.0}
_REMEDIES_IF_HANGING = {
    "folder": "A network file system may be unreachable. Choose another --job_log_dir.",
    "devices": "Another program may hold the devices (only one process at a time can use a TPU), or"
    " the driver is stuck. On a slice of several hosts run `runner doctor` on all of them at once.",
    "collectives": "The devices compute but do not reach each other. For NVIDIA GPUs set"
    " NCCL_DEBUG=INFO and read its output, and try NCCL_P2P_DISABLE=1; for simulated CPU devices"
    " set NPROC to a number well above theirs.",
}
_HELP = "check this machine: versions, memory, disk, devices; exit code 1 if a check fails"
_INDENT = " " * 15
_CODE = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
# Lines of a stack trace from compiled code.
_FRAME = re.compile(r"\s*(@|#\d+)\s+0x|\*\*\* ")


class Problem(NamedTuple):
    """A sentence with a failure, or a warning if a run would not fail, and one with the remedy."""

    what: str
    to_do: str
    fails: bool = True


class Finding(NamedTuple):
    """The result of one check: text for people, JSON values for programs, and problems."""

    lines: Sequence[str] = ()
    values: Mapping[str, Any] = {}
    problems: Sequence[Problem] = ()


def run_doctor(words: Sequence[str]) -> int:
    """Check this machine, print the page or the JSON object, and return the exit code."""
    rows = [row for row in FLAGS if row.name in ("job_log_dir", "json", "help")]
    values, _ = read_flags(words, rows)
    if values.get("help"):
        print("\n".join(["runner doctor [flags]", "", _HELP, "", *table(flag_rows(rows))]))
        return 0
    began, as_json = time.monotonic(), values.get("json", False)
    findings: dict[str, Finding] = {}
    for name, finding in run_checks(values.get("job_log_dir", ".")):
        findings[name] = finding
        for line in () if as_json else finding.lines:
            heading = name if line is finding.lines[0] else ""
            print(textwrap.fill(f"{heading:<13}{line}", 100, subsequent_indent=_INDENT), flush=True)
    problems = [
        (name, problem) for name, finding in findings.items() for problem in finding.problems
    ]
    fails = any(problem.fails for _, problem in problems)
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        checks = {name: finding.values for name, finding in findings.items()}
        records = [{"check": name, **problem._asdict()} for name, problem in problems]
        record = {"checks": checks, "problems": records, "works": not fails, "seconds": seconds}
        print(json.dumps(record), flush=True)
        return 1 if fails else 0
    for _, problem in sorted(problems, key=lambda problem: not problem[1].fails):
        text = f"{'FAILS' if problem.fails else 'warning'}: {problem.what}"
        print("", textwrap.fill(text, 100, subsequent_indent="  "), sep="\n")
        print(textwrap.fill(f"  → {problem.to_do}", 100, subsequent_indent="    "))
    print(f"\n{'some checks failed' if fails else 'all checks passed'}, in {seconds:.0f} s")
    return 1 if fails else 0


def run_checks(folder: str) -> Iterator[tuple[str, Finding]]:
    """Run the checks; yield the name and the finding of each."""
    yield "packages", examine_packages()
    yield "host", examine_host()
    for name, limit in TIME_LIMITS.items():
        finding = run_in_process(name, folder, limit=limit)
        yield name, finding
        if name == "devices" and any(problem.fails for problem in finding.problems):
            return  # collectives would fail too


def run_in_process(
    name: str, folder: str, *, limit: float, command: Sequence[str] = (sys.executable, "-c", _CODE)
) -> Finding:
    """Run a check in a separate process and return its finding.

    Args:
      name: Key of `TIME_LIMITS`.
      folder: Argument of the check `folder`.
      limit: Seconds after which the process is killed.
      command: Command line, without name and folder, that prints the finding as JSON.
    """
    # Other programs may need the memory of the devices.
    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        words = [*command, name, folder]
        process = subprocess.Popen(words, stdout=stdout, stderr=stderr, env=environ)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            problem = Problem(f"{name}: no answer within {limit:g} s.", _REMEDIES_IF_HANGING[name])
            return Finding(["does not answer"], {}, [problem])
        finally:
            process.kill()
            # A process that waits inside the kernel cannot be killed and is left behind.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
        stdout.seek(0)
        stderr.seek(0)
        text = stdout.read().decode(errors="replace")
        lines = stderr.read().decode(errors="replace").splitlines()
    if code == 0 and text:
        lines, values, problems = json.loads(text)
        return Finding(lines, values, [Problem(*problem) for problem in problems])
    errors = [line.strip() for line in lines if line.strip() and not _FRAME.match(line)]
    problem = Problem(
        f"{name}: the process ended with exit code {code}: {' '.join(errors[-4:])}",
        "Check XLA_FLAGS and LIBTPU_INIT_ARGS, and the version of the driver.",
    )
    return Finding(["failed, see below"], {}, [problem])


def main(name: str, folder: str) -> None:
    """Run a check and print its finding as JSON. An exception of the check becomes a problem."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the JSON
    try:
        if name == "folder":
            finding = examine_folder(folder)
        else:
            from layerkit_runner.distributed.devices import use_cpu_without_accelerators

            use_cpu_without_accelerators()
            finding = examine_devices() if name == "devices" else examine_collectives()
    except Exception as error:  # drivers, compilers and stores raise exceptions of any type
        text = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        what = f"{folder if name == 'folder' else name}: {text}"
        problem = Problem(what, _REMEDIES.get(name, "Search the web for this message."))
        finding = Finding(["failed, see below"], {}, [problem])
    json.dump(finding, answer)
    answer.flush()


def examine_packages() -> Finding:
    """Report versions of packages, and plugins that do not fit jaxlib; see also `pip check`."""
    installed: dict[str, str] = {}
    for name in (*_OWN_PACKAGES, *_PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    problems = []
    jaxlib = installed.get("jaxlib")
    for name in _PLUGINS:
        if installed.get(name, jaxlib) != jaxlib:
            what = f"{name} {installed[name]} is for another jaxlib than the installed {jaxlib}."
            problems.append(Problem(what, f"pip install 'jax[{name.split('-')[1]}]=={jaxlib}'"))
    line = ", ".join(f"{name} {version}" for name, version in installed.items())
    return Finding([line], installed, problems)


def examine_host() -> Finding:
    """Report Python, system, processors and memory."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sizes = memory_sizes()
    values: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "cpus": cpus,
        **sizes,
    }
    words = (" of memory", " of it available")
    parts = [f"{size_text(size)}{w}" for size, w in zip(sizes.values(), words, strict=False)]
    python = f"Python {values['python']} ({sys.executable}), {values['system']}"
    return Finding([python, ", ".join([f"{cpus} CPU(s)", *parts])], values)


def memory_sizes() -> dict[str, int]:
    """Return the bytes of memory, and of what programs can get without swapping.

    Free memory is less: the kernel gives up its copies of files.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = {"memory_bytes": page * os.sysconf("SC_PHYS_PAGES")}
    with contextlib.suppress(OSError):  # not Linux
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = dict(line.removesuffix(" kB").split(":") for line in lines)
        sizes["memory_available_bytes"] = 1024 * int(kilobytes["MemAvailable"])
    return sizes


def examine_folder(folder: str) -> Finding:
    """Write a file in a job folder or store and read it back; raise OSError on failure."""
    is_store = "://" in folder
    where = folder if is_store else os.path.abspath(os.path.expanduser(folder))
    existing = folder = epath.Path(where)
    while not is_store and not existing.exists():
        existing = existing.parent
    where += "" if existing == folder else f" (does not exist; tried {existing})"
    trial = existing / f".doctor_{secrets.token_hex(8)}"
    trial.mkdir(parents=is_store)
    try:
        speeds = _try_bytes(trial / "bytes")
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


def examine_devices() -> Finding:
    """Report kind, number and memory of the devices, and multiply matrices on each of them."""
    import jax
    import numpy as np

    devices = jax.local_devices()
    platform, kind = devices[0].platform, devices[0].device_kind
    draw = np.random.default_rng(0)
    left, right = (draw.integers(-1, 2, (_MATRIX, _MATRIX)).astype(np.float32) for _ in range(2))
    expected = left @ right  # integers up to 256, which bfloat16 inputs give exactly
    records, problems = [], list(_unused_gpus(platform))
    for device in devices:
        stats = device.memory_stats() or {}
        memory = {key: stats.get(key) for key in ("bytes_in_use", "bytes_limit")}
        records.append({"id": device.id, "kind": device.device_kind, **memory})
        if not np.array_equal(_product(*jax.device_put((left, right), device)), expected):
            what = f"Device {device.id} multiplies matrices wrongly."
            problems.append(Problem(what, "Remove it and have it examined."))
    lines = [f"{len(devices)} × {kind} ({platform}), JAX {jax.__version__}"]
    limits = [record["bytes_limit"] for record in records if record["bytes_limit"] is not None]
    if limits:
        used = max(record["bytes_in_use"] or 0 for record in records)
        lines.append(f"{size_text(min(limits))} of memory each, {size_text(used)} in use")
    return Finding(lines, {"platform": platform, "devices": records}, problems)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return the product of `[n, n]` matrices in bfloat16, accumulated in float32."""
    import jax.numpy as jnp

    left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def _unused_gpus(platform: str) -> Iterator[Problem]:
    count = len(glob.glob(_NVIDIA_GPUS)) if platform == "cpu" else 0
    chosen = os.environ.get("JAX_PLATFORMS")
    if count and chosen:
        what = f"This machine has {count} NVIDIA GPU(s), and JAX_PLATFORMS={chosen} hides them."
        yield Problem(what, "Unset JAX_PLATFORMS to use them.", fails=False)
    elif count:
        what = f"This machine has {count} NVIDIA GPU(s), and JAX sees only the CPU."
        to_do = f"{pip_install('layerkit-runner', 'cuda')}, and check CUDA_VISIBLE_DEVICES."
        yield Problem(what, to_do)


def examine_collectives() -> Finding:
    """Sum numbers over all devices, and report the result and the speed of the fastest run."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    devices = jax.local_devices()
    count = len(devices)
    if count == 1:
        return Finding(["one device, so none to check"], {"num_devices": 1})
    mesh = Mesh(np.asarray(devices), ("all",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("all"))
    size = (_REDUCED_BYTES_ON_CPU if devices[0].platform == "cpu" else _REDUCED_BYTES) // 4
    # Row i is filled with i + 1, on device i.
    row_numbers = np.arange(1.0, count + 1)[:, None]
    numbers = jax.jit(lambda: jnp.broadcast_to(row_numbers, (count, size)), out_shardings=rows)()
    psum = functools.partial(jax.lax.psum, axis_name="all")
    total = jax.jit(jax.shard_map(psum, mesh=mesh, in_specs=rows.spec, out_specs=PartitionSpec()))
    shards = total(numbers).addressable_shards
    is_right = all(np.all(np.asarray(shard.data) == row_numbers.sum()) for shard in shards)
    seconds = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        total(numbers).block_until_ready()
        seconds.append(time.perf_counter() - began)
    # Each device sends at least these bytes, as `--mode=plan` counts them.
    speed = 8 * size * (count - 1) / count / min(seconds)
    values = {"num_devices": count, "psum": {"is_right": is_right, "bytes_per_second": speed}}
    line = f"psum over {count} devices: {'correct' if is_right else 'WRONG'}, {size_text(speed)}/s"
    to_do = "For NVIDIA GPUs try NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1."
    problem = Problem(f"psum over the {count} devices gives wrong numbers.", to_do)
    return Finding([line], values, [] if is_right else [problem])
