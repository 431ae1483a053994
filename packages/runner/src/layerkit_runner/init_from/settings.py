"""What an experiment says of its first values: `InitFrom`, made of sources with their rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerkit.config import Configurable, instance_field
from layerkit.layers.adapters import LORA_WEIGHTS
from layerkit.layers.residual_adapters import RESIDUAL_ADAPTER_WEIGHTS
from layerkit_runner.errors import UsageError, check_patterns
from layerkit_runner.init_from.rules import parse_rules

ADAPTER_WEIGHTS = (LORA_WEIGHTS, RESIDUAL_ADAPTER_WEIGHTS)
"""Weights that begin as no change of the model, and are drawn where no source holds them."""

_MISSING = ("error", "draw")


class Source(Configurable):
    r"""A folder, and which first values come from it.

    Weights are named by their layer path, such as `lm/softmax/w`, moving statistics and the scales
    of fp8 too. Values of the optimizer are named as in a checkpoint, such as `0/mu/lm/softmax/w`.
    Weights of a Hugging Face folder are named as in the model that its config.json describes; to
    rules its layers are stacked (`lm/stack/repeat/sub/…`).

    Attributes:
      folder: Of a job, of its checkpoints, of one of them, or of Hugging Face.
      step: Which checkpoint; None for the newest.
      rules: `(pattern, name in the source)` for weights, the first that matches wins; see
        `layerkit_runner.init_from.rules`. None for every weight that has the same name here and
        there; then the source must hold no other.
      ignore: Patterns of weights of the source that are not wanted; with `rules` None only.
      opt_state_rules: The same for values of the optimizer; those without a rule begin anew.
      load_step: Whether the run counts on from the source's step, its schedules too.
      use_ema: Whether weights are the moving averages of the source's, where it has these.

    Raises:
      UsageError: a field that is not set, a rule that is none, or `ignore` beside `rules`.
    """

    folder: str | None = None
    step: int | None = None
    rules: Sequence[tuple[str, str]] | None = None
    ignore: Sequence[str] = ()
    opt_state_rules: Sequence[tuple[str, str]] = ()
    load_step: bool = False
    use_ema: bool = False

    def __post_init__(self) -> None:
        if not self.folder:
            raise UsageError(f"init_from.Source.folder={self.folder!r} must name a folder")
        if self.step is not None and self.step < 0:
            raise UsageError(f"init_from.Source.step={self.step} must be at least 0, or None")
        label = f"{self.folder}: rules"
        self.weight_rules = None if self.rules is None else parse_rules(self.rules, label=label)
        self.state_rules = parse_rules(
            self.opt_state_rules, label=f"{self.folder}: opt_state_rules"
        )
        check_patterns(self.ignore, label=f"{self.folder}: ignore")
        if self.ignore and self.rules is not None:
            raise UsageError(
                f"{self.folder}: ignore={tuple(self.ignore)} goes with rules=None; where rules say"
                " what is taken, the rest of the source is left"
            )


class InitFrom(Configurable):
    """The first values of a run from folders; a task's `initial_weights` may be one.

    Every weight has to be accounted for: by a source, by `draw`, or by `missing="draw"`. Adapters
    (`layerkit.layers.adapters`, `residual_adapters`) that no source holds are drawn: they begin as
    no change. Names and shapes are compared before anything is read or written; nothing is padded
    or cut. Between floating-point dtypes values are converted, and the start report says so.

    Attributes:
      sources: `Source`s in order; a weight comes from the first that has it.
      draw: Patterns of weights that are drawn whatever the sources hold.
      missing: What becomes of other weights that no source has: "error" or "draw".
      label: What messages call these settings.

    Raises:
      UsageError: no source, or two whose step is loaded.
    """

    sources: Any = instance_field(None)
    draw: Sequence[str] = ()
    missing: str = "error"
    label: str = "task.initial_weights"

    def __post_init__(self) -> None:
        if not self.sources or not all(isinstance(one, Source) for one in self.sources):
            raise UsageError(f"{self.label}: InitFrom.sources={self.sources!r} must list Sources")
        check_patterns(self.draw, label=f"{self.label}: draw")
        if self.missing not in _MISSING:
            raise UsageError(
                f"{self.label}: missing={self.missing!r} must be one of {', '.join(_MISSING)}"
            )
        counting = [source.folder for source in self.sources if source.load_step]
        if len(counting) > 1:
            raise UsageError(
                f"{self.label}: load_step is set for {' and '.join(counting)}; a run has one step"
            )


def init_from_flags(folder: str, draw: str | None) -> InitFrom:
    """What `--init_from=DIR` and `--init_draw=PATTERN` stand for: all weights of the same names.

    Raises:
      UsageError: the pattern is no regular expression.
    """
    return InitFrom(
        sources=[Source(folder=folder)],
        draw=() if draw is None else (draw,),
        label=f"--init_from={folder}",
    )
