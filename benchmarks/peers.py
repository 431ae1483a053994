"""Compare training steps on a CPU or a GPU: layerkit, hand-written JAX, and PyTorch.

Each trains the same model from the same weights on the same batch, in a process of its own, as a
run would: layerkit's keeps freed memory, as `runner` does. The processes take turns of some steps,
so that all see the same load of the machine. The table has the time of the fastest turn and the
speed relative to layerkit's. The losses of the first steps must agree.

    python -m venv torch && torch/bin/pip install torch==2.13.0 numpy
    python benchmarks/peers.py --torch=torch/bin/python
    python benchmarks/peers.py --torch=python --bf16 --dims 768 --layers 12 --heads 12 --mlp 2048 \
        --length 2048 --vocab 50304 --rivals layerkit "torch eager" "torch compiled"    # on a GPU

The hand-written model holds the attention matrices of all layers: 47 GB with the second command.

With `--bf16`, products are in bfloat16, and weights, norms and the loss in float32 (in PyTorch, by
autocast).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CHECKED_STEPS = 3
LOSS_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-3}
RIVALS = ("layerkit", "handwritten", "torch eager", "torch compiled")
SIZES = {"vocab": 512, "dims": 256, "layers": 4, "heads": 4, "mlp": 1024, "batch": 8, "length": 256}


def jax_step(name: str, sizes: dict[str, Any], given: dict[str, Any]) -> Callable[[], float]:
    """Return a function that trains one step of layerkit or of the hand-written model."""
    if name == "layerkit":
        from layerkit_runner.distributed.devices import keep_freed_memory

        keep_freed_memory()
    import jax
    from step import Sizes, handwritten_step, layerkit_step

    from layerkit.config.nested_map import NestedMap

    params = jax.tree.map(jax.numpy.asarray, given["params"])
    whole = Sizes(**sizes, kv_heads=sizes["heads"], remat=False)
    if name == "layerkit":
        batch = NestedMap({key: given["batch"][key] for key in ("ids", "labels", "weights")})
        step, state = layerkit_step(whole, params, batch)
        placed, state = jax.device_put(batch), jax.tree.map(jax.numpy.copy, state)

        def train() -> float:
            nonlocal state
            state, (metrics, _) = step(state, placed)
            return float(metrics["loss"].value)

        return train
    step, opt_state = handwritten_step(whole, params, given["batch"])
    state = (params, opt_state)

    def train_by_hand() -> float:
        nonlocal state
        *state, loss = step(*state, given["batch"])
        return float(loss)

    return train_by_hand


def work(name: str, folder: Path) -> None:
    """Serve one rival: print the first losses, then the seconds per step of each turn."""
    sizes = json.loads((folder / "sizes.json").read_text())
    arrays = np.load(folder / "arrays.npz")
    given: dict[str, Any] = {"params": {"layers": {}}, "batch": {}}
    for path, array in arrays.items():
        *parents, last = path.split("/")
        node = given
        for parent in parents:
            node = node[parent]
        node[last] = array
    if name.startswith("torch"):
        from torch_rival import make_step

        step = make_step(
            given["params"],
            given["batch"],
            heads=sizes["heads"],
            bf16=sizes["bf16"],
            is_compiled=name == "torch compiled",
        )
    else:
        step = jax_step(name, sizes, given)
    serve(step, first=[step() for _ in range(CHECKED_STEPS)])


def serve(step: Callable[[], Any], *, first: Any) -> None:
    """Print `first` as JSON, then the seconds per step of each turn that is asked for."""
    print(json.dumps(first), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        print((time.perf_counter() - began) / int(line), flush=True)


def write_inputs(folder: Path, sizes: dict[str, Any]) -> None:
    """Write sizes, weights and batch for all rivals."""
    import handwritten
    import jax
    from step import Sizes, make_batch, rival_config

    whole = Sizes(**sizes, kv_heads=sizes["heads"], remat=False)
    params = handwritten.init_params(jax.random.key(0), rival_config(whole))
    batch = make_batch(whole, 0)
    length = np.arange(sizes["length"], dtype=np.int32)
    batch |= {  # each row is one document
        "segment_ids": np.ones_like(batch["segment_ids"]),
        "segment_pos": np.broadcast_to(length, batch["ids"].shape),
    }
    layers = params.pop("layers")
    np.savez(
        folder / "arrays.npz",
        **{f"params/{name}": value for name, value in params.items()},
        **{f"params/layers/{name}": value for name, value in layers.items()},
        **{f"batch/{name}": value for name, value in batch.items()},
    )
    (folder / "sizes.json").write_text(json.dumps(sizes))


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a worker, which reads and prints lines."""
    # The workers share the memory of a GPU.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def read(worker: subprocess.Popen[str]) -> str:
    """Return the next line of a worker; exit if it has ended."""
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"{worker.args} ended")
    return line


def take_turns(
    workers: dict[str, subprocess.Popen[str]], *, turns: int, steps: int
) -> dict[str, list[float]]:
    """Let the workers run some steps in turn; return the seconds per step, and end them."""
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(turns):
        for name, worker in workers.items():
            assert worker.stdin is not None
            print(steps, file=worker.stdin, flush=True)
            seconds[name].append(float(read(worker)))
    for worker in workers.values():
        worker.communicate()
    return seconds


def print_table(seconds: dict[str, list[float]]) -> None:
    """Print the times of each rival, and layerkit's speed relative to its speed."""
    ours = min(seconds["layerkit"])
    print(f"{'':16}{'ms per step':>12}{'median':>10}{'speed of layerkit':>20}")
    for rival, times in seconds.items():
        median = 1000 * float(np.median(times))
        print(f"{rival:16}{1000 * min(times):12.1f}{median:10.1f}{min(times) / ours:20.2f}")


def compare(
    rivals: Sequence[str], sizes: dict[str, Any], *, torch: str | None, turns: int, steps: int
) -> dict[str, list[float]]:
    """Return the seconds per step of each turn, by rival."""
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), sizes)
        workers = {
            rival: start(
                [
                    (torch or "") if rival.startswith("torch") else sys.executable,
                    *(__file__, "--worker", rival, "--folder", name),
                ]
            )
            for rival in rivals
        }
        tolerance = LOSS_TOLERANCES["bfloat16" if sizes["bf16"] else "float32"]
        losses = {rival: json.loads(read(worker)) for rival, worker in workers.items()}
        for rival, result in losses.items():
            if not np.allclose(result, losses[rivals[0]], rtol=tolerance):
                raise SystemExit(
                    f"losses differ: {rival} {result}, {rivals[0]} {losses[rivals[0]]}"
                )
        return take_turns(workers, turns=turns, steps=steps)


def main() -> None:
    """Compare the rivals and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", help="Python interpreter with PyTorch; none: without PyTorch")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=RIVALS)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--bf16", action="store_true", help="multiply in bfloat16")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.folder)
        return
    rivals = [name for name in args.rivals if args.torch or not name.startswith("torch")]
    sizes = {name: getattr(args, name) for name in (*SIZES, "bf16")}
    result = compare(rivals, sizes, torch=args.torch, turns=args.turns, steps=args.steps)
    print_table(result)


if __name__ == "__main__":
    main()
