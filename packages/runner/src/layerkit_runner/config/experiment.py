"""The base class of experiments: UPPER_CASE fields, and methods that return what runs.

    class MyLm(BaseExperiment):
        \"\"\"A small language model.\"\"\"

        NUM_LAYERS: int = 4
        MODEL_DIMS: int = 256

        def task(self): ...        # a Config, made from self.NUM_LAYERS, self.MODEL_DIMS, …
        def datasets(self): ...    # Configs of inputs

A new field needs an annotation; a subclass assigns an inherited field without one. Assigning an
undeclared name is an error when the class is defined. `MyLm(NUM_LAYERS=2)` overrides fields for one
instance. Plain classes with annotated fields can be mixed in.
"""

from __future__ import annotations

import copy
import inspect
import re
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from layerkit.config import field_types
from layerkit_runner.config.stages import set_last_step
from layerkit_runner.errors import FieldError, recast, unknown_field

if TYPE_CHECKING:
    from layerkit.config import Config

_FIELD_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


class BaseExperiment:
    """Base of all experiments.

    `class Base(BaseExperiment, abstract=True)`, or one whose name begins with an underscore, is a
    base of other experiments. It is not listed and does not run.
    """

    _is_abstract: ClassVar[bool] = True
    reduced_fields: ClassVar[Mapping[str, Any]] = {}
    """Values that `--reduced` sets, after those of the bases, so that the experiment trains on this
    machine in a minute, without a download."""
    trained_by: ClassVar[type[BaseExperiment] | None] = None
    """The experiment that trains the model of an experiment that only evaluates; errors name it."""
    tags: ClassVar[tuple[str, ...]] = ()
    """Words that `runner --list --tag=NAME` filters by, in addition to the tags of the bases."""
    unused_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the bases that are no fields of this class, since it does not read them or fixes
    their values, so that a flag without effect is an error. It replaces that of the bases."""
    stage_fields: ClassVar[Mapping[str, str]] = {}
    """Fields of the stages, the number of steps and the length of rows; see `config.stages`."""

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        """Check the fields of a new class."""
        super().__init_subclass__(**kwargs)
        cls._is_abstract = abstract or cls.__name__.startswith("_")
        _check_assigned(cls)

    def __init__(self, **overrides: Any):
        """Create the experiment with some fields overridden.

        Raises:
          FieldError: An override names no field, a value does not fit its annotation, or a field
            has no value.
        """
        declared, owner = experiment_fields(type(self)), type(self).__qualname__
        if unknown := [name for name in overrides if name not in declared]:
            raise unknown_field(owner, unknown[0], declared)
        values = {n: getattr(self, n) for n in declared if hasattr(self, n)} | overrides
        if missing := [name for name in declared if name not in values]:
            raise FieldError("missing value", owner=owner, field=", ".join(missing))
        self._overrides = overrides
        for name, value in values.items():
            setattr(self, name, value)
        set_last_step(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a field is checked and converted by its annotation."""
        if is_field_name(name):
            declared, owner = experiment_fields(type(self)), type(self).__qualname__
            if name not in declared:
                raise unknown_field(owner, name, declared)
            try:
                value = field_types.convert(value, declared[name])
            except field_types.FieldTypeError as error:
                raise recast(FieldError, error, owner=owner, field=name) from None
            # A list that an instance edits must not be the default of its class.
            value = copy.copy(value) if isinstance(value, (list, dict)) else value
        super().__setattr__(name, value)

    @property
    def overrides(self) -> types.MappingProxyType[str, Any]:
        """Values of the overridden fields, by name."""
        return types.MappingProxyType(self._overrides)

    def task(self) -> Config:
        """Return a config of the `SingleTask` to train."""
        raise NotImplementedError

    def datasets(self) -> list[Config]:
        """Return configs of inputs: `is_training=True` to train on, the others to evaluate."""
        raise NotImplementedError

    def decode_datasets(self) -> list[Config]:
        """Return configs of the inputs whose examples are decoded; none by default."""
        return []

    def tokenizer(self) -> Config | None:
        """Return the config of the tokenizer of data sets that have none themselves, or None."""
        return None

    def chat_template(self) -> str | None:
        """Return the chat template of the data; None for that of the tokenizer's folder, if any."""
        return None

    def train_programs(self) -> list[Config] | None:
        """Return configs of alternating `TrainProgram`s; None trains on the only training data."""
        return None

    def eval_programs(self) -> list[Config] | None:
        """Return configs of `BaseProgram`; None evaluates all data sets with is_training=False."""
        return None

    def decode_programs(self) -> list[Config] | None:
        """Return configs of `BaseProgram`; None decodes all `decode_datasets()`."""
        return None

    def lm_eval_tasks(self) -> list[Config] | None:
        """Return configs of `LmEvalProgram`, which run beside eval programs; None for none."""
        return None

    def executor(self) -> Config | None:
        """Return the config of a subclass of `Executor`, whose fields the job sets, or None."""
        return None

    def observers(self) -> list[Config]:
        """Return configs of observers besides the built-in ones; see docs/observing.md."""
        return []

    def partitioner(self) -> Config:
        """Return a config of the partitioner; by default data parallel over all devices."""
        # Partitioning imports JAX, which defining or inspecting an experiment must not do.
        from layerkit_runner.partitioning import SpmdPartitioner

        return SpmdPartitioner.HParams.config()

    def data_summary(self) -> str:
        """Return the source of the data for `--list`; by default the class of the reader."""
        from layerkit.config import target_of

        datasets = self.datasets()
        training = [config for config in datasets if config.is_training] or datasets[:1]
        return ", ".join(dict.fromkeys(target_of(config).__name__ for config in training))

    def size_fields(self, size: int) -> dict[str, Any]:
        """Return the fields of a model that grows with `size`, from 1 up, for `runner scaling`."""
        del size
        return {}

    def start_notes(self) -> list[str]:
        """Return lines for the start report, such as values that were adjusted; none by default."""
        return []

    def check_init_from(self, folder: str) -> None:
        """Raise ConfigError if a new run may not begin with `--init_from=folder`."""

    def validate(self) -> None:
        """Raise ValueError if fields contradict each other; it is called before `task()`.

        The command line shows this error, OSError and MissingExtraError without a traceback.
        """


def experiment_summary(cls: type) -> str:
    """Return the first line of the docstring of an experiment class."""
    return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]


def experiment_tags(cls: type) -> tuple[str, ...]:
    """Return the tags of an experiment class, its bases and mix-ins, in alphabetical order."""
    return tuple(sorted({tag for base in cls.__mro__ for tag in vars(base).get("tags", ())}))


def reduced_values(cls: type) -> dict[str, Any]:
    """Return the values that `--reduced` sets: `reduced_fields` of all bases, in Python's order."""
    values: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        values |= vars(base).get("reduced_fields", {})
    unused = _annotated_fields(cls).keys() - experiment_fields(cls).keys()
    return {name: value for name, value in values.items() if name not in unused}


def is_field_name(name: str) -> bool:
    """Return whether a name has the form of a field of an experiment: `NUM_LAYERS`."""
    return _FIELD_NAME.fullmatch(name) is not None


def experiment_fields(cls: type) -> dict[str, str | None]:
    """Return the texts of the annotations of an experiment's fields, those of its bases first.

    `unused_fields` are left out, and a field that a property overrides, since its value is derived.
    """
    unused = getattr(cls, "unused_fields", ())
    return {
        name: text
        for name, text in _annotated_fields(cls).items()
        if name not in unused and not isinstance(getattr(cls, name, None), property)
    }


def _check_assigned(cls: type[BaseExperiment]) -> None:
    """Raise an error if a field is assigned or listed as unused that is not declared."""
    declared = _annotated_fields(cls)
    for name in vars(cls).get("unused_fields", ()):
        if name not in declared and not cls._is_abstract:  # a mixin may name those of other bases
            owner = f"{cls.__qualname__}.unused_fields"
            raise FieldError("unknown field", owner=owner, value=name, choices=declared)
    assigned = [(base, *item) for base in cls.__mro__ for item in vars(base).items()]
    for base, name, value in assigned:
        if is_field_name(name) and name not in declared:
            raise FieldError(
                "undeclared field",
                owner=base.__qualname__,
                value=name,
                choices=declared,
                hint=f"Declare a new field by {name}: {type(value).__name__} = {value!r}",
            )


def _annotated_fields(cls: type) -> dict[str, str | None]:
    """Return the texts of the annotations of all fields, those of the last base first."""
    return {
        name: field_types.Annotation(annotation, base.__module__)
        for base in reversed(cls.__mro__)
        for name, annotation in inspect.get_annotations(base).items()
        if is_field_name(name)
    }


def refuse_unread(
    experiment: BaseExperiment, fields: Iterable[str], because: str, *, hint: str | None = None
) -> None:
    """Raise if an override sets a field that nothing reads.

    Args:
      experiment: Experiment with the overrides.
      fields: Names of the fields; those that the experiment lacks are ignored.
      because: What makes nothing read them, such as `OPTIMIZER='lion'`.
      hint: What to do instead.

    Raises:
      FieldError: An override sets one of them to another value than that of the class, and than
        that of `--reduced`.
    """
    reduced = reduced_values(type(experiment))
    for field in fields:
        value, default = experiment.overrides.get(field), getattr(type(experiment), field, None)
        expected = f"{default}, since {because} does not read it"
        if value not in (None, default, reduced.get(field)):
            owner = type(experiment).__qualname__
            raise FieldError(owner=owner, field=field, value=value, expected=expected, hint=hint)
