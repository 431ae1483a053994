"""Compare optimizers by their steps to a fixed held-out loss, on LocalText.

All runs have the same model, batch and data, a warmup and then a constant rate. Held-out losses are
those of averaged weights, which stand for a decay at every step. Each optimizer is tuned on one
grid of rates with seed 0, and then runs with other seeds. The loss to reach is the lowest that
the first optimizer reaches with every seed. Tests are paired by seed, on logarithms of steps.

    export OPENBLAS_NUM_THREADS=1    # Threads of LAPACK would wait for each other in SOAP.
    for core in 0 1; do taskset -c $core python benchmarks/optimizers.py DIR & done; wait
    python benchmarks/optimizers.py DIR --svg=docs/pictures/optimizers.svg    # the table and curves

Processes share the runs in DIR, and the same command resumes them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from layerkit.errors import UserError
from layerkit_runner import train
from layerkit_runner.files.text import draw_table
from layerkit_runner.observers import read_metrics
from layerkit_runner.run.job_folder import try_lock

EXP = "lm.quickstart.LocalText"
OPTIONS = {"enable_checkpoint_saving": False, "enable_summary_writer": False}
FIELDS = {
    "MODEL_DIMS": 64,
    "HIDDEN_DIMS": 256,
    "WARMUP_STEPS": 50,
    "MIN_LEARNING_RATE_RATIO": 1.0,
    "EVAL_INTERVAL_STEPS": 25,
    "ICI_MESH_SHAPE": [1, 1, 1],
    "MAX_DECODE_STEPS": 8,
    # About 20,000 held-out tokens, all of which each evaluation reads.
    "datasets.0.heldout_fraction": 0.002,
    "datasets.1.heldout_fraction": 0.002,
    "task.train.learner.ema_decay": 0.99,
    "task.train.eval_use_ema_states": True,
}


class Comparison(argparse.Namespace):
    """The runs of a folder, by optimizer, rate and seed."""

    def folder_of(self, optimizer: str, rate: float, seed: int) -> Path:
        """Return the folder of a run."""
        return self.folder / f"{optimizer}-{rate:g}-{seed}"

    def losses(self, *run: Any) -> np.ndarray | None:
        """Return steps and held-out losses `[evaluations, 2]` of a finished run, or None."""
        folder = self.folder_of(*run)
        if (folder / "failed.txt").exists():
            return np.array([(self.steps, np.inf)])
        if not (folder / "metrics.jsonl").exists():
            return None
        records = read_metrics(folder).evals.get("heldout", [])
        losses = np.array([(record["step"], record["loss"]) for record in records])
        return losses if len(losses) and losses[-1, 0] == self.steps else None

    def tuned_rate(self, optimizer: str) -> float | None:
        """Return the rate with the lowest last loss of seed 0, or None before all have run."""
        curves = {rate: self.losses(optimizer, rate, 0) for rate in self.rates}
        last = {rate: losses[-1, 1] for rate, losses in curves.items() if losses is not None}
        return min(last, key=lambda rate: last[rate]) if len(last) == len(curves) else None

    def known_runs(self) -> Iterator[tuple[str, float, int]]:
        """Yield the runs for tuning, and those of the seeds at rates that are tuned."""
        yield from ((name, rate, 0) for name in self.optimizers for rate in self.rates)
        for name in self.optimizers:
            if (rate := self.tuned_rate(name)) is not None:
                yield from ((name, rate, seed) for seed in self.seeds)

    def run_all(self) -> None:
        """Run what is left, beside other processes in the same folder."""
        while left := [run for run in self.known_runs() if self.losses(*run) is None]:
            locks = ((run, try_lock(self.folder_of(*run) / "claim.lock")) for run in left)
            run, held = next(((run, held) for run, held in locks if held), (None, None))
            if held is None or run is None:
                time.sleep(1.0)  # Other processes run all that is left.
                continue
            with held:
                self.start(*run)

    def start(self, optimizer: str, rate: float, seed: int) -> None:
        """Train a run, unless another process has, and record its failure."""
        folder, began = self.folder_of(optimizer, rate, seed), time.monotonic()
        if self.losses(optimizer, rate, seed) is not None:
            return
        fields = {"OPTIMIZER": optimizer, "LEARNING_RATE": rate, "MAX_STEPS": self.steps}
        fields |= {"SEED": seed, "datasets.0.input_random_seed": seed, **FIELDS}
        try:
            train(EXP, job_log_dir=folder, overrides=fields, options=OPTIONS, quiet=True)
        except UserError as error:
            (folder / "failed.txt").write_text(str(error))
        loss = self.losses(optimizer, rate, seed)[-1, 1]
        print(f"{folder.name}: {loss:.4f} after {time.monotonic() - began:.0f} s", flush=True)

    def report(self) -> list[str]:
        """Return the lines of the table; draw the curves if there is a file for them."""
        rates = {name: self.tuned_rate(name) for name in self.optimizers}
        curves = {n: [self.losses(n, r, seed) for seed in self.seeds] for n, r in rates.items()}
        base, rows = self.optimizers[0], []
        target = max(losses[:, 1].min() for losses in curves[base])
        steps = {n: np.array([steps_to(one, target) for one in c]) for n, c in curves.items()}
        for name, counts in steps.items():
            at_end = "*" * (rates[name] in (self.rates[0], self.rates[-1]))
            shown = [
                f"{count:.0f}" if np.isfinite(count) else f"> {self.steps}"
                for count in (np.median(counts), min(counts), max(counts))
            ]
            spread = " to ".join(dict.fromkeys(shown[1:]))
            rows.append([name, f"{rates[name]:g}{at_end}", shown[0], spread])
            ratios = np.log(counts / steps[base])
            if name == base or len(ratios) == 1 or not np.isfinite(ratios).all():
                ratio = np.exp(ratios.mean())
                rows[-1] += [f"{ratio:.3f}" if np.isfinite(ratio) else "", "", ""]
                continue
            test = stats.ttest_1samp(ratios, 0.0)
            low, high = np.exp(test.confidence_interval(0.95))
            paired = (
                f"{np.exp(ratios.mean()):.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{test.pvalue:.2g}",
            )
            rows[-1] += paired
        if self.svg is not None:
            axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
            for index, (name, seeds) in enumerate(curves.items()):
                lines = [axes.plot(*losses.T, f"C{index}", linewidth=0.8)[0] for losses in seeds]
                lines[0].set_label(name)
            axes.axhline(target, color="gray", linewidth=0.8, linestyle="--")
            axes.set(xlabel="step", ylabel="held-out loss", ylim=(None, 1.5 * target))
            axes.legend()
            figure.savefig(self.svg)
        head = ["optimizer", "LEARNING_RATE", "steps", "range", f"steps / {base}", "95 %", "p"]
        title = f"{self.steps} steps, held-out loss {target:.4f}; * at an end of the grid"
        return [title, *draw_table(rows, head=head)]


def steps_to(losses: np.ndarray, target: float) -> float:
    """Return the step at which a loss is reached, on a line between evaluations, or infinity."""
    (reached,) = np.nonzero(losses[:, 1] <= target)
    if not len(reached):
        return np.inf
    before = losses[max(reached[0] - 1, 0) : reached[0] + 1]
    return float(np.interp(-target, -before[:, 1], before[:, 0]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    names = ["adamw", "lion", "soap", "shampoo", "muon", "normuon"]
    parser.add_argument("--optimizers", nargs="+", default=names)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--svg", type=Path)
    comparison = parser.parse_args(namespace=Comparison())
    comparison.run_all()
    print("\n".join(comparison.report()))
