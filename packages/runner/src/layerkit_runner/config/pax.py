"""Names of Pax on the command line: flags, and experiments in Pax's documents."""

from __future__ import annotations

import re
from typing import Any

from layerkit_runner.config.overrides import Override
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import AUTO_ADDRESS, JOINING_MODES

OTHER_NAMES = {
    "fdl_config": "exp",
    "server_addr": "coordinator_address",
    "host_idx": "process_id",
    "verbosity": "v",
}
"""Flags of Pax that have another name here."""

ANSWERS = {
    "globally_use_hardware_rng": "The random number generator is part of the configuration:"
    " --fdl.task.train.prng_impl=unsafe_rbg",
    "enforce_restore_shape_check": "Shapes are always checked when a checkpoint is restored.",
    "decode_output_pickle": "Outputs are JSON lines in DIR/decode.",
    "tensorstore_use_ocdbt": "Checkpoints that TensorStore writes are always OCDBT.",
    "maybe_use_persistence_checkpointing": "Checkpoints are always written by TensorStore; pmap"
    " runs choose by --pmap_use_tensorstore.",
}
"""What to do in place of a flag of Pax that has no counterpart."""

# Packages of experiments in Pax's documents, each with the package here.
_PACKAGES = (
    (re.compile(r"(paxml\.)?tasks\.(\w+)\.params\."), r"\2."),
    (re.compile(r"paxml\.contrib\.gpu\.scripts_gpu\.configs\.(?=LLaMA)"), "lm.boolq."),
    (re.compile(r"paxml\.contrib\.gpu\.scripts_gpu\.configs\."), "lm.pile."),
)


def experiment_name(name: str) -> str:
    """Return the name of an experiment here for its name in Pax's documents, or the name itself."""
    for pattern, package in _PACKAGES:
        if pattern.match(name):
            return pattern.sub(package, name, count=1)
    return name


def replace_flags(values: dict[str, Any]) -> list[Override]:
    """Replace flags of Pax by those of the runner; return the overrides that they stand for."""
    # Of --mode=inspect, --num_hosts is a flag of its own.
    if "num_hosts" in values and values.get("mode", "train") in JOINING_MODES:
        hosts = values.pop("num_hosts")
        if values.setdefault("num_processes", hosts) != hosts:
            raise UsageError(field="--num_hosts", value=hosts, expected="that of --num_processes")
    if values.get("multiprocess_gpu"):
        values.setdefault("coordinator_address", AUTO_ADDRESS)
    folder = values.get("tfds_data_dir")
    return [] if folder is None else [Override("TFDS_DATA_DIR", folder)]
