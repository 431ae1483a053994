r"""Configuration of initial weights: `InitFrom`, its sources and their rules.

A rule gives a weight of this run the name of a stored value:

    (r"encoder/(.*)", r"lm/\1")                           another name
    (r"(.*)/layers_(\d+)/(.*)", r"\1/repeat/sub/\3[\2]")  layer i of a stacked weight
    (r"(.*)/repeat/sub/(.*)", r"\1/layers_{layer}/\2")    single layers, stacked
    (r"(.*)/repeat/sub/(.*)", r"\g<0>[0, 0, 1, 1]")       layers reordered or repeated

The pattern has to match the whole name. Groups are referred to as in `re.sub`. Brackets hold an
index of the leading axis, as in NumPy. Further brackets index further axes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from layerkit.config import Conditions, Config, Configurable, instance_field
from layerkit.config.checks import check_choice, check_integers, check_regex, check_regexes
from layerkit.config.hparams import check_fields
from layerkit.layers.quantization.lora import LORA_WEIGHTS
from layerkit.layers.transformer.residual_adapters import RESIDUAL_ADAPTER_WEIGHTS
from layerkit_runner.errors import UsageError
from layerkit_runner.step.task import InitialWeights

LAYER = "{layer}"

_INDICES = re.compile(r"(?P<name>[^\[\]]*)(?P<indices>(?:\[\d+(?:, *\d+)*,?\])*)")

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """The stored values from which one value is made: one, or one for each layer.

    `text` is the name as the rule gives it, such as `w[3]`. `indices` are those of the leading axes
    of the stored value; a tuple selects several, in order.
    """

    text: str
    names: tuple[str, ...]
    indices: tuple[int | tuple[int, ...], ...] = ()

    @property
    def is_stacked(self) -> bool:
        """Return whether stored values are stacked on a new first axis."""
        return LAYER in self.text

    def shape(self, stored: Mapping[str, Shape]) -> Shape:
        """Return the shape of the value; raise ValueError if the indices do not fit."""
        shapes = sorted({stored[name] for name in self.names})
        if len(shapes) > 1:
            raise ValueError(f"the shapes of {self.text} differ: {[list(s) for s in shapes]}")
        (shape,) = shapes
        if len(self.indices) > len(shape):
            raise ValueError(f"{self.text} has more indices than the {len(shape)} axes")
        taken: list[int] = []
        for index, size in zip(self.indices, shape, strict=False):
            several = index if isinstance(index, tuple) else (index,)
            if max(several) >= size:
                raise ValueError(f"{self.text}: index={max(several)}. Expected less than {size}")
            taken += [len(several)] if isinstance(index, tuple) else []
        rest = (*taken, *shape[len(self.indices) :])
        return (len(self.names), *rest) if self.is_stacked else rest


@dataclasses.dataclass(frozen=True)
class Rule:
    """A pattern of names of this run and the stored name; `label` is the path of the rule."""

    pattern: str
    source: str
    label: str

    def origin(self, name: str, shape: Shape) -> Origin | None:
        """Return the origin of the value called `name`; None if the rule does not match."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None

        def error(problem: str, expected: str | None = None) -> UsageError:
            pair = (self.pattern, self.source)
            return UsageError(problem, field=self.label, value=pair, expected=expected)

        try:
            text = match.expand(self.source)
        except (re.error, IndexError) as problem:
            raise error(str(problem)) from None
        parts = _INDICES.fullmatch(text)
        if parts is None:
            expected = "a name with indices at its end alone, such as w[3] or w[0, 0, 1]"
            raise error(f"invalid name {text!r}", expected)
        stored = parts["name"]
        groups = re.findall(r"\[([\d, ]+)\]", parts["indices"])
        numbers = [tuple(map(int, re.findall(r"\d+", group))) for group in groups]
        indices = tuple(
            several if "," in group else several[0]
            for group, several in zip(groups, numbers, strict=True)
        )
        if LAYER not in stored:
            return Origin(text, (stored,), indices)
        if indices:
            raise error(f"{LAYER} and an index in one rule", "one of the two")
        if not shape:
            raise error(f"{name} is a scalar", f"a weight with axes, since {LAYER} stacks values")
        return Origin(text, tuple(stored.replace(LAYER, str(i)) for i in range(shape[0])))

    def __str__(self) -> str:
        """Return the path of the rule and its texts."""
        return f"{self.label} ({self.pattern!r}, {self.source!r})"


def parse_rules(pairs: Sequence[tuple[str, str]], *, label: str) -> list[Rule]:
    """Return the rules of a config field."""
    rules = []
    for number, pair in enumerate(pairs):
        rule = Rule(*pair, label=f"{label}[{number}]")
        check_regex(None, **{rule.label: rule.pattern})
        rules.append(rule)
    return rules


ADAPTER_WEIGHTS = (LORA_WEIGHTS, RESIDUAL_ADAPTER_WEIGHTS)
"""Patterns of weights that do not change the model until they are trained. They are initialized
randomly if no source has them."""


class Source(Configurable):
    r"""A folder of stored weights, with rules that select and rename them.

    Weights are named by layer path, such as `lm/softmax/w`; so are moving statistics and the scales
    of fp8. Values of the optimizer are named as in a checkpoint, such as `0/mu/lm/softmax/w`.
    Weights of a Hugging Face folder are named as in the model that its config.json describes. Rules
    refer to its layers as a stack (`lm/stack/repeat/sub/…`).

    Attributes:
      folder: Folder of a job, of its checkpoints, of one checkpoint, of a Hugging Face model, or of
        an adapter of PEFT.
      step: Checkpoint step; None for the newest.
      rules: Pairs `(pattern, name in the source)` for weights; the first match wins. See
        the docstring of this module. None takes each weight by its own name; the source must then
        hold no other weights.
      ignore: Patterns of weights of the source to leave out. With `rules`, only the weights that
        they name are read.
      opt_state_rules: Rules for values of the optimizer; values without a rule are initialized.
      load_step: Whether training and its schedules continue from the source's step.
      use_ema: Whether to read moving averages in place of the weights that have one.
      scale: Factor of an adapter of PEFT. All sources with adapters are added up.

    Raises:
      ConfigError: `step` is negative, or a pattern is not a valid regular expression.
    """

    folder: str
    step: int | None = None
    rules: Sequence[tuple[str, str]] | None = None
    ignore: Sequence[str] = ()
    opt_state_rules: Sequence[tuple[str, str]] = ()
    load_step: bool = False
    use_ema: bool = False
    scale: float = 1.0

    used_only_if: ClassVar[Conditions] = {"ignore": "not rules"}

    def __post_init__(self) -> None:
        """Check the fields and parse the rules."""
        check_fields(self, owner="init_from.Source")
        check_integers("init_from.Source", minimum=0, step=self.step)
        label = f"{self.folder}: rules"
        self.weight_rules = None if self.rules is None else parse_rules(self.rules, label=label)
        self.state_rules = parse_rules(
            self.opt_state_rules, label=f"{self.folder}: opt_state_rules"
        )
        check_regexes(self.folder, ignore=self.ignore)


class InitFrom(InitialWeights):
    """Settings that initialize a run from folders; a possible value of `task.initial_weights`.

    Each weight must come from a source, match `draw`, or be missing under `missing="draw"`.
    Adapters (`lora`, `residual_adapters` of `layerkit.layers`) that no source holds are initialized
    randomly. Names and shapes are compared before anything is read or written. Nothing is padded or
    cut. Floating-point dtypes are converted, and the start report lists the conversions.

    Attributes:
      sources: `Source`s in order; the first that has a weight provides it.
      draw: Patterns of weights that are initialized randomly even if a source has them.
      missing: Handling of other weights that no source has: "error" or "draw".
      label: Name of these settings in messages.

    Raises:
      UsageError: There is no source, or two sources set `load_step`.
      ConfigError: `missing` or a pattern is not valid.
    """

    sources: Annotated[Any, Sequence[Source]] = instance_field(None)
    draw: Sequence[str] = ()
    missing: str = "error"
    label: str = "task.initial_weights"

    def __post_init__(self) -> None:
        """Check the fields."""
        if not self.sources:
            expected = "a list of Source"
            raise UsageError(owner=self.label, field="sources", value=[], expected=expected)
        check_regexes(self.label, draw=self.draw)
        check_choice(self.label, ("error", "draw"), missing=self.missing)
        loading = [source.folder for source in self.sources if source.load_step]
        if len(loading) > 1:
            expected = "one source, since a run has one step"
            raise UsageError(owner=self.label, field="load_step", value=loading, expected=expected)

    def only(self, patterns: Collection[str]) -> InitFrom | None:
        """Return settings of the sources whose rules all have one of the patterns, if any."""
        kept = [s for s in self.sources if s.rules and all(p in patterns for p, _ in s.rules)]
        return InitFrom(sources=kept) if kept else None


def weights_of(folder: str, adapters: Mapping[str, float] | None = None) -> Config:
    """Return the config of initial weights from a folder, and of weighted adapters of PEFT."""
    added = [Source.HParams.config(folder=one, scale=x) for one, x in (adapters or {}).items()]
    # Modules that an adapter saves take precedence.
    config: Config = InitFrom.HParams.config(sources=[*added, Source.HParams.config(folder=folder)])
    return config


def init_from_flags(folder: str, draw: str | None, *, beside: InitFrom | None = None) -> InitFrom:
    """Return the settings of `--init_from=DIR` and `--init_draw=PATTERN`.

    `beside` are the settings to which the folder is added: those of a model whose adapter it has,
    or of frozen weights.
    """
    draws = () if draw is None else (draw,)
    return InitFrom(
        sources=[Source(folder=folder), *([] if beside is None else beside.sources)],
        draw=draws if beside is None else (*draws, *beside.draw),
        missing="error" if beside is None else beside.missing,
        label=f"--init_from={folder}",
    )
