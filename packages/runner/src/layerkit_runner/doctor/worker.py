"""The process that tries things: `python -m layerkit_runner.doctor.worker GROUP OPTIONS`.

It prints the findings of the checks of a group, each as a line of JSON, in their order; whatever
else is printed meanwhile goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from layerkit_runner.doctor.finding import Finding, failed, not_looked_at, to_json

Check = Callable[[Mapping[str, Any]], Finding]


_TO_DO = {
    "devices": "Look at JAX_PLATFORMS, at CUDA_VISIBLE_DEVICES, and whether the package for these"
    " devices is installed, such as layerkit-runner[cuda] or layerkit-runner[tpu]; nvidia-smi says"
    " whether the driver works.",
}


def _storage() -> dict[str, Check]:
    from layerkit_runner.doctor import storage

    return {"folder": storage.check_folder, "compile cache": storage.check_compile_cache}


def _devices() -> dict[str, Check]:
    # Loads JAX, for which only this group waits.
    from layerkit_runner.doctor import devices

    return {
        "devices": devices.check_devices,
        "arithmetic": devices.check_arithmetic,
        "attention": devices.check_attention,
        "collectives": devices.check_collectives,
    }


GROUPS: dict[str, Callable[[], dict[str, Check]]] = {"storage": _storage, "devices": _devices}


def main(group: str, options: Mapping[str, Any]) -> None:
    """Runs the checks of a group; one that raises is a problem, and the others go on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    missing = None
    for name, check in GROUPS[group]().items():
        try:
            finding = check(options) if missing is None else not_looked_at(missing)
        except Exception as error:  # whatever a driver or a file system comes up with
            first = str(error).strip().splitlines()[:1]
            text = ": ".join([type(error).__name__, *first])
            finding = failed(f"{name}: {text}", _TO_DO.get(name, "Search the web for this text."))
            # Without devices the others would say the same once more.
            missing = name if name == "devices" else None
        print(json.dumps(to_json(finding)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
