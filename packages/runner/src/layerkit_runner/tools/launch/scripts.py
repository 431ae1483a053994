"""Shell lines that start a run, wait for it, and start it again where that helps.

Bash, as it is on every machine that has Slurm, GPUs or TPUs. A run goes on from its newest
checkpoint by being started again, so a script only has to know from which exit codes to do so.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence

# 70: nothing moved; 75: another process was lost; the others are 128 and the signal that killed it:
# SIGABRT, SIGBUS, SIGKILL (as for want of memory) and SIGSEGV. Not 1, 2, 65, 130 or 143: an error,
# a wrong command, training that is not finite, Ctrl-C and SIGTERM would be the same again, or were
# meant.
RETRIED_EXIT_CODES = (70, 75, 134, 135, 137, 139)

# An error, a wrong command and training that is not finite, which would be the same again.
FINAL_EXIT_CODES = (1, 2, 65)

# Of every run: output is seen as it is written.
VARIABLES = {"PYTHONUNBUFFERED": "1"}

# So that machines that come and go have come.
SECONDS_BETWEEN_STARTS = 10

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


def environment_lines(
    variables: Mapping[str, str], setup: Sequence[str], *, inherited: Sequence[str] = ()
) -> str:
    """Return lines that set variables and then run the setup, such as activating an environment.

    Args:
      variables: Variables with their values.
      setup: Lines of shell.
      inherited: Variables without which the script ends; it must be started with them.
    """
    variables = {**VARIABLES, **variables}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    checks = [f': "${{{name}:?is not set where this script was started}}"' for name in inherited]
    return "".join(f"{line}\n" for line in [*exports, *checks, *setup])


def words_array(name: str, words: Sequence[str]) -> str:
    """Words as a Bash array, one to a line."""
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
    """A loop that starts a command in the background and waits for it.

    Args:
      start: The command, as a line of Bash.
      max_restarts: How often it is started again after one of `RETRIED_EXIT_CODES`.
      before_start: Lines before each start, which may leave the script.
      after_end: Lines that look at `$code` first, and may leave the script.
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
