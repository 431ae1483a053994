"""The modes and flags of `runner`, and what a run is told by them: values, and no parsing.

A new flag is a field of `RunOptions` and a row of `FLAGS`; `flags` does the rest.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a run is told besides its experiment; the flags of the same names."""

    # A path on this machine or a store's, such as gs://bucket/run.
    job_log_dir: str | None = None
    enable_checkpoint_saving: bool = True
    allow_restart_from_scratch: bool = False
    restore_checkpoint_dir: str | None = None
    # Several only in the modes that look at checkpoints once.
    restore_checkpoint_step: tuple[int, ...] | None = None
    restore_cast_dtypes: bool = False
    async_timeout_secs: int = 600
    exit_after_ondemand_checkpoint: bool = False
    eval_on_test: bool = True
    decode_during_train: bool = False
    eval_during_decode: bool = False
    # None: for ever.
    follow_timeout_secs: int | None = None
    init_from: str | None = None
    init_draw: str | None = None
    pmap_use_tensorstore: bool = False
    target: str | None = None
    num_devices: int | None = None
    plan_effort: str = "quick"
    search: bool = False
    max_compilations: int = 12
    max_seconds: float = 600.0
    inspect: str = "config"
    num_batches: int = 2
    num_hosts: int = 1
    json: bool = False
    export_dir: str | None = None
    # None: the default folder. "off": no cache.
    jax_compilation_cache: str | None = None
    # None: found out from the launcher or cluster; no other process where there is none. "auto":
    # the same, but there must be one.
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    multiprocess_gpu: bool = False
    # None: never.
    hung_step_timeout_secs: int | None = 1800
    # Of one device, by which utilisation is judged; None: from the table of known devices.
    peak_tflops_per_device: float | None = None
    xla_flags_preset: str | None = None
    pgle_profile: str | None = None
    jax_profiler_port: int | None = None
    wandb_project: str | None = None
    enable_summary_writer: bool = True
    # A file that says what a sweep searches; None: one run.
    study: str | None = None
    num_trials: int | None = None
    study_storage: str | None = None

    @property
    def only_restore_step(self) -> int | None:
        """The one step of `--restore_checkpoint_step`, in modes that read one."""
        return None if self.restore_checkpoint_step is None else self.restore_checkpoint_step[0]


AUTO_ADDRESS = "auto"


MODES = {
    "train": "train; the same command again resumes",
    "eval": "evaluate each new checkpoint of a job that trains, until its last one",
    "eval_once": "evaluate the newest checkpoint, or those of --restore_checkpoint_step",
    "decode": "decode with each new checkpoint of a job that trains, until its last one",
    "decode_once": "decode with the newest checkpoint, or those of --restore_checkpoint_step",
    "export": "write the newest checkpoint as a Hugging Face folder",
    "plan": "compile the training step without the devices; print memory and traffic",
    "inspect": "print the configuration, every override applied, its layers, its weights, its"
    " graph, or what the inputs feed; writes nothing",
}
# Words that stand in place of an experiment, before all flags, and the flags that each takes.
COMMANDS = {
    "doctor": "check this machine: versions, memory, disk, devices; exit code 1 if a check fails",
    "launch": "start a run on this machine, Slurm, TPUs or Kubernetes, or print what would be;"
    " `runner launch` tells more",
}
COMMAND_FLAGS = {"doctor": ("job_log_dir", "json", "help"), "launch": ()}

# What --inspect shows, each with the flags of its mode that mean something for it.
INSPECTED = {
    "config": ("json",),
    "layers": ("num_devices", "json"),
    "parameters": ("num_devices", "json"),
    "graph": (),
    "batches": ("num_batches", "num_hosts", "num_devices"),
}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A row of the table."""

    name: str
    # One of str, int, float, bool; tuple: whole numbers with commas.
    kind: type
    help: str
    default: Any = None
    # What the value is, for the help.
    metavar: str = ""
    choices: tuple[str, ...] = ()
    # The modes in which it means anything.
    modes: tuple[str, ...] = tuple(MODES)
    # Whether it may be "off", which is None; a number must then be above 0.
    may_be_off: bool = False
    # Whether it may be given several times, each with another value; they are kept as a tuple.
    repeats: bool = False


def _option(name: str, kind: type, text: str, **more: Any) -> Flag:
    return Flag(name, kind, text, default=getattr(RunOptions, name), **more)


FOLLOWING_MODES = ("eval", "decode")
ONCE_MODES = ("eval_once", "decode_once")
JOINING_MODES = ("train", "eval", "eval_once", "decode", "decode_once")
_READING_MODES = (*JOINING_MODES, "export")

# Names of Pax; so is --num_hosts, which is --num_processes in the modes that join.
OTHER_NAMES = {"server_addr": "coordinator_address", "host_idx": "process_id"}

# Flags of Pax whose answer here is no flag of another name.
PAX_ANSWERS = {
    "globally_use_hardware_rng": "which numbers a run draws is part of its configuration:"
    " --fdl.task.train.prng_impl=unsafe_rbg",
    "enforce_restore_shape_check": "shapes are always checked when a checkpoint is read",
    "decode_output_pickle": "outputs are JSON lines, in DIR/decode",
    "tensorstore_use_ocdbt": "checkpoints are OCDBT where TensorStore writes them",
    "maybe_use_persistence_checkpointing": "checkpoints are always written by TensorStore, and pmap"
    " runs choose by --pmap_use_tensorstore",
}

FLAGS = (
    Flag(
        "exp",
        str,
        "the experiment, such as lm.quickstart.LocalText; see --list. Without it, any mode but"
        " train takes experiment and fields from --job_log_dir",
        metavar="NAME",
    ),
    Flag("fdl_config", str, "the same as --exp", metavar="NAME"),
    Flag(
        "reduced",
        bool,
        "the experiment at a size for this machine, as it defines it; --fdl.NAME=VALUE still wins",
        default=False,
    ),
    Flag(
        "tfds_data_dir",
        str,
        "folder of TensorFlow Datasets; the same as --fdl.TFDS_DATA_DIR=DIR",
        metavar="DIR",
    ),
    _option("job_log_dir", str, "folder for everything the run writes", metavar="DIR"),
    Flag(
        "mode", str, "what to do, see above", default="train", metavar="MODE", choices=tuple(MODES)
    ),
    _option("enable_checkpoint_saving", bool, "whether to save checkpoints", modes=("train",)),
    _option(
        "allow_restart_from_scratch",
        bool,
        "train from the start although the checkpoints that this job saved are missing or damaged",
        modes=("train",),
    ),
    _option(
        "restore_checkpoint_dir",
        str,
        "start from the checkpoints of this folder",
        metavar="DIR",
        modes=_READING_MODES,
    ),
    _option(
        "restore_checkpoint_step",
        tuple,
        "start from this step, not the newest; eval_once and decode_once take several, as in"
        " 100,200",
        metavar="STEP",
        modes=("train", *ONCE_MODES, "export"),
    ),
    _option(
        "init_from",
        str,
        "begin with the weights of this folder: of a job, a checkpoint, or Hugging Face; a run"
        " that goes on does not read it",
        metavar="DIR",
        modes=("train",),
    ),
    _option(
        "init_draw",
        str,
        "weights that --init_from leaves to be drawn, as a regular expression",
        metavar="PATTERN",
        modes=("train",),
    ),
    _option(
        "restore_cast_dtypes",
        bool,
        "convert floating-point arrays of a checkpoint whose dtype is another, as after a change of"
        " the weights' dtype",
        modes=_READING_MODES,
    ),
    _option(
        "async_timeout_secs",
        int,
        "end a job whose save takes longer",
        metavar="SECONDS",
        modes=("train",),
    ),
    _option(
        "exit_after_ondemand_checkpoint",
        bool,
        "leave after the save that SIGUSR1 asks for, instead of going on",
        modes=("train",),
    ),
    _option(
        "eval_on_test",
        bool,
        "whether held-out data are evaluated, or left to --mode=eval beside this job",
        modes=("train",),
    ),
    _option(
        "decode_during_train",
        bool,
        "where task.train.decode_interval_steps is None, decode as often as is saved, not only"
        " at the end",
        modes=("train",),
    ),
    _option("eval_during_decode", bool, "also evaluate", modes=("decode", "decode_once")),
    _option(
        "follow_timeout_secs",
        int,
        "end when no new checkpoint came for so long; off: never",
        metavar="SECONDS",
        modes=FOLLOWING_MODES,
        may_be_off=True,
    ),
    _option(
        "pmap_use_tensorstore",
        bool,
        "save pmap runs one entry per parameter, not as one file; reading finds out by itself",
        modes=JOINING_MODES,
    ),
    _option(
        "target",
        str,
        "the devices to plan for, which need not be here: cpux256, h100x256, v5p:8x8x4, 2xv4-128,"
        " or here for those that are; the number may be left to the mesh, as in h100",
        metavar="TARGET",
        modes=("plan",),
    ),
    _option("num_devices", int, "how many of them", metavar="N", modes=("plan", "inspect")),
    _option(
        "plan_effort",
        str,
        "full: a TPU's program is compiled as for a run; quick: with less effort, a third of the"
        " time, unless it needs nearly all memory",
        metavar="EFFORT",
        choices=("quick", "full"),
        modes=("plan",),
    ),
    _option(
        "search",
        bool,
        "compile other meshes, rematerialisation policies and, if nothing fits, more gradient"
        " accumulation, and rank them",
        modes=("plan",),
    ),
    _option(
        "max_compilations",
        int,
        "how many candidates a search compiles at most",
        metavar="N",
        modes=("plan",),
    ),
    _option(
        "max_seconds",
        float,
        "after so long, a search compiles nothing more",
        metavar="SECONDS",
        modes=("plan",),
    ),
    _option(
        "inspect",
        str,
        "config, the configuration; layers, each with the values that it is built with; parameters,"
        " a table of the weights; graph, the configuration as a Mermaid diagram; or batches, a few"
        " of each input",
        metavar="WHAT",
        choices=tuple(INSPECTED),
        modes=("inspect",),
    ),
    _option("num_batches", int, "batches of each input", metavar="N", modes=("inspect",)),
    _option(
        "num_hosts", int, "hosts among which inputs are split", metavar="N", modes=("inspect",)
    ),
    _option(
        "json",
        bool,
        "print the plan, the configuration, the layers, the weights, the list of experiments or"
        " the checks of doctor as JSON",
        modes=("plan", "inspect"),
    ),
    _option("export_dir", str, "the folder to write", metavar="DIR", modes=("export",)),
    _option("jax_compilation_cache", str, "folder for compiled programs, or off", metavar="DIR"),
    _option(
        "coordinator_address",
        str,
        "host:port where the processes of a job meet, at process 0; auto: found out. Without it,"
        " what Slurm, Open MPI, torchrun, Kubernetes or a TPU pod says",
        metavar="ADDRESS",
        modes=JOINING_MODES,
    ),
    _option(
        "num_processes", int, "how many processes the job has", metavar="N", modes=JOINING_MODES
    ),
    _option("process_id", int, "which of them this is, from 0", metavar="I", modes=JOINING_MODES),
    _option(
        "multiprocess_gpu",
        bool,
        "one of several processes; Pax's names --server_addr, --num_hosts and --host_idx are"
        " understood",
        modes=JOINING_MODES,
    ),
    _option(
        "hung_step_timeout_secs",
        int,
        "end a job that made no step, batch or save for so long; off: never",
        metavar="SECONDS",
        modes=JOINING_MODES,
        may_be_off=True,
    ),
    _option(
        "peak_tflops_per_device",
        float,
        "what one device could do at best, for MFU, where the table of known devices has no figure"
        " or another",
        metavar="TFLOPS",
        modes=("train",),
    ),
    _option(
        "xla_flags_preset",
        str,
        "a set of compiler flags: gpu_latency_hiding, gpu_pipelined_collectives,"
        " tpu_v5e_collective_fusion, tpu_fsdp, tpu_multislice, tpu_v6e_dense or tpu_v6e_moe",
        metavar="NAME",
        choices=(
            "gpu_latency_hiding",
            "gpu_pipelined_collectives",
            "tpu_v5e_collective_fusion",
            "tpu_fsdp",
            "tpu_multislice",
            "tpu_v6e_dense",
            "tpu_v6e_moe",
        ),
        modes=("train", "plan"),
    ),
    _option(
        "pgle_profile",
        str,
        "a profile of earlier steps that guides the scheduler of NVIDIA GPUs",
        metavar="FILE",
        modes=("train",),
    ),
    _option(
        "jax_profiler_port",
        int,
        "where xprof or TensorBoard can ask for a trace at any time",
        metavar="PORT",
        modes=("train",),
    ),
    _option(
        "wandb_project",
        str,
        "also report to this project of Weights & Biases",
        metavar="NAME",
        modes=("train",),
    ),
    _option(
        "study",
        str,
        "search fields of the experiment as this TOML or JSON file says, each trial a run in"
        " DIR/trials; started several times, several trials run at once",
        metavar="FILE",
        modes=("train",),
    ),
    _option(
        "num_trials",
        int,
        "how many trials the study has in all, in place of what its file says",
        metavar="N",
        modes=("train",),
    ),
    _option(
        "study_storage",
        str,
        "a database, or a journal file for a network disk, in place of DIR/study.db",
        metavar="URL",
        modes=("train",),
    ),
    _option(
        "enable_summary_writer",
        bool,
        "whether to write DIR/summaries for TensorBoard",
        modes=JOINING_MODES,
    ),
    Flag(
        "print_config",
        bool,
        "print the configuration, every override applied, and leave; can be added to any command",
        default=False,
    ),
    Flag(
        "diff_config",
        str,
        "print the fields that differ from those of another experiment or of a job's folder, and"
        " leave; exit code 0: none, 1: some",
        metavar="OTHER",
    ),
    Flag(
        "list",
        bool,
        "print every experiment with its weights, mesh and data, and leave",
        default=False,
    ),
    Flag(
        "tag",
        str,
        "of --list, only experiments with this tag, such as moe; given several times, with all of"
        " them",
        metavar="NAME",
        repeats=True,
    ),
    Flag(
        "wide",
        bool,
        "of --list, all columns in full, however narrow the terminal is",
        default=False,
    ),
    Flag("help", bool, "print this and leave", default=False),
)
