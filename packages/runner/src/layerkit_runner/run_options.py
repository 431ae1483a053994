"""The modes and flags of `runner`, and the options of a run: one table.

A flag of a run is a field of `RunOptions`. `FLAGS` has those and the flags that choose what to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

# The modes of the runner itself. Tools add others, such as plan; see `config.flags`.
MODES = {
    "train": "train, or resume the run in --job_log_dir",
    "eval": "evaluate each new checkpoint of a running job until its last",
    "eval_once": "evaluate the newest checkpoint, or --restore_checkpoint_step",
    "decode": "decode with each new checkpoint of a running job until its last",
    "decode_once": "decode with the newest checkpoint, or --restore_checkpoint_step",
    "lm_eval": "score the newest checkpoint, or --init_from, on tasks of lm-evaluation-harness",
    "generate": "continue prompts, and print each token at once; or ask for prompts",
    "export": "write the newest checkpoint as a Hugging Face folder, or as StableHLO",
}
FOLLOWING_MODES = ("eval", "decode")
ONCE_MODES = ("eval_once", "decode_once", "lm_eval")
JOINING_MODES = ("train", "eval", "eval_once", "decode", "decode_once", "lm_eval")
_READING_MODES = (*JOINING_MODES, "export")
_TRAIN, _PLAN, _INSPECT, _GENERATE = ("train",), ("plan",), ("inspect",), ("generate",)
_LM_EVAL = ("lm_eval",)

CLUSTER_FLAGS = ("coordinator_address", "num_processes", "process_id", "multiprocess_gpu")
STUDY_FLAGS = ("study", "num_trials", "study_storage")
# Flags that absl itself defines.
LOG_FLAGS = ("alsologtostderr", "logtostderr", "v", "stderrthreshold", "log_dir")

_PRESETS = (
    *("gpu_latency_hiding", "gpu_pipelined_collectives", "gpu_nvidia_pax"),
    *("tpu_v5e_collective_fusion", "tpu_fsdp", "tpu_multislice", "tpu_v6e_dense", "tpu_v6e_moe"),
)

AUTO_ADDRESS = "auto"


def switch(text: str) -> bool:
    """Return True or False for its text, or raise ValueError with what was expected."""
    if text.lower() not in ("true", "1", "false", "0"):
        raise ValueError("True or False")
    return text.lower() in ("true", "1")


def _reader(
    convert: Callable[[str], Any], is_valid: Callable[[Any], bool], expected: str
) -> Callable[[str], Any]:
    """Return a function from text to a valid value, which raises ValueError with `expected`."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if is_valid(value := convert(text)):
                return value
        raise ValueError(expected)

    return read


def _decimal(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def _steps(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(_decimal, text.split(","))))


non_negative = _reader(_decimal, lambda value: value >= 0, "an integer of 0 or more")
positive = _reader(_decimal, lambda value: value > 0, "a positive integer")
_positive_or_off = _reader(
    lambda text: None if text.lower() == "off" else _decimal(text),
    lambda value: value is None or value > 0,
    "a positive integer, or off",
)
_address = _reader(
    str,
    lambda text: text == AUTO_ADDRESS or re.fullmatch(r".+:\d+", text) is not None,
    f"HOST:PORT, or {AUTO_ADDRESS}",
)
# Folders of checkpoints have such names, too.
_folder_name = _reader(
    str,
    lambda text: re.fullmatch(r"(?!checkpoint_)\w[\w.-]*", text) is not None,
    "a name without / that does not begin with checkpoint_",
)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"a regular expression ({error})") from None
    return text


def html_file(text: str) -> str:
    """Return the path of a page to write, or raise ValueError with what was expected."""
    path = os.path.expanduser(text)
    if not path.endswith(".html") or os.path.isdir(path):
        raise ValueError("the path of an .html file to write")
    if "://" in path:
        return path
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"a path in a folder that this user may write to, and {folder} is none")
    return path


@dataclasses.dataclass(frozen=True)
class Flag:
    """A row of a table of flags.

    Attributes:
      name: Name, without dashes.
      read: Function that returns the value for its text, or raises ValueError with a noun phrase
        that describes valid values. `bool` makes a switch: --name, --noname or --name=True.
      help: Text for `--help`. Its first clause, up to a semicolon or full stop, can be read alone.
      metavar: Placeholder of the value in `--help`.
      default: Value of a flag that is not given.
      choices: Valid values; empty for any.
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
    """Return a field of `RunOptions`, which is also a row of the table of flags."""
    default = row.setdefault("default", None)
    row |= {"help": help, "metavar": metavar, "modes": modes}
    return dataclasses.field(default=default, metadata={"row": row})


def _switch(help: str, modes: tuple[str, ...] = (), *, default: bool = False) -> Any:  # noqa: A002
    return _option(help, "", modes, default=default)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of a run besides its experiment: the flags of the same names."""

    job_log_dir: str | None = _option("folder for everything that the run writes", "DIR")
    eval_on_test: bool = _switch(
        "evaluate held-out data during training; off: leave it to --mode=eval", _TRAIN, default=True
    )
    decode_during_train: bool = _switch(
        "decode at each save if task.train.decode_interval_steps is not set, not only at the end",
        _TRAIN,
    )
    eval_during_decode: bool = _switch("also evaluate", ("decode", "decode_once"))
    follow_timeout_secs: int | None = _option(
        "exit after so long without a checkpoint; off: never",
        "SECONDS",
        FOLLOWING_MODES,
        read=_positive_or_off,
    )
    export_dir: str | None = _option("folder to write", "DIR", ("export",))
    export_format: str = _option(
        "hugging_face: safetensors and config.json; stablehlo: compiled functions that need only"
        " JAX",
        "FORMAT",
        ("export",),
        default="hugging_face",
        choices=("hugging_face", "stablehlo"),
    )
    bakes_weights: bool = _switch(
        "put the weights into the functions of --export_format=stablehlo", ("export",)
    )
    adapters_only: bool = _switch(
        "write the LoRA adapters alone, as a folder of PEFT, instead of merging them", ("export",)
    )
    prompt: tuple[str, ...] | None = _option(
        "text to continue, which may be given several times; by default that of the standard input,"
        " or of a dialog on a terminal",
        "TEXT",
        _GENERATE,
        repeats=True,
    )
    chat: bool = _switch(
        "answer each prompt, or line of the standard input, as the user's next message in a"
        " conversation, by the model's chat template",
        _GENERATE,
    )
    max_new_tokens: int | None = _option(
        "largest number of new tokens; by default that of the model's decoder",
        "N",
        _GENERATE,
        read=positive,
    )
    temperature: float | None = _option(
        "divisor of the logits, 0 for the most likely tokens; by default that of the model's"
        " decoder, as for the next two",
        "T",
        _GENERATE,
        read=_reader(float, lambda value: 0 <= value < math.inf, "a number of 0 or more"),
    )
    top_k: int | None = _option("sample from the K most likely tokens; 0: all", "K", _GENERATE)
    top_p: float | None = _option(
        "sample from the fewest tokens with this total probability", "P", _GENERATE
    )
    seed: int | None = _option(
        "seed of the random numbers; by default 0, or that of the experiment's tasks",
        "N",
        (*_GENERATE, *_LM_EVAL),
    )
    tasks: tuple[str, ...] | None = _option(
        "names of tasks of the harness, with commas between them, patterns such as arc_*, or YAML"
        " files; by default those of the experiment",
        "NAMES",
        _LM_EVAL,
        read=lambda text: tuple(text.split(",")),
    )
    include_path: str | None = _option("folder of further task files", "DIR", _LM_EVAL)
    num_fewshot: int | None = _option("examples before each question", "N", _LM_EVAL)
    limit: float | None = _option("documents of each task; below 1: their share", "N", _LM_EVAL)
    batch_size: int | None = _option("rows of a batch", "N", _LM_EVAL, read=positive)
    max_length: int | None = _option(
        "tokens that the model reads; longer contexts lose their beginning",
        "N",
        _LM_EVAL,
        read=positive,
    )
    apply_chat_template: str | None = _option(
        "ask in messages of a chat: true, by the template of the experiment or tokenizer; or the"
        " name or file of a template",
        "true|NAME",
        _LM_EVAL,
        read=lambda text: text.lower() == "true" or text,
    )
    enable_checkpoint_saving: bool = _switch("save checkpoints", _TRAIN, default=True)
    allow_restart_from_scratch: bool = _switch(
        "train from step 0 although the saved checkpoints are missing or damaged", _TRAIN
    )
    restore_checkpoint_dir: str | None = _option(
        "start from the checkpoints of this folder", "DIR", _READING_MODES
    )
    restore_checkpoint_step: tuple[int, ...] | None = _option(
        "start from this step, not from the newest; eval_once and decode_once take several:"
        " 100,200",
        "STEP",
        ("train", *ONCE_MODES, "generate", "export"),
    )
    init_from: str | None = _option(
        "start a new run with other weights; DIR is a job, a checkpoint or a Hugging Face folder."
        " --mode=generate reads it in the place of --job_log_dir, and --mode=lm_eval a Hugging Face"
        " folder",
        "DIR",
        (*_TRAIN, *_GENERATE, *_LM_EVAL),
    )
    init_draw: str | None = _option(
        "regular expression of weights that --init_from initializes randomly",
        "PATTERN",
        _TRAIN,
        read=_pattern,
    )
    restore_cast_dtypes: bool = _switch(
        "convert floating-point arrays of a checkpoint that have another dtype", _READING_MODES
    )
    async_timeout_secs: int = _option(
        "end a job whose save takes longer", "SECONDS", _TRAIN, default=600
    )
    checkpoint_todelete_subdir: str | None = _option(
        "move checkpoints that are no longer kept into this folder of checkpoints, which is faster"
        " than deleting them; gs:// deletes",
        "NAME",
        _TRAIN,
        read=_folder_name,
    )
    exit_after_ondemand_checkpoint: bool = _switch("exit after the save on SIGUSR1", _TRAIN)
    pmap_use_tensorstore: bool = _switch(
        "save one entry per parameter in pmap runs, not one file", JOINING_MODES
    )
    target: str | None = _option(
        "devices to plan for, such as cpux256, h100x256, v5p:8x8x4 or v5e:4x4*2. here: those of"
        " this machine; h100: as many as the mesh has",
        "TARGET",
        _PLAN,
    )
    num_devices: int | None = _option("number of devices", "N", ("plan", "inspect"), read=positive)
    search: bool = _switch(
        "compile and rank other meshes, rematerialization policies and, if nothing fits, more"
        " gradient accumulation",
        _PLAN,
    )
    max_compilations: int = _option(
        "limit of compiled candidates", "N", _PLAN, default=12, read=positive
    )
    max_seconds: float = _option(
        "time after which a search compiles no further candidate", "SECONDS", _PLAN, default=600.0
    )
    compare: str | None = _option(
        "show another plan beside this one on the page of --html; FILE is the output of --json",
        "FILE",
        _PLAN,
    )
    inspect: str = _option(
        "config: the configuration; parameters: a table of weights; batches: a few of each input",
        "WHAT",
        _INSPECT,
        default="config",
        choices=("config", "layers", "parameters", "batches"),
    )
    num_batches: int = _option("batches of each input", "N", _INSPECT, default=2)
    num_hosts: int = _option("hosts that share each input", "N", _INSPECT, default=1)
    json: bool = _switch(
        "print JSON; also with --list, --print_config and --diff_config",
        ("plan", "inspect"),
    )
    html: str | None = _option(
        "write pictures to this file, a page for a browser: of the plan, of --inspect=parameters or"
        " of --inspect=batches",
        "FILE",
        (*_PLAN, *_INSPECT),
        read=html_file,
    )
    coordinator_address: str | None = _option(
        "host:port of process 0; auto: ask the launcher, which is then required. By default Slurm,"
        " Open MPI, torchrun, Kubernetes or the TPU pod is asked, if there is one",
        "ADDRESS",
        JOINING_MODES,
        read=_address,
    )
    num_processes: int | None = _option(
        "number of processes of the job", "N", JOINING_MODES, read=positive
    )
    process_id: int | None = _option("index of this process, from 0", "I", JOINING_MODES)
    multiprocess_gpu: bool = _switch(
        "run as one of several processes, with Pax's --server_addr, --num_hosts, --host_idx",
        JOINING_MODES,
    )
    hung_step_timeout_secs: int | None = _option(
        "end a job that finishes no step, batch or save for so long; off: never",
        "SECONDS",
        JOINING_MODES,
        default=1800,
        read=_positive_or_off,
    )
    jax_compilation_cache: str | None = _option("folder for compiled programs, or off", "DIR")
    xla_flags_preset: str | None = _option(
        f"set of compiler flags: {', '.join(_PRESETS)}", "NAME", ("train", "plan"), choices=_PRESETS
    )
    pgle_profile: str | None = _option(
        "profile of earlier steps that guides the scheduler of NVIDIA GPUs", "FILE", _TRAIN
    )
    peak_tflops_per_device: float | None = _option(
        "peak speed of one device for MFU, in place of the table's", "TFLOPS", _TRAIN
    )
    jax_profiler_port: int | None = _option(
        "port at which xprof or TensorBoard can request a trace", "PORT", _TRAIN, read=positive
    )
    wandb_project: str | None = _option(
        "project of Weights & Biases to report to", "NAME", (*_TRAIN, *_LM_EVAL)
    )
    trackio_project: str | None = _option(
        "project of trackio to report to", "NAME", (*_TRAIN, *_LM_EVAL)
    )
    study: str | None = _option(
        "search over fields as this TOML or JSON file says; each trial is a run in DIR/trials."
        " Commands that are started at the same time share the trials",
        "FILE",
        _TRAIN,
    )
    num_trials: int | None = _option(
        "total number of trials, in place of the file's", "N", _TRAIN, read=positive
    )
    study_storage: str | None = _option(
        "database, or journal file on a network disk, in place of DIR/study.db", "URL", _TRAIN
    )
    enable_summary_writer: bool = _switch(
        "write DIR/summaries for TensorBoard", JOINING_MODES, default=True
    )
    alsologtostderr: bool = _switch("log messages of libraries to stderr too, not only --log_dir")
    logtostderr: bool = _switch("log messages of libraries to stderr only")
    v: int | None = _option(
        "verbosity of the messages of libraries: -1 warnings, 0 information, 1 and more debugging",
        "LEVEL",
        read=_reader(int, lambda _: True, "an integer"),
    )
    stderrthreshold: str | None = _option(
        "with --log_dir: lowest level of the messages that also go to stderr",
        "LEVEL",
        choices=("debug", "info", "warning", "error", "fatal"),
    )
    log_dir: str | None = _option("folder for the messages of libraries, not stderr", "DIR")
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Values of the flags that a mode of another package has, by name."""

    @property
    def only_restore_step(self) -> int | None:
        """The one step of `--restore_checkpoint_step`, in modes that read one."""
        return None if self.restore_checkpoint_step is None else self.restore_checkpoint_step[0]


# Reader of a flag by the type of its field.
_READ: dict[str, Callable[[str], Any]] = {
    "str": str,
    "bool": bool,
    "int": non_negative,
    "float": _reader(float, lambda value: 0 < value < math.inf, "a number above 0"),
    "tuple[int, ...]": _reader(
        _steps,
        lambda steps: min(steps) >= 0,
        "an integer of 0 or more, or several with commas between them",
    ),
    "tuple[str, ...]": str,
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
        "experiment, such as lm.quickstart.LocalText. By default, it and its fields are those of"
        " --job_log_dir",
        "NAME",
    ),
    Flag("reduced", bool, "the experiment at a size for this machine"),
    Flag("tfds_data_dir", str, "folder of TensorFlow Datasets; a field of the experiment", "DIR"),
    Flag("mode", str, "what to do", "MODE", default="train"),
    *_option_flags(),
    Flag("print_config", bool, "print the resolved configuration and exit"),
    Flag(
        "diff_config",
        str,
        "print the fields that differ from those of another experiment or of a job's folder and"
        " exit. Exit code 0: none, 1: some",
        "OTHER",
    ),
    Flag("list", bool, "print all experiments and exit; weights, mesh and data are shown"),
    Flag(
        "tag",
        str,
        "list only experiments with this tag, such as moe, or with all of several",
        "NAME",
        repeats=True,
    ),
    Flag("help", bool, "print the most used flags; MODE: those of a mode; all: all flags"),
)
