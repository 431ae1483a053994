"""Plan the rows of docs/results/plans.json again and store their figures.

    python scripts/renew_plans.py [PART ...]

Arguments are parts of the experiments or targets of the rows to renew; without them, all are. A row
names an experiment, its flags and its target. Its other figures come from the command
`runner --exp=EXPERIMENT FLAGS --mode=plan --target=TARGET`, except `published`: a rate that others
measured. The script takes minutes for each row and requires the compilers of TPUs and GPUs
(`pip install 'layerkit-runner[plan-tpu,plan-cuda]'`). `scripts/renew_docs.py` writes the tables of
docs/results.md from the file.
"""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PLANS = Path(__file__).resolve().parents[1] / "docs/results/plans.json"


def main(parts: Sequence[str]) -> int:
    """Renew the rows whose names contain one of `parts`, and return the exit code."""
    failed = False
    for number in range(len(json.loads(PLANS.read_text()))):
        rows = json.loads(PLANS.read_text())
        row = rows[number]
        name = f"{row['experiment']} {row['flags']} {row['target']}"
        if parts and not any(part in name for part in parts):
            continue
        command = [*(sys.executable, "-m", "layerkit_runner.cli", f"--exp={row['experiment']}")]
        command += [*shlex.split(row["flags"]), "--mode=plan", f"--target={row['target']}"]
        process = subprocess.run([*command, "--json"], capture_output=True, text=True)
        plan = {"bounds": None} if process.returncode else json.loads(process.stdout)
        if plan["bounds"] is None:
            failed = True
            reason = plan.get("refusal") or process.stderr
            print(f"{name} failed: {reason.strip()[-500:]}", file=sys.stderr)
            continue
        rows[number] = {**row, **figures(plan)}
        PLANS.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{name}: {rows[number]['peak_gb']} GB", flush=True)
    return int(failed)


def figures(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored figures of a plan in JSON form."""
    bounds = plan["bounds"]
    axes = [f"{name} {size}" for name, size in plan["mesh"].items() if size > 1]
    return {
        "date": datetime.date.today().isoformat(),
        "num_devices": plan["num_devices"],
        "num_params": plan["num_params"],
        "mesh": " × ".join(axes),
        "tokens_per_step": plan["batch"]["tokens"],
        "peak_gb": float(f"{plan['memory']['peak'] / 1e9:.3g}"),
        "fits": plan["fits"],
        "tokens_per_sec": [round(bounds[f"tokens_per_sec{end}"]) for end in ("", "_no_overlap")],
        "mfu_percent": [round(100 * bounds[f"mfu{end}"]) for end in ("", "_no_overlap")],
        "limited_by": bounds["limited_by"],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
