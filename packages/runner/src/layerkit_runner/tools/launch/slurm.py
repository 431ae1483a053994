"""As a Slurm batch job that goes on where it stopped, however often it is stopped.

| what happens | what follows |
|---|---|
| its time is nearly up | Slurm tells the script, the run saves, the job queues again and resumes |
| a node fails, or the job is preempted or requeued | Slurm queues it again and the run resumes |
| a process is lost, killed or hangs | all of them end, and are started again in the same job |
| an error, or a wrong command | the job ends with that exit code |
| `scancel` | the run saves and leaves, and the job ends |

One process per node takes all of its GPUs; `--processes_per_node` splits them evenly. `srun` starts
the processes, which find one another by what Slurm says (`processes.launchers`).
"""

from __future__ import annotations

import argparse
import os
import re

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch import scripts
from layerkit_runner.tools.launch.environment import inherited_variables, written_variables
from layerkit_runner.tools.launch.flag_values import adder, not_negative, positive, slurm_seconds
from layerkit_runner.tools.launch.local import script_path
from layerkit_runner.tools.launch.recipe import Recipe
from layerkit_runner.tools.launch.request import Request, own_command, split_command


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this kind."""

    add = adder(parser)
    add("nodes", "how many (default 1)", type=positive, default=1, metavar="N")
    add("gpus_per_node", "0 for none (default 0)", type=not_negative, default=0, metavar="N")
    add(
        "processes_per_node",
        "1 takes all GPUs of a node (default 1)",
        type=positive,
        default=1,
        metavar="N",
    )
    add("cpus_per_process", "CPU cores of each process", type=positive, metavar="N")
    add("time", "time limit of each turn, as Slurm writes it: 24:00:00", metavar="TIME")
    add(
        "save_before_end",
        "seconds before the limit at which the run saves (default 300)",
        type=positive,
        default=300,
        metavar="SECONDS",
    )
    add("partition", "where to queue", metavar="NAME")
    add("account", "whom to charge", metavar="NAME")
    add(
        "max_restarts",
        "how often processes are started again in one turn after one was lost,"
        " killed or hung (default 3)",
        type=not_negative,
        default=3,
        metavar="N",
    )
    add("container_image", "run in this image (srun's pyxis)", metavar="IMAGE")
    add("container_mounts", "FROM:TO,… for the container", metavar="MOUNTS")
    add(
        "sbatch",
        "another option of sbatch, such as --qos=high; repeatable",
        action="append",
        default=[],
        metavar="OPTION",
    )
    add(
        "script",
        "where to write the script (default DIR/launch/slurm.sh; ./NAME.slurm.sh if DIR is in a"
        " store)",
        metavar="FILE",
    )


def make_recipe(request: Request, options: argparse.Namespace) -> Recipe:
    """The batch script, and the command that submits it.

    Raises:
      UsageError: flags that do not fit together, or do not fit the experiment's mesh.
    """
    _check(request, options)
    if options.gpus_per_node and not options.norecommended_xla_flags:
        request = request.with_preset("gpu_latency_hiding")
    path = script_path(request, "slurm.sh", options.script)
    return Recipe(
        files={path: batch_script(request, options)},
        folders=[] if request.is_in_store else [os.path.join(request.folder, "launch")],
        commands=[["sbatch", path]],
        afterwards=[
            f"output: {_output(request)} (%j is the number of the job)",
            "scontrol requeue JOB queues it again; scancel JOB ends it: both save first",
        ],
    )


def _check(request: Request, options: argparse.Namespace) -> None:
    gpus, processes = options.gpus_per_node, options.processes_per_node
    if gpus % processes:
        raise UsageError(
            f"--gpus_per_node={gpus} cannot be split evenly over --processes_per_node={processes}."
        )
    for option in options.sbatch:
        if not option.startswith("-"):
            raise UsageError(f"--sbatch={option}: expected an option, as in --sbatch=--qos=high")
    if options.container_mounts and not options.container_image:
        raise UsageError("--container_mounts is for a container; give --container_image too.")
    _check_time(options)
    if gpus:
        told_by = f"--nodes={options.nodes} --gpus_per_node={gpus}"
        request.check_devices(options.nodes * gpus, told_by)
    elif not any(word in option for option in options.sbatch for word in ("gpu", "exclusive")):
        # Neither --gres=gpu:8 nor whole nodes, of which some clusters do not count the GPUs.
        told_by = f"--nodes={options.nodes} --processes_per_node={processes}"
        variables = {**os.environ, **written_variables(options)}  # sbatch hands them down
        request.check_cpus(options.nodes * processes, told_by, variables)


def _check_time(options: argparse.Namespace) -> None:
    if options.time is None:
        return
    try:
        seconds = slurm_seconds(options.time)
    except ValueError as error:
        raise UsageError(f"--time={error}") from None
    if 0 < seconds <= options.save_before_end:
        raise UsageError(
            f"--time={options.time} is {seconds} s, and --save_before_end="
            f"{options.save_before_end} would stop the run as soon as it started."
        )


def _output(request: Request) -> str:
    # A job that queues again keeps its number, and appends.
    name = "slurm-%j.log"
    if request.is_in_store:
        return name
    # Slurm replaces %-patterns in the whole path.
    return os.path.join(request.folder.replace("%", "%%"), "launch", name)


def batch_script(request: Request, options: argparse.Namespace) -> str:
    """The text of the batch script."""
    in_container = options.container_image is not None
    command = split_command(options.runner, ["runner"] if in_container else own_command())
    seconds = options.save_before_end
    trap = f"""\
# {seconds} s before the time limit Slurm signals this script; the run is told to save and leave.
out_of_time=
trap 'out_of_time=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
requeue() {{
  echo "launch: the time is up; the job goes on from its newest checkpoint when its turn comes"
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}}
"""
    requeue = '[ -z "$out_of_time" ] || requeue\n'
    final = " | ".join(map(str, (0, *scripts.FINAL_EXIT_CODES)))
    after_end = f'case "$code" in {final}) exit "$code" ;; esac # done, or failed for good\n'
    start = 'srun "${srun[@]}" "${run[@]}"'
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in _options(request, options)),
            f"# {request.experiment}, by `runner launch slurm`.",
            "set -u",
            "",
            trap,
            scripts.environment_lines(
                written_variables(options), options.setup, inherited=inherited_variables(options)
            ),
            scripts.words_array("srun", _srun_options(options)),
            scripts.words_array("run", [*command, *request.words]),
            scripts.start_and_wait(
                start,
                max_restarts=options.max_restarts,
                before_start=requeue,
                after_end=after_end + requeue,
            ),
        ]
    )


def _options(request: Request, options: argparse.Namespace) -> list[str]:
    given = {
        "job-name": request.job_name,
        "chdir": os.getcwd(),  # the run finds experiments of the working directory
        "output": _output(request),
        "open-mode": "append",
        "nodes": options.nodes,
        "ntasks-per-node": options.processes_per_node,
        "gpus-per-node": options.gpus_per_node or None,
        "cpus-per-task": options.cpus_per_process,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "signal": f"B:USR1@{options.save_before_end}",
    }
    lines = [f"--{name}={_quoted(str(v))}" for name, v in given.items() if v is not None]
    return [*lines, "--requeue", *options.sbatch]


def _quoted(text: str) -> str:
    """Quote a value for a `#SBATCH` line, whose rules are Slurm's and not those of a shell.

    Source: `get_argument` in src/sbatch/opt.c of Slurm.
    """
    if re.fullmatch(r"[\w@%+=:,./-]*", text, re.ASCII):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _srun_options(options: argparse.Namespace) -> list[str]:
    given = {
        # A process that saved and left must not have the others killed while they still save; the
        # processes find out themselves when one of them is lost.
        "kill-on-bad-exit": 0,
        "wait": 0,
        # Not handed down by sbatch.
        "cpus-per-task": options.cpus_per_process,
        "container-image": options.container_image,
        "container-mounts": options.container_mounts,
    }
    return [f"--{name}={value}" for name, value in given.items() if value is not None]
