"""Compare saving and restoring checkpoints of this project with plain Orbax.

Each round saves the same state with both, and restores it from disk, not from the page cache. A
small save comes first and is not measured, because each manager makes its storage for it. The
output has medians in seconds and the median ratio of the rounds:

    blocked    until `save` returns; training waits
    saved      until the step is committed, including checksums
    restored   until the arrays are restored, including verification

    python benchmarks/checkpoint.py                           1 GB in one process and in two
    python benchmarks/checkpoint.py --gigabytes 4 --rounds 1
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ARRAY_SHAPE = (2048, 2048)  # 16 MiB of float32
KINDS = ("layerkit", "orbax")
BARS = {"blocked": 1.2, "saved": 1.2, "restored": 1.1}


def make_state(num_bytes: float) -> dict[str, Any]:
    """Return weights and their two moments, sharded by rows over the processes."""
    import jax

    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    draw = jax.jit(
        lambda key: jax.random.normal(key, ARRAY_SHAPE), out_shardings=sharding, static_argnums=()
    )
    count = round(num_bytes / (4 * ARRAY_SHAPE[0] * ARRAY_SHAPE[1] * 3))
    keys = iter(jax.random.split(jax.random.key(0), 3 * count))
    parts = ("params", "mu", "nu")
    state = {part: {f"layer_{i}": draw(next(keys)) for i in range(count)} for part in parts}
    return jax.block_until_ready(state)


class _Layerkit:
    """A writer and reader of this project's checkpoints."""

    def __init__(self, folder: Path) -> None:
        from layerkit_runner.checkpointing import CheckpointManager

        self._manager = CheckpointManager(folder)

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, state, input_states={}, metadata={}, force=True)

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, target: Any) -> Any:
        return self._manager.restore_newest(target).state

    def close(self) -> None:
        self._manager.close()


class _Orbax:
    """A writer and reader of Orbax checkpoints with default options."""

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._manager = ocp.CheckpointManager(folder)

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, args=self._ocp.args.StandardSave(state))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, target: Any) -> Any:
        return self._manager.restore(1, args=self._ocp.args.StandardRestore(target))

    def close(self) -> None:
        self._manager.close()


def drop_from_page_cache(folder: Path) -> None:
    """Evict the files of a folder from the page cache, so that the next read is from disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_round(
    kind: str, state: Any, folder: Path, sync: Callable[[], None]
) -> dict[str, float]:
    """Return the seconds of one save and one restore."""
    import jax

    make = {"layerkit": _Layerkit, "orbax": _Orbax}[kind]
    sync()
    manager = make(folder)
    manager.save(0, {"params": {"small": next(iter(state["params"].values()))[:, :1]}})
    manager.wait()
    sync()
    began = time.perf_counter()
    manager.save(1, state)
    blocked = time.perf_counter() - began
    manager.wait()
    saved = time.perf_counter() - began
    manager.close()
    sync()
    if jax.process_index() == 0:
        drop_from_page_cache(folder)
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    sync()
    began = time.perf_counter()
    manager = make(folder)
    restored = jax.block_until_ready(manager.restore(target))
    sync()
    seconds = {"blocked": blocked, "saved": saved, "restored": time.perf_counter() - began}
    manager.close()
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
    assert all(bool((ours == theirs).all()) for ours, theirs in pairs)
    del restored
    gc.collect()
    return seconds


def work(options: argparse.Namespace) -> None:
    """Measure as one process of a job; process 0 prints a line of JSON for each measurement."""
    import jax
    from jax.experimental import multihost_utils

    if options.count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(options.address, options.count, options.index)
    state = make_state(options.gigabytes * 1e9)
    names = iter(range(10**6))

    def sync() -> None:
        if options.count > 1:
            multihost_utils.sync_global_devices(f"benchmark {next(names)}")

    for number in range(-1, options.rounds):  # the first round compiles
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            folder = Path(options.folder) / kind
            taken = measure_round(kind, state, folder, sync)
            sync()
            if jax.process_index() == 0:
                shutil.rmtree(folder)
                print(json.dumps({"round": number, "kind": kind, **taken}), flush=True)


def measure(count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `count` processes and return the measurements of process 0 after the first round."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        words = ["--worker", f"--address={address}", f"--count={count}", f"--folder={folder}"]
        words += [f"--gigabytes={options.gigabytes}", f"--rounds={options.rounds}"]
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, *words, f"--index={index}"],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(count)
        ]
        outputs = [worker.communicate()[0] for worker in workers]
    for worker in workers:
        if worker.returncode != 0:
            raise RuntimeError(f"a worker failed with exit code {worker.returncode}")
    lines = [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]
    return [line for line in lines if line["round"] >= 0]


def report(count: int, gigabytes: float, result: Sequence[dict[str, Any]]) -> None:
    """Print the medians and ratios of a job with `count` processes."""
    print(f"{gigabytes:g} GB, {count} process{'' if count == 1 else 'es'}:")
    for what, bar in BARS.items():
        ours, theirs = ([line[what] for line in result if line["kind"] == kind] for kind in KINDS)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        medians = f"{statistics.median(ours):7.3f} s against {statistics.median(theirs):7.3f} s"
        print(
            f"  {what:9} {medians}  ratio {statistics.median(ratios):.2f} (at most {bar}; rounds"
            f" {', '.join(f'{ratio:.2f}' for ratio in ratios)})",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="job sizes")
    parser.add_argument("--rounds", type=int, default=5, help="number of measured rounds")
    parser.add_argument("--folder", help="folder to write to (default: the temporary folder)")
    for name in ("--worker", "--address", "--count", "--index"):
        is_number = name in ("--count", "--index")
        settings: dict[str, Any] = {"type": int} if is_number else {}
        settings = {"action": "store_true"} if name == "--worker" else settings
        parser.add_argument(name, help=argparse.SUPPRESS, **settings)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("jax", "orbax-checkpoint")
    ]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},"
        f" {', '.join(versions)}"
    )
    for count in options.processes:
        report(count, options.gigabytes, measure(count, options))


if __name__ == "__main__":
    main()
