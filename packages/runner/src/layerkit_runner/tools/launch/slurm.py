"""A Slurm batch job that resumes after each interruption.

| event | effect |
|---|---|
| the time limit approaches | Slurm signals the script, the run saves, the job is requeued |
| a node fails, or the job is preempted or requeued | Slurm requeues the job; the run resumes |
| a process is lost, killed or hangs | all processes exit and are restarted in the same job |
| an error, a wrong command, or non-finite training | the job ends with that exit code |
| `scancel` | the run saves and exits, and the job ends |

One process per node uses all its GPUs; `--processes_per_node` splits them evenly. `srun` starts the
processes, which read their ranks from Slurm's variables (`distributed.launchers`).
"""

from __future__ import annotations

import os
import re

from layerkit.config.checks import check_divisible, require
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import Flag, non_negative, positive
from layerkit_runner.tools.launch import local
from layerkit_runner.tools.launch.request import Options, Request, Script, installed_runner


def _option_text(text: str) -> str:
    if not text.startswith("-"):
        raise ValueError("an option that begins with a dash, such as --sbatch=--qos=high")
    return text


HELP = "as a batch job, requeued at its time limit"
FLAGS = (
    Flag("nodes", positive, "number of nodes", "N", default=1),
    Flag("gpus_per_node", non_negative, "number of GPUs of each node", "N", default=0),
    Flag("processes_per_node", positive, "1: one process uses all GPUs", "N", default=1),
    Flag("cpus_per_process", positive, "CPU cores of each process", "N"),
    Flag("time", str, "time limit before a requeue, such as 24:00:00", "TIME"),
    Flag("save_before_end", positive, "time to save before the limit", "SECONDS", default=300),
    Flag("partition", str, "partition of the job", "NAME"),
    Flag("account", str, "account to charge", "NAME"),
    local.MAX_RESTARTS,
    Flag("container_image", str, "image to run in, by pyxis", "IMAGE"),
    Flag("container_mounts", str, "mounts of the container, FROM:TO,…", "MOUNTS"),
    Flag(
        "sbatch",
        _option_text,
        "option of sbatch, such as --qos=high; repeatable",
        "OPTION",
        repeats=True,
    ),
)


def make_script(request: Request, options: Options) -> Script:
    """Return the batch script, which sbatch submits."""
    _check(request, options)
    return Script(
        path=request.script_path("slurm", options.script),
        text=batch_script(request, options),
        program="sbatch",
        folder=None if "://" in request.folder else os.path.join(request.folder, "launch"),
        next_steps=[
            f"output: {_output(request)} (%j is the number of the job)",
            "scontrol requeue JOB: save and requeue; scancel JOB: save and end",
            *_notes(options),
        ],
    )


def _check(request: Request, options: Options) -> None:
    gpus, processes = options.gpus_per_node, options.processes_per_node
    check_divisible(None, by=("--processes_per_node", processes), **{"--gpus_per_node": gpus})
    if options.container_mounts and not options.container_image:
        raise UsageError(field="--container_mounts", expected="--container_image with it")
    seconds = 0 if options.time is None else slurm_seconds(options.time)
    is_long = seconds == 0 or seconds > options.save_before_end
    expected = f"more than the {options.save_before_end} s of --save_before_end"
    require(is_long, None, "--time", options.time, expected)
    if gpus:
        flags = f"--nodes={options.nodes} --gpus_per_node={gpus}"
        request.check_devices(options.nodes * gpus, flags)


def _notes(options: Options) -> list[str]:
    notes = []
    if not options.gpus_per_node:
        notes.append("mesh: not compared with the devices of the job without --gpus_per_node")
    if options.cpus_per_process is None:
        notes.append(
            "CPU cores: the default of the cluster without --cpus_per_process, mostly 1 per process"
        )
    return notes


def _output(request: Request) -> str:
    # A requeued job keeps its number and appends.
    name = "slurm-%j.log"
    if "://" in request.folder:
        return name
    # Slurm replaces %-patterns in the whole path.
    return os.path.join(request.folder.replace("%", "%%"), "launch", name)


def batch_script(request: Request, options: Options) -> str:
    """Return the text of the batch script."""
    in_container = options.container_image is not None
    command = options.command(["runner"] if in_container else installed_runner())
    seconds = options.save_before_end
    trap = f"""\
# {seconds} s before the time limit Slurm signals this script, which makes the run save and exit.
out_of_time=
trap 'out_of_time=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
requeue() {{
  echo "launch: time limit reached; the job is requeued and resumes from its newest checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}}
"""
    requeue = '[ -z "$out_of_time" ] || requeue\n'
    final = " | ".join(map(str, (0, *local.FINAL_EXIT_CODES)))
    after_end = (
        f'case "$code" in {final}) exit "$code" ;; esac # completed, or a restart would fail\n'
    )
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in _options(request, options)),
            "set -u",
            "",
            trap,
            local.environment_lines(options),
            local.bash_array("srun", _srun_options(options)),
            local.bash_array("run", [*command, *request.words]),
            local.restart_loop(
                'srun "${srun[@]}" "${run[@]}"',
                max_restarts=options.max_restarts,
                before_start=requeue,
                after_end=after_end + requeue,
            ),
        ]
    )


def _options(request: Request, options: Options) -> list[str]:
    values = {
        "job-name": request.job_name,
        "chdir": os.getcwd(),  # the run imports experiments of the working directory
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
    lines = [f"--{name}={_quoted(str(v))}" for name, v in values.items() if v is not None]
    lines += ["--requeue", *options.sbatch]
    for line in lines:
        if not line.isprintable():  # a line break would begin a line of its own
            raise UsageError(
                "a line of the batch script cannot hold this text",
                field=line.partition("=")[0],
                value=line.partition("=")[2],
                expected="text without control characters",
            )
    return lines


def _quoted(text: str) -> str:
    """Quote a value for a `#SBATCH` line, whose rules are Slurm's and not those of a shell."""
    # Source: `get_argument` in src/sbatch/opt.c of Slurm.
    if re.fullmatch(r"[\w@%+=:,./-]*", text, re.ASCII):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _srun_options(options: Options) -> list[str]:
    values = {
        # The exit of a process that has saved must not kill those that are still saving. The
        # processes detect a lost one themselves.
        "kill-on-bad-exit": 0,
        "wait": 0,
        # sbatch does not pass it on.
        "cpus-per-task": options.cpus_per_process,
        "container-image": options.container_image,
        "container-mounts": options.container_mounts,
    }
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def slurm_seconds(text: str) -> int:
    """Return the seconds of a time that Slurm reads: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        expected = "a time that Slurm reads, such as 90 (minutes), 12:00:00 or 2-00:00"
        raise UsageError(field="--time", value=text, expected=expected)
    days, *parts = (None if part is None else int(part) for part in match.groups())
    numbers = [part for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]  # these forms begin with minutes
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
