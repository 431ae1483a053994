"""The modes and flags of `runner`, and the options that a run is given.

A flag of a run is one field of `RunOptions`. `FLAGS` is the table of all flags: those fields, and
the flags that choose what to do. `flags` parses the command line from it and writes `--help`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

# The modes that come with the runner. Tools add others, such as plan; see `commands`.
MODES = {
    "train": "train; the same command again resumes",
    "eval": "evaluate each new checkpoint of a job that trains, until its last one",
    "eval_once": "evaluate the newest checkpoint, or those of --restore_checkpoint_step",
    "decode": "decode with each new checkpoint of a job that trains, until its last one",
    "decode_once": "decode with the newest checkpoint, or those of --restore_checkpoint_step",
    "export": "write the newest checkpoint as a Hugging Face folder",
}
FOLLOWING_MODES = ("eval", "decode")
ONCE_MODES = ("eval_once", "decode_once")
JOINING_MODES = ("train", "eval", "eval_once", "decode", "decode_once")
_READING_MODES = (*JOINING_MODES, "export")
_TRAIN, _PLAN, _INSPECT = ("train",), ("plan",), ("inspect",)

_PRESETS = (
    *("gpu_latency_hiding", "gpu_pipelined_collectives", "tpu_v5e_collective_fusion"),
    *("tpu_fsdp", "tpu_multislice", "tpu_v6e_dense", "tpu_v6e_moe"),
)

AUTO_ADDRESS = "auto"

# Other names of flags. Those of Pax include --num_hosts, which is --num_processes in modes that
# join several processes.
OTHER_NAMES = {
    "fdl_config": "exp",
    "server_addr": "coordinator_address",
    "host_idx": "process_id",
}

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

# What --inspect shows, each with the flags of its mode that mean something for it.
INSPECTED = {
    "config": ("json",),
    "layers": ("num_devices", "json"),
    "parameters": ("num_devices", "json"),
    "graph": (),
    "batches": ("num_batches", "num_hosts", "num_devices"),
}


def switch(text: str) -> bool:
    """Read True or False."""
    if text.lower() not in ("true", "1", "false", "0"):
        raise ValueError("expected True or False.")
    return text.lower() in ("true", "1")


def non_negative(text: str) -> int:
    """Read an integer of at least 0."""
    if not text.isdecimal():
        raise ValueError("expected a non-negative integer.")
    return int(text)


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("expected a positive integer.")
    return int(text)


def positive_or_off(text: str) -> int | None:
    """Read an integer of at least 1; None for `off`."""
    if text.lower() == "off":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("expected a positive integer, or off.")
    return int(text)


def positive_number(text: str) -> float:
    """Read a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError("expected a positive number.")
    return value


def pattern(text: str) -> str:
    """Read a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"expected a regular expression: {error}.") from None
    return text


def address(text: str) -> str:
    """Read HOST:PORT, or auto."""
    if text != AUTO_ADDRESS and not re.fullmatch(r".+:\d+", text):
        raise ValueError(f"expected HOST:PORT, or {AUTO_ADDRESS}.")
    return text


def steps(text: str) -> tuple[int, ...]:
    """Read non-negative integers with commas between them; one that is repeated is read once."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ValueError("expected a non-negative integer, or several with commas between them.")
    return tuple(dict.fromkeys(map(int, parts)))


@dataclasses.dataclass(frozen=True)
class Flag:
    """A row of a table of flags.

    Attributes:
      name: Name, without dashes.
      read: Function from the text of a value to the value; it raises ValueError with what was
        expected. `bool` makes a switch: --name, --noname or --name=True.
      help: Text for `--help`.
      metavar: Placeholder of the value in `--help`.
      default: Value of a flag that is not given.
      choices: The values that are allowed; empty for any.
      modes: Modes in which the flag has a meaning; empty for all.
      repeats: Whether the flag may be given several times; its value is then a tuple.
    """

    name: str
    read: Callable[[str], Any]
    help: str
    metavar: str = ""
    default: Any = None
    choices: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    repeats: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether the flag is given as --name or --noname."""
        return self.read is bool


def _option(help: str, metavar: str, modes: tuple[str, ...] = (), **row: Any) -> Any:  # noqa: A002
    """Return a field of `RunOptions`, and with it a row of the table of flags."""
    default = row.setdefault("default", None)
    row |= {"help": help, "metavar": metavar, "modes": modes}
    return dataclasses.field(default=default, metadata={"row": row})


def _switch(help: str, modes: tuple[str, ...], *, default: bool = False) -> Any:  # noqa: A002
    return _option(help, "", modes, default=default)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a run is told besides its experiment: the flags of the same names."""

    job_log_dir: str | None = _option("folder for everything the run writes", "DIR")
    enable_checkpoint_saving: bool = _switch("whether to save checkpoints", _TRAIN, default=True)
    allow_restart_from_scratch: bool = _switch(
        "train from the start although the saved checkpoints are missing or damaged", _TRAIN
    )
    restore_checkpoint_dir: str | None = _option(
        "start from the checkpoints of this folder", "DIR", _READING_MODES
    )
    restore_checkpoint_step: tuple[int, ...] | None = _option(
        "start from this step, not the newest; the modes _once take several: 100,200",
        "STEP",
        ("train", *ONCE_MODES, "export"),
    )
    init_from: str | None = _option(
        "begin a new run with the weights of a job, a checkpoint or a Hugging Face folder",
        "DIR",
        _TRAIN,
    )
    init_draw: str | None = _option(
        "weights that --init_from leaves to be drawn, as a regular expression",
        "PATTERN",
        _TRAIN,
        read=pattern,
    )
    restore_cast_dtypes: bool = _switch(
        "convert floating-point arrays of a checkpoint with another dtype", _READING_MODES
    )
    async_timeout_secs: int = _option(
        "end a job whose save takes longer", "SECONDS", _TRAIN, default=600
    )
    exit_after_ondemand_checkpoint: bool = _switch("leave after the save on SIGUSR1", _TRAIN)
    eval_on_test: bool = _switch(
        "whether held-out data are evaluated, or left to --mode=eval", _TRAIN, default=True
    )
    decode_during_train: bool = _switch(
        "without task.train.decode_interval_steps, decode at each save, not only at the end", _TRAIN
    )
    eval_during_decode: bool = _switch("also evaluate", ("decode", "decode_once"))
    follow_timeout_secs: int | None = _option(
        "end when no new checkpoint came for so long; off: never",
        "SECONDS",
        FOLLOWING_MODES,
        read=positive_or_off,
    )
    pmap_use_tensorstore: bool = _switch(
        "save pmap runs one entry per parameter, not as one file", JOINING_MODES
    )
    target: str | None = _option(
        "devices to plan for, which need not be here, such as cpux256, h100x256, v5p:8x8x4 or"
        " 2xv4-128; here: those of this machine; h100: as many as the mesh has",
        "TARGET",
        _PLAN,
    )
    num_devices: int | None = _option("number of devices", "N", ("plan", "inspect"))
    plan_effort: str = _option(
        "full: compile for a TPU as a run does; quick: in a third of the time, unless the program"
        " needs nearly all memory",
        "EFFORT",
        _PLAN,
        default="quick",
        choices=("quick", "full"),
    )
    search: bool = _switch(
        "compile other meshes, rematerialisation policies and, if nothing fits, more gradient"
        " accumulation, and rank them",
        _PLAN,
    )
    max_compilations: int = _option(
        "how many candidates a search compiles at most", "N", _PLAN, default=12
    )
    max_seconds: float = _option(
        "after so long, a search compiles nothing more", "SECONDS", _PLAN, default=600.0
    )
    inspect: str = _option(
        "config: the configuration; layers: each with its values; parameters: a table of the"
        " weights; graph: the configuration as a Mermaid diagram; batches: a few of each input",
        "WHAT",
        _INSPECT,
        default="config",
        choices=tuple(INSPECTED),
    )
    num_batches: int = _option("batches of each input", "N", _INSPECT, default=2)
    num_hosts: int = _option("hosts among which inputs are split", "N", _INSPECT, default=1)
    json: bool = _switch(
        "print as JSON; also with --list, --print_config, --diff_config and doctor",
        ("plan", "inspect"),
    )
    export_dir: str | None = _option("the folder to write", "DIR", ("export",))
    jax_compilation_cache: str | None = _option("folder for compiled programs, or off", "DIR")
    coordinator_address: str | None = _option(
        "host:port where the processes of a job meet, at process 0; auto: ask the launcher, which"
        " must be there. Without it, ask Slurm, Open MPI, torchrun, Kubernetes or the TPU pod",
        "ADDRESS",
        JOINING_MODES,
        read=address,
    )
    num_processes: int | None = _option(
        "how many processes the job has", "N", JOINING_MODES, read=positive
    )
    process_id: int | None = _option("which of them this is, from 0", "I", JOINING_MODES)
    multiprocess_gpu: bool = _switch(
        "one of several processes, as Pax says it, with --server_addr, --num_hosts, --host_idx",
        JOINING_MODES,
    )
    hung_step_timeout_secs: int | None = _option(
        "end a job that made no step, batch or save for so long; off: never",
        "SECONDS",
        JOINING_MODES,
        default=1800,
        read=positive_or_off,
    )
    peak_tflops_per_device: float | None = _option(
        "peak speed of one device, for MFU, in place of the table's", "TFLOPS", _TRAIN
    )
    xla_flags_preset: str | None = _option(
        f"a set of compiler flags: {', '.join(_PRESETS)}",
        "NAME",
        ("train", "plan"),
        choices=_PRESETS,
    )
    pgle_profile: str | None = _option(
        "a profile of earlier steps that guides the scheduler of NVIDIA GPUs", "FILE", _TRAIN
    )
    jax_profiler_port: int | None = _option(
        "where xprof or TensorBoard can ask for a trace", "PORT", _TRAIN, read=positive
    )
    wandb_project: str | None = _option(
        "also report to this project of Weights & Biases", "NAME", _TRAIN
    )
    study: str | None = _option(
        "search fields of the experiment as this TOML or JSON file says, each trial a run in"
        " DIR/trials; started several times, several trials run at once",
        "FILE",
        _TRAIN,
    )
    num_trials: int | None = _option(
        "trials of the study in all, in place of its file's", "N", _TRAIN, read=positive
    )
    study_storage: str | None = _option(
        "a database, or a journal file on a network disk, not DIR/study.db", "URL", _TRAIN
    )
    enable_summary_writer: bool = _switch(
        "whether to write DIR/summaries for TensorBoard", JOINING_MODES, default=True
    )
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Values of the flags that a mode of another package has, by name."""

    @property
    def only_restore_step(self) -> int | None:
        """The one step of `--restore_checkpoint_step`, in modes that read one."""
        return None if self.restore_checkpoint_step is None else self.restore_checkpoint_step[0]


# How the text of a flag is read, by the type of its field.
_READ: dict[str, Callable[[str], Any]] = {
    "str": str,
    "bool": bool,
    "int": non_negative,
    "float": positive_number,
    "tuple[int, ...]": steps,
}


def _option_flags() -> list[Flag]:
    fields = [field for field in dataclasses.fields(RunOptions) if "row" in field.metadata]
    reads = [_READ[str(field.type).removesuffix(" | None")] for field in fields]
    return [
        Flag(field.name, **{"read": read, **field.metadata["row"]})
        for field, read in zip(fields, reads, strict=True)
    ]


FLAGS = (
    Flag(
        "exp",
        str,
        "the experiment, such as lm.quickstart.LocalText; see --list. Without it, any mode but"
        " train takes experiment and fields from --job_log_dir",
        "NAME",
    ),
    Flag("reduced", bool, "the experiment at a size for this machine, as it defines it"),
    Flag("tfds_data_dir", str, "folder of TensorFlow Datasets; a field of the experiment", "DIR"),
    Flag("mode", str, "what to do, see above", "MODE", default="train"),
    *_option_flags(),
    Flag("print_config", bool, "print the configuration, every override applied, and leave"),
    Flag(
        "diff_config",
        str,
        "print the fields that differ from those of another experiment or of a job's folder, and"
        " leave; exit code 0: none, 1: some",
        "OTHER",
    ),
    Flag("list", bool, "print every experiment with its weights, mesh and data, and leave"),
    Flag(
        "tag",
        str,
        "list only what has this tag, such as moe, or all of several",
        "NAME",
        repeats=True,
    ),
    Flag("wide", bool, "list all columns in full, however narrow the terminal is"),
    Flag("help", bool, "print this and leave"),
)
