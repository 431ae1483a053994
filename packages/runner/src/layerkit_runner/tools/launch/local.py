"""On this machine: a script that starts the run, waits for it, and starts it again if that helps.

Its parts serve the scripts of the other launchers too. They are written in Bash, which is on every
machine with Slurm, GPUs or TPUs. A run that is started again resumes from its newest checkpoint.
"""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Sequence

from layerkit_runner.run_options import Flag, non_negative
from layerkit_runner.tools.launch.recipe import Recipe
from layerkit_runner.tools.launch.request import Request, own_command, split_command
from layerkit_runner.tools.launch.values import Options, inherited_variables, written_variables

# No progress (70), another process lost (75), or killed: 128 plus SIGABRT, SIGBUS, SIGKILL (as for
# want of memory) or SIGSEGV. Ctrl-C (130) and SIGTERM (143) were meant.
RETRIED_EXIT_CODES = (70, 75, 134, 135, 137, 139)
# An error, a wrong command, or training that is not finite: another start would end like it.
FINAL_EXIT_CODES = (1, 2, 65)
# Output appears as it is written.
VARIABLES = {"PYTHONUNBUFFERED": "1"}
# Time for machines that come and go to come.
SECONDS_BETWEEN_STARTS = 10

MAX_RESTARTS = Flag(
    "max_restarts",
    non_negative,
    "how often the run is started again after a process was lost, killed or hung",
    "N",
    default=3,
)
SCRIPT = Flag(
    "script", str, "where to write it; by default in DIR/launch or, for a store, ./", "FILE"
)
FLAGS = (
    MAX_RESTARTS,
    Flag("devices", str, "gpu: use compiler flags for GPUs", "KIND", "other", ("gpu", "other")),
    SCRIPT,
)

FORWARD_SIGNALS = """\
# What stops this script stops the run, which saves and leaves.
set -m
child=
early=
forward() {
  if [ -n "$child" ]; then kill -"$1" "$child"; else early=$1; fi
}
trap 'forward TERM' TERM
trap 'forward INT' INT
"""


def make_recipe(request: Request, options: Options) -> Recipe:
    """Return the script, and a command that runs it."""
    if options.devices == "gpu":
        request = request.with_preset("gpu_latency_hiding", options)
    path = script_path(request, "local.sh", options.script)
    command = split_command(options.runner, own_command())
    text = "\n".join(
        [
            "#!/bin/bash",
            f"# {request.experiment} on this machine; runs until it is done or fails for good.",
            "set -u",
            f"cd {shlex.quote(os.getcwd())}",
            environment_lines(options, inherited=inherited_variables(options)),
            FORWARD_SIGNALS,
            words_array("run", [*command, *request.words]),
            start_and_wait('"${run[@]}"', max_restarts=options.max_restarts),
        ]
    )
    return Recipe(files={path: text}, commands=[["bash", path]], hands_over=True)


def script_path(request: Request, name: str, chosen: str | None) -> str:
    """Return the absolute path of a script: the chosen one, or `name` in the folder of the run.

    The script lies in the working directory if that folder is in a store.
    """
    if chosen is not None:
        return os.path.abspath(chosen)
    if request.is_in_store:
        return os.path.abspath(f"{request.job_name}.{name}")
    return os.path.join(request.folder, "launch", name)


def environment_lines(options: Options, *, inherited: Sequence[str] = ()) -> str:
    """Return lines that set the variables of `--env` and then run those of `--setup`.

    The script ends if it is started without one of the `inherited` variables.
    """
    variables = {**VARIABLES, **written_variables(options)}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    checks = [f': "${{{name}:?is not set where this script was started}}"' for name in inherited]
    return "".join(f"{line}\n" for line in [*exports, *checks, *options.setup])


def words_array(name: str, words: Sequence[str]) -> str:
    """Return words as a Bash array, one to a line."""
    quoted = "".join(f"  {shlex.quote(word)}\n" for word in words)
    return f"{name}=(\n{quoted})\n"


def start_and_wait(
    start: str,
    *,
    max_restarts: int,
    before_start: str = "",
    after_end: str = "",
    pause: int = SECONDS_BETWEEN_STARTS,
) -> str:
    """Return a loop that starts a command in the background and waits for it.

    Args:
      start: The command, as a line of Bash.
      max_restarts: How often it is started again after one of `RETRIED_EXIT_CODES`.
      before_start: Lines before each start, which may leave the script.
      after_end: Lines after each end, which know `$code` and may leave the script.
      pause: Seconds before it is started again.
    """
    retried = " | ".join(map(str, RETRIED_EXIT_CODES))
    return f"""\
restarts=0
while :; do
{textwrap.indent(before_start, "  ")}\
  {start} &
  child=$!
  if [ -n "${{early:-}}" ]; then kill -"$early" "$child"; fi # it was to stop before it started
  while :; do # a trapped signal ends 'wait' before the run ends
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  child=
{textwrap.indent(after_end, "  ")}\
  case "$code" in
  {retried}) ;; # no progress, another process lost, or killed
  *) exit "$code" ;;
  esac
  if [ "$restarts" -ge {max_restarts} ] || [ -n "${{early:-}}" ]; then exit "$code"; fi
  restarts=$((restarts + 1))
  echo "launch: exit code $code; start $restarts of {max_restarts} more, from the newest checkpoint"
  sleep {pause}
done
"""
