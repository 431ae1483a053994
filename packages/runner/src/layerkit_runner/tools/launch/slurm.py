"""As a Slurm batch job that resumes, however often it is stopped.

| what happens | what follows |
|---|---|
| its time is nearly up | Slurm tells the script, the run saves, the job queues again and resumes |
| a node fails, or the job is preempted or requeued | Slurm queues it again and the run resumes |
| a process is lost, killed or hangs | all of them end, and are started again in the same job |
| an error, or a wrong command | the job ends with that exit code |
| `scancel` | the run saves and leaves, and the job ends |

One process per node takes all of its GPUs; `--processes_per_node` splits them evenly. `srun` starts
the processes, which find one another by what Slurm says (`distributed.launchers`).
"""

from __future__ import annotations

import os
import re

from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import Flag, non_negative, positive
from layerkit_runner.tools.launch import local
from layerkit_runner.tools.launch.recipe import Recipe
from layerkit_runner.tools.launch.request import Request, own_command, split_command
from layerkit_runner.tools.launch.values import Options, inherited_variables, written_variables


def _option_text(text: str) -> str:
    if not text.startswith("-"):
        raise ValueError("an option, as in --sbatch=--qos=high")
    return text


FLAGS = (
    Flag("nodes", positive, "number of nodes", "N", default=1),
    Flag("gpus_per_node", non_negative, "0 for none", "N", default=0),
    Flag("processes_per_node", positive, "1 takes all GPUs of a node", "N", default=1),
    Flag("cpus_per_process", positive, "CPU cores of each process", "N"),
    Flag("time", str, "time limit of each turn, as Slurm writes it: 24:00:00", "TIME"),
    Flag("save_before_end", positive, "seconds before it at which to save", "SECONDS", default=300),
    Flag("partition", str, "where to queue", "NAME"),
    Flag("account", str, "whom to charge", "NAME"),
    local.MAX_RESTARTS,
    Flag("container_image", str, "run in this image (srun's pyxis)", "IMAGE"),
    Flag("container_mounts", str, "FROM:TO,… for the container", "MOUNTS"),
    Flag(
        "sbatch",
        _option_text,
        "an option of sbatch, as --qos=high; repeatable",
        "OPTION",
        repeats=True,
    ),
    local.SCRIPT,
)


def make_recipe(request: Request, options: Options) -> Recipe:
    """Return the batch script, and the command that submits it."""
    _check(request, options)
    if options.gpus_per_node:
        request = request.with_preset("gpu_latency_hiding", options)
    path = local.script_path(request, "slurm.sh", options.script)
    return Recipe(
        files={path: batch_script(request, options)},
        folders=[] if request.is_in_store else [os.path.join(request.folder, "launch")],
        commands=[["sbatch", path]],
        afterwards=[
            f"output: {_output(request)} (%j is the number of the job)",
            "scontrol requeue JOB queues it again; scancel JOB ends it: both save first",
        ],
    )


def _check(request: Request, options: Options) -> None:
    gpus, processes = options.gpus_per_node, options.processes_per_node
    if gpus % processes:
        raise UsageError(
            f"--gpus_per_node={gpus} cannot be split evenly over --processes_per_node={processes}."
        )
    if options.container_mounts and not options.container_image:
        raise UsageError("--container_mounts is for a container; give --container_image too.")
    seconds = 0 if options.time is None else slurm_seconds(options.time)
    if 0 < seconds <= options.save_before_end:
        raise UsageError(
            f"--time={options.time} is {seconds} s, and --save_before_end="
            f"{options.save_before_end} would stop the run as soon as it started."
        )
    if gpus:
        flags = f"--nodes={options.nodes} --gpus_per_node={gpus}"
        request.check_devices(options.nodes * gpus, flags)
    elif not any(word in option for option in options.sbatch for word in ("gpu", "exclusive")):
        # Neither --gres=gpu:8 nor whole nodes, of which some clusters do not count the GPUs.
        flags = f"--nodes={options.nodes} --processes_per_node={processes}"
        variables = {**os.environ, **written_variables(options)}  # sbatch hands them down
        request.check_cpus(options.nodes * processes, flags, variables)


def _output(request: Request) -> str:
    # A job that queues again keeps its number, and appends.
    name = "slurm-%j.log"
    if request.is_in_store:
        return name
    # Slurm replaces %-patterns in the whole path.
    return os.path.join(request.folder.replace("%", "%%"), "launch", name)


def batch_script(request: Request, options: Options) -> str:
    """Return the text of the batch script."""
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
    final = " | ".join(map(str, (0, *local.FINAL_EXIT_CODES)))
    after_end = f'case "$code" in {final}) exit "$code" ;; esac # done, or failed for good\n'
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in _options(request, options)),
            f"# {request.experiment}, by `runner launch slurm`.",
            "set -u",
            "",
            trap,
            local.environment_lines(options, inherited=inherited_variables(options)),
            local.words_array("srun", _srun_options(options)),
            local.words_array("run", [*command, *request.words]),
            local.start_and_wait(
                'srun "${srun[@]}" "${run[@]}"',
                max_restarts=options.max_restarts,
                before_start=requeue,
                after_end=after_end + requeue,
            ),
        ]
    )


def _options(request: Request, options: Options) -> list[str]:
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


def _srun_options(options: Options) -> list[str]:
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


def slurm_seconds(text: str) -> int:
    """Read a time in the forms of Slurm: M, M:S, H:M:S, D-H, D-H:M and D-H:M:S."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise UsageError(
            f"--time={text}: expected a time as Slurm writes it, such as 90, 12:00:00 or 2-00:00."
        )
    days, *parts = (None if part is None else int(part) for part in match.groups())
    given = [part for part in parts if part is not None]
    if days is None and len(given) < 3:
        given = [0, *given]  # minutes come first
    hours, minutes, seconds = (*given, 0, 0)[:3]
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
