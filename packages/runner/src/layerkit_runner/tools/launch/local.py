"""A script for this machine that runs a command and restarts it after a kill or a hang.

The scripts of other launchers use its parts. They are written in Bash, which is on every machine
with Slurm, GPUs or TPUs. A restarted run resumes from its newest checkpoint.
"""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Sequence

from layerkit_runner.run_options import Flag, non_negative
from layerkit_runner.tools.launch.request import Options, Request, Script, installed_runner

# No progress (70), unreadable data (74), another process lost (75), or killed: 128 plus SIGABRT,
# SIGBUS, SIGKILL (such as for lack of memory) or SIGSEGV. Ctrl-C (130) and SIGTERM (143) are
# requests to stop.
RETRIED_EXIT_CODES = (70, 74, 75, 134, 135, 137, 139)
# An error, a wrong command, or non-finite training: a restart would fail in the same way.
FINAL_EXIT_CODES = (1, 2, 65)

MAX_RESTARTS = Flag(
    "max_restarts",
    non_negative,
    "limit of restarts after a process was lost, killed or hung",
    "N",
    default=3,
)
HELP = "on this machine, with restarts after a kill or a hang"
FLAGS = (MAX_RESTARTS,)

FORWARD_SIGNALS = """\
# Signals that stop this script are forwarded to the run, which saves and exits.
set -m
child=
early=
forward() {
  if [ -n "$child" ]; then kill -"$1" "$child"; else early=$1; fi
}
trap 'forward TERM' TERM
trap 'forward INT' INT
"""


def make_script(request: Request, options: Options) -> Script:
    """Return the script, which replaces the launching process."""
    text = "\n".join(
        [
            "#!/bin/bash",
            "set -u",
            f"cd {shlex.quote(os.getcwd())}",
            environment_lines(options),
            FORWARD_SIGNALS,
            bash_array("run", [*options.command(installed_runner()), *request.words]),
            restart_loop('"${run[@]}"', max_restarts=options.max_restarts),
        ]
    )
    path = request.script_path("local", options.script)
    return Script(path, text, "bash", replaces_process=True)


def environment_lines(options: Options) -> str:
    """Return lines that set or require the variables of `--env`, and then those of `--setup`."""
    variables = {"PYTHONUNBUFFERED": "1", **options.written_variables}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    inherited = options.inherited_variables()
    checks = [f': "${{{name}:?is not set where this script was started}}"' for name in inherited]
    return "".join(f"{line}\n" for line in [*exports, *checks, *options.setup])


def bash_array(name: str, words: Sequence[str]) -> str:
    """Return words as a Bash array, one to a line."""
    quoted = "".join(f"  {shlex.quote(word)}\n" for word in words)
    return f"{name}=(\n{quoted})\n"


def restart_loop(
    start: str, *, max_restarts: int, before_start: str = "", after_end: str = ""
) -> str:
    """Return a loop that starts a command in the background and waits for it.

    It waits 10 s before a restart, since machines that were replaced need time to start.

    Args:
      start: The command, a line of Bash.
      max_restarts: Limit of restarts, which follow `RETRIED_EXIT_CODES`.
      before_start: Lines before each start. They may exit the script.
      after_end: Lines after each end, where `$code` is the exit code. They may exit the script.
    """
    retried = " | ".join(map(str, RETRIED_EXIT_CODES))
    return f"""\
restarts=0
while :; do
{textwrap.indent(before_start, "  ")}\
  {start} &
  child=$!
  if [ -n "${{early:-}}" ]; then kill -"$early" "$child"; fi # a signal arrived before the start
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
  echo "launch: exit code $code; restart $restarts of {max_restarts}, from the newest checkpoint"
  sleep 10
done
"""
