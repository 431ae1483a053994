"""On this machine: a script that starts the run, and again when it is killed or hangs.

One process takes all the GPUs of a machine, so there is nothing else to arrange.
"""

from __future__ import annotations

import argparse
import os
import shlex

from layerkit_runner.tools.launch import scripts
from layerkit_runner.tools.launch.environment import inherited_variables, written_variables
from layerkit_runner.tools.launch.flag_values import not_negative
from layerkit_runner.tools.launch.recipe import Recipe
from layerkit_runner.tools.launch.request import Request, own_command, split_command

_PRESETS = {"gpu": "gpu_latency_hiding", "other": None}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this kind."""
    parser.add_argument(
        "--max_restarts",
        type=not_negative,
        default=3,
        metavar="N",
        help="how often the run is started again after it was killed or hung (default 3)",
    )
    parser.add_argument(
        "--devices",
        choices=tuple(_PRESETS),
        default="other",
        help="gpu: use the compiler flags that are recommended for GPUs (default other)",
    )
    parser.add_argument(
        "--script",
        metavar="FILE",
        help="where to write the script (default DIR/launch/local.sh; ./NAME.local.sh if DIR is in"
        " a store)",
    )


def make_recipe(request: Request, options: argparse.Namespace) -> Recipe:
    """The script, and a command that runs it."""
    preset = None if options.norecommended_xla_flags else _PRESETS[options.devices]
    request = request.with_preset(preset)
    path = script_path(request, "local.sh", options.script)
    files = {path: script(request, options)}
    return Recipe(files=files, commands=[["bash", path]], hands_over=True)


def script_path(request: Request, name: str, chosen: str | None) -> str:
    """Return the absolute path of a script.

    Args:
      request: Command that is launched.
      name: File name, where no path was chosen. The file lies in the folder of the run, or in the
        working directory if that folder is in a store.
      chosen: Value of `--script`.
    """
    if chosen is not None:
        return os.path.abspath(chosen)
    if request.is_in_store:
        return os.path.abspath(f"{request.job_name}.{name}")
    return os.path.join(request.folder, "launch", name)


def script(request: Request, options: argparse.Namespace) -> str:
    """The text of the script."""
    command = split_command(options.runner, own_command())
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {request.experiment} on this machine; runs until it is done or fails for good.",
            "set -u",
            f"cd {shlex.quote(os.getcwd())}",
            scripts.environment_lines(
                written_variables(options), options.setup, inherited=inherited_variables(options)
            ),
            scripts.FORWARD_SIGNALS,
            scripts.words_array("run", [*command, *request.words]),
            scripts.start_and_wait('"${run[@]}"', max_restarts=options.max_restarts),
        ]
    )
