"""Requests as plain values: a parsed command line, its overrides, an experiment with its configs.

An override is `--fdl.NAME=VALUE`. A name without dots is a field of the experiment, set before its
methods are called. A dotted path, such as `datasets.0.batch_size`, names a field at any depth of
the configs that they return.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from layerkit.config import field_types
from layerkit_runner.errors import FieldError, UsageError, recast, unknown_field
from layerkit_runner.run_options import CLUSTER_FLAGS, FLAGS, STUDY_FLAGS, RunOptions

if TYPE_CHECKING:
    from layerkit.config import Config
    from layerkit_runner.config.experiment import BaseExperiment

# Flags that a printed command omits: its reader chooses where to write, a sweep sets its own, some
# differ between the processes of a job, and one overrides a single error.
_OMITTED = (
    *("job_log_dir", "log_dir", "allow_restart_from_scratch"),
    *STUDY_FLAGS,
    *CLUSTER_FLAGS,
)


@dataclasses.dataclass(frozen=True)
class ParsedFlags:
    """A command line whose flags are valid and fit together.

    `exp` is None if a job's folder names the experiment, or none is needed; `values` has the flags
    of the command line by name.
    """

    exp: str | None
    mode: str
    overrides: tuple[Override, ...]
    options: RunOptions
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def only_prints(self) -> bool:
        """Whether the configuration is printed or compared, in place of the mode."""
        return bool(self.values.get("print_config")) or "diff_config" in self.values

    @property
    def scores_folder(self) -> bool:
        """Whether the model is that of a Hugging Face folder, which needs no experiment."""
        return self.mode == "lm_eval" and self.options.init_from is not None


@dataclasses.dataclass(frozen=True)
class ResolvedExperiment:
    """An experiment and the configs that its methods return, with all overrides applied.

    If the methods return the same config object in several places, it is one shared object here
    too.

    Attributes:
      experiment: Experiment with its own fields overridden.
      task: Config of the `SingleTask`.
      datasets: Configs of inputs to train on (`is_training=True`) and to evaluate.
      decode_datasets: Configs of inputs to decode.
      partitioner: Config of the partitioner.
      train_programs: Configs of training programs; None for one program per data set.
      eval_programs: Configs of evaluation programs; None for one program per data set.
      decode_programs: Configs of decoding programs; None for one program per data set.
      lm_eval_tasks: Configs of programs for tasks of lm-evaluation-harness; None for none.
      executor: Config of the executor; None for `layerkit_runner.run.executor.Executor`.
      observers: Configs of observers that run beside the built-in ones.
      deep_overrides: Overrides of fields in the configs, which are already applied.
      notes: Lines for the start report about configs whose class an override has replaced.
    """

    experiment: BaseExperiment
    task: Config
    datasets: list[Config]
    decode_datasets: list[Config]
    partitioner: Config
    train_programs: list[Config] | None = None
    eval_programs: list[Config] | None = None
    decode_programs: list[Config] | None = None
    lm_eval_tasks: list[Config] | None = None
    executor: Config | None = None
    observers: list[Config] = dataclasses.field(default_factory=list)
    deep_overrides: tuple[Override, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Full dotted name of the experiment's class, a valid value of `--exp`."""
        cls = type(self.experiment)
        return f"{cls.__module__}.{cls.__qualname__}"


def to_argv(options: RunOptions, *, mode: str) -> list[str]:
    """Return flags for the options that have a meaning in a mode and are not at their defaults."""
    rows = [row for row in FLAGS if not row.modes or mode in row.modes]
    names = [row.name for row in rows if hasattr(options, row.name) and row.name not in _OMITTED]
    values = {name: getattr(options, name) for name in names}
    return [flag_word(n, value) for n, value in values.items() if value != getattr(RunOptions, n)]


def flag_word(name: str, value: Any) -> str:
    """Return a flag as it is typed: `--name=value`, `--name` or `--noname`."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    if isinstance(value, tuple):
        return f"--{name}={','.join(map(str, value))}"
    # None is the value of `off`.
    return f"--{name}={'off' if value is None else value}"


# Roots that few experiments define; None for the others.
OPTIONAL_ROOTS = (
    *("train_programs", "eval_programs", "decode_programs", "lm_eval_tasks", "executor"),
)

# First names of deep paths: the parts of a resolved experiment.
ROOTS = ("task", "datasets", "decode_datasets", "partitioner", *OPTIONAL_ROOTS, "observers")

_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


@dataclasses.dataclass(frozen=True)
class Override:
    """One `--fdl.PATH=TEXT`; the text is read when the type of the field is known.

    Attributes:
      path: Names and indices, joined by dots.
      text: Text of the value.
      is_recorded: True if the override comes from the record of a job folder, which others may
        have written.
    """

    path: str
    text: str
    is_recorded: bool = dataclasses.field(default=False, compare=False)

    @property
    def parts(self) -> tuple[str, ...]:
        """The path's names, from the outermost."""
        return tuple(self.path.split("."))

    @property
    def is_deep(self) -> bool:
        """Whether this sets a field inside the task, the inputs or another config."""
        return len(self.parts) > 1

    def __str__(self) -> str:
        """Return the flag as it is typed."""
        return f"--fdl.{self.path}={self.text}"


def parse_override(path: str, text: str) -> Override:
    """Return the override that a path and a text describe."""
    if not _PATH.fullmatch(path):
        expected = "names and indices joined by dots, such as datasets.0.batch_size"
        raise UsageError(field=f"--fdl.{path}", expected=expected)
    root, dot, _ = path.partition(".")
    if dot and root not in ROOTS:
        raise UsageError("unknown root", owner=f"--fdl.{path}", value=root, choices=ROOTS)
    return Override(path, text)


def field_overrides(fields: Mapping[str, Any]) -> list[Override]:
    """Return the overrides that set fields by path; a text is that of a flag."""
    texts = {path: v if isinstance(v, str) else repr(v) for path, v in fields.items()}
    return [parse_override(path, text) for path, text in texts.items()]


def merge_overrides(overrides: Iterable[Override]) -> tuple[Override, ...]:
    """Return the overrides without repetitions.

    An override of a part, such as `attention_tpl.num_heads`, follows that of the whole.
    """
    by_path: dict[str, Override] = {}
    for override in overrides:
        earlier = by_path.setdefault(override.path, override)
        if earlier.text != override.text:
            field = f"{earlier} and {override}"
            raise UsageError("contradictory flags", field=field, expected="one of them")
    return tuple(sorted(by_path.values(), key=lambda override: len(override.parts)))


def parse_fields(
    experiment: str, annotations: Mapping[str, str | None], overrides: Iterable[Override]
) -> dict[str, Any]:
    """Return the values that overrides give to the experiment's own fields, without deep paths."""
    values: dict[str, Any] = {}
    for override in overrides:
        name = override.path
        if override.is_deep:
            continue
        if name in ROOTS:
            expected = f"a field of it, as in --fdl.{name}.NAME=VALUE"
            raise FieldError(field=f"--fdl.{name}", value=override.text, expected=expected)
        if name not in annotations:
            raise unknown_field(experiment, name, annotations)
        try:
            values[name] = field_types.parse_value(override.text, annotations[name])
        except field_types.FieldTypeError as error:
            raise recast(FieldError, error, owner=experiment, field=name) from None
    return values
