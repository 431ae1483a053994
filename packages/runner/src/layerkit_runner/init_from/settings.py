"""Configuration of initial weights: `InitFrom`, its sources and their rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from layerkit.checks import check_choice, check_integers, check_regexes
from layerkit.config import Configurable, instance_field
from layerkit.layers.adapters import LORA_WEIGHTS
from layerkit.layers.residual_adapters import RESIDUAL_ADAPTER_WEIGHTS
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from.rules import parse_rules
from layerkit_runner.training.initial_weights import InitialWeights

ADAPTER_WEIGHTS = (LORA_WEIGHTS, RESIDUAL_ADAPTER_WEIGHTS)
"""Patterns of weights that do not change the model at first. They are drawn if no source has them.
"""


class Source(Configurable):
    r"""A folder of stored weights, with rules that select and rename them.

    Weights are named by layer path, such as `lm/softmax/w`; so are moving statistics and the scales
    of fp8. Values of the optimizer are named as in a checkpoint, such as `0/mu/lm/softmax/w`.
    Weights of a Hugging Face folder are named as in the model that its config.json describes. Rules
    refer to its layers as a stack (`lm/stack/repeat/sub/…`).

    Attributes:
      folder: Folder of a job, of its checkpoints, of one checkpoint, or of a Hugging Face model.
      step: Checkpoint step; None for the newest.
      rules: Pairs `(pattern, name in the source)` for weights; the first match wins. See
        `layerkit_runner.init_from.rules`. None takes each weight by its own name; the source must
        then hold no other weights.
      ignore: Patterns of weights of the source to leave out; requires `rules=None`.
      opt_state_rules: Rules for values of the optimizer; values without a rule are initialized.
      load_step: Whether training and its schedules continue from the source's step.
      use_ema: Whether to read moving averages in place of the weights that have one.

    Raises:
      UsageError: `folder` is not set, a rule is malformed, or both `ignore` and `rules` are set.
      ConfigError: `step` is negative, or a pattern is no regular expression.
    """

    folder: str | None = None
    step: int | None = None
    rules: Sequence[tuple[str, str]] | None = None
    ignore: Sequence[str] = ()
    opt_state_rules: Sequence[tuple[str, str]] = ()
    load_step: bool = False
    use_ema: bool = False

    def __post_init__(self) -> None:
        """Check the fields and parse the rules."""
        if not self.folder:
            raise UsageError(
                owner="init_from.Source", field="folder", value=self.folder, expected="a folder"
            )
        check_integers("init_from.Source", minimum=0, step=self.step)
        label = f"{self.folder}: rules"
        self.weight_rules = None if self.rules is None else parse_rules(self.rules, label=label)
        self.state_rules = parse_rules(
            self.opt_state_rules, label=f"{self.folder}: opt_state_rules"
        )
        check_regexes(self.folder, ignore=self.ignore)
        if self.ignore and self.rules is not None:
            raise UsageError(
                owner=self.folder,
                field="ignore",
                value=tuple(self.ignore),
                expected="() if rules are set",
                hint="With rules, only the weights that they name are read.",
            )


class InitFrom(InitialWeights):
    """Settings that initialize a run from folders; a possible value of `task.initial_weights`.

    Each weight must come from a source, be drawn by `draw`, or be missing under `missing="draw"`.
    Adapters (`layerkit.layers.adapters`, `residual_adapters`) that no source holds are drawn. Names
    and shapes are compared before anything is read or written; nothing is padded or cut.
    Floating-point dtypes are converted, which the start report says.

    Attributes:
      sources: `Source`s in order; the first that has a weight provides it.
      draw: Patterns of weights that are drawn even if a source has them.
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
        if not self.sources or not all(isinstance(one, Source) for one in self.sources):
            raise UsageError(
                owner=self.label, field="sources", value=self.sources, expected="a list of Source"
            )
        check_regexes(self.label, draw=self.draw)
        check_choice(self.label, ("error", "draw"), missing=self.missing)
        loading = [source.folder for source in self.sources if source.load_step]
        if len(loading) > 1:
            raise UsageError(
                owner=self.label,
                field="sources with load_step",
                value=loading,
                expected="at most one, since a run has one step",
            )


def init_from_flags(folder: str, draw: str | None) -> InitFrom:
    """Return the settings of `--init_from=DIR` and `--init_draw=PATTERN`.

    Raises:
      ConfigError: The pattern is no regular expression.
    """
    return InitFrom(
        sources=[Source(folder=folder)],
        draw=() if draw is None else (draw,),
        label=f"--init_from={folder}",
    )
