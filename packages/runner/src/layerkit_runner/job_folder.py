"""The folder of a job: whose run it holds, and with which configuration.

`config.json` and its readable form `config.txt` are written when a training job starts. They say
what command makes the same run again, and keep a folder from being used by two experiments.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from typing import Any

from etils import epath

from layerkit_runner.config_text import config_json, config_text
from layerkit_runner.errors import UsageError
from layerkit_runner.flags import RunOptions
from layerkit_runner.resolve import ResolvedExperiment
from layerkit_runner.whole_files import write_whole


def check_same_experiment(directory: epath.Path, resolved: ResolvedExperiment) -> None:
    """Refuses a folder that holds a run of another experiment.

    Raises:
      UsageError: names both.
    """
    before = _recorded(directory).get("experiment", resolved.name)
    if before != resolved.name:
        raise UsageError(
            f"{directory} holds a run of {before}, not of {resolved.name};"
            " give another --job_log_dir."
        )


def write_config(
    directory: epath.Path, resolved: ResolvedExperiment, *, report: Callable[[str], None]
) -> None:
    """Writes the configuration; reports what differs from the one that was there."""
    config = config_json(resolved)
    before = _recorded(directory)
    for line in changed_lines(before.get("config", config["config"]), config["config"]):
        report(f"changed since this folder was last written: {line}")
    write_whole(directory / "config.txt", config_text(resolved))
    write_whole(directory / "config.json", json.dumps(config, indent=2) + "\n")


def changed_lines(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each path whose value differs."""
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return [f"{path}: {before.get(path)!r} → {after.get(path)!r}" for path in paths]


def recorded_overrides(directory: epath.Path) -> str:
    """The overrides with which the folder was last written, as one would type them; may be ''."""
    overrides = _recorded(directory).get("overrides", {})
    return shlex.join(f"--fdl.{path}={text}" for path, text in overrides.items())


def command_line(resolved: ResolvedExperiment, options: RunOptions, *more: str) -> str:
    """The command that runs this experiment in this folder, with `more` flags, for a shell.

    The environment variable RUNNER_COMMAND says how `runner` is called here, where it has another
    name than that.
    """
    words = [*config_json(resolved)["arguments"], f"--job_log_dir={options.job_log_dir}"]
    if options.pmap_use_tensorstore:
        words.append("--pmap_use_tensorstore")
    return " ".join([os.environ.get("RUNNER_COMMAND", "runner"), shlex.join([*words, *more])])


def _recorded(directory: epath.Path) -> dict[str, Any]:
    path = directory / "config.json"
    return json.loads(path.read_text()) if path.exists() else {}
