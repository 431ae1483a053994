"""Optimizers that the field OPTIMIZER of an experiment names.

LEARNING_RATE and WEIGHT_DECAY are those of AdamW. An optimizer whose published values are
multiples of them states the factors, which the start report prints. So `--fdl.OPTIMIZER=lion` is
a sensible run of every experiment, and a rate tuned for AdamW is never used for updates of
another size. `--fdl.task.train.learner.optimizer.NAME=VALUE` sets an argument without a field.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from layerkit.config import Config, Partial
from layerkit.errors import ConfigError
from layerkit_experiments.recipes.schedule_choices import SCHEDULES, ScheduleChoice
from layerkit_runner.config.experiment import refuse_unread
from layerkit_runner.optim.learner import AuxiliaryOptimizer

_OPTIM = "layerkit_runner.optim"
_ADAFACTOR = {"decay_method": "pow", "quantized_dtype": "float32"}
_ADAM = {"b1": "ADAM_BETA1", "b2": "ADAM_BETA2", "eps": "ADAM_EPSILON"}


class OptimizerChoice(NamedTuple):
    """An optimizer in place of AdamW, and what it takes from the fields of an experiment.

    Attributes:
      function: `MODULE.NAME` of a function of `learning_rate`, `weight_decay` and `mask` that makes
        the optimizer. Its module is imported when an experiment chooses it.
      fields: Names of fields by argument of `function`, or of `wrapped` if there is one.
      arguments: Other arguments.
      wrapped: Optimizer without weight decay that `function` takes as `optimizer`; None for none.
      rate: Factor of LEARNING_RATE.
      decay: Factor of WEIGHT_DECAY.
      keeps_rate: True if the rate stays constant after the warmup, unless LEARNING_RATE_SCHEDULE or
        STAGES sets another one.
      only_matrices: True if AdamW trains the weights that are no matrices.
    """

    function: str
    fields: Mapping[str, str] = MappingProxyType(_ADAM)
    arguments: Mapping[str, Any] = MappingProxyType({})
    wrapped: str | None = None
    rate: float = 1.0
    decay: float = 1.0
    keeps_rate: bool = False
    only_matrices: bool = False

    @classmethod
    def of(cls, experiment: Any) -> OptimizerChoice:
        """Return the row of the experiment's OPTIMIZER.

        Raises:
          UserError: OPTIMIZER is unknown, or a field is overridden that nothing reads.
        """
        owner, name = type(experiment).__qualname__, experiment.OPTIMIZER
        if name not in OPTIMIZERS:
            raise ConfigError(owner=owner, field="OPTIMIZER", value=name, choices=OPTIMIZERS)
        hint = "Set arguments by --fdl.task.train.learner.optimizer.NAME=VALUE"
        unread = OPTIMIZERS[name].unread_fields()
        refuse_unread(experiment, unread, f"OPTIMIZER={name!r}", hint=hint)
        return OPTIMIZERS[name]

    def set_optimizer(self, learner: Config, experiment: Any) -> Config:
        """Set the optimizer of a learner, and return it.

        Args:
          learner: Config of a learner with a schedule of AdamW that has a `peak`, and an optimizer
            whose `mask` selects the weights that decay.
          experiment: Experiment with the fields.
        """
        mask, rate = learner.optimizer.mask, learner.learning_rate
        if self.only_matrices:
            all_but_matrices = _import(f"{_OPTIM}.matrix.matrices.all_but_matrices")
            others = OPTIMIZERS["adamw"].config(experiment, mask)
            learner.auxiliary_optimizers = [
                AuxiliaryOptimizer.HParams.config(
                    name="adamw",
                    weights=all_but_matrices,
                    optimizer=others,
                    learning_rate=copy.copy(rate),  # A flag changes the rate of one of them.
                )
            ]
        if self.rate != 1.0:
            learner.learning_rate = copy.copy(rate)
            learner.learning_rate.peak *= self.rate
        if self.keeps_rate and not (
            experiment.LEARNING_RATE_SCHEDULE or ScheduleChoice.join_stages(experiment)
        ):
            because = f"OPTIMIZER={experiment.OPTIMIZER!r} without LEARNING_RATE_SCHEDULE"
            refuse_unread(experiment, self.unread_rate_fields(experiment), because)
            learner.learning_rate.min_ratio = 1.0
        return learner.set(optimizer=self.config(experiment, mask))

    def config(self, experiment: Any, mask: Any) -> Partial:
        """Return the config of the optimizer; `mask` selects the weights that decay."""
        fields = {name: getattr(experiment, field) for name, field in self.fields.items()}
        values = {**fields, **self.arguments}
        if self.wrapped is not None:
            values = {"optimizer": Partial(_import(self.wrapped), **values)}
        decay = self.decay * experiment.WEIGHT_DECAY
        return Partial(_import(self.function), **values, weight_decay=decay, mask=mask)

    def unread_fields(self) -> list[str]:
        """Return the fields of AdamW that nothing reads."""
        read = _ADAM.values() if self.only_matrices else self.fields.values()
        return [field for field in _ADAM.values() if field not in read]

    def unread_rate_fields(self, experiment: Any) -> list[str]:
        """Return the fields that neither LEARNING_RATE_SCHEDULE nor the optimizer's own reads."""
        name = experiment.LEARNING_RATE_SCHEDULE
        choice = SCHEDULES.get("constant" if name is None and self.keeps_rate else name)
        return [] if choice is None else choice.unread_fields()

    @classmethod
    def notes(cls, experiment: Any) -> list[str]:
        """Return a line for the start report if OPTIMIZER is not AdamW."""
        name, row = experiment.OPTIMIZER, OPTIMIZERS[experiment.OPTIMIZER]
        if name == "adamw":
            return []
        parts = (
            f"{name}: rate {row.rate:g} × LEARNING_RATE",
            "constant unless LEARNING_RATE_SCHEDULE or STAGES sets another one"
            if row.keeps_rate
            else "",
            f"weight decay {row.decay:g} × WEIGHT_DECAY",
            "adamw for weights that are no matrices" if row.only_matrices else "",
            *(f"{field} is not read" for field in row.unread_fields()),
        )
        return [f"optimizer    {', '.join(filter(None, parts))}"]


def _import(function: str) -> Callable[..., Any]:
    module, _, name = function.rpartition(".")
    imported: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return imported


# Sources of the factors: Lion, Chen et al., 2023, section 5 (rates 3 to 10 times smaller, decay as
# much larger); Sophia, the page of its code (rate of AdamW, twice its decay); PSGD, the page of
# kron_torch (a rate around 3 times smaller, so the same product with the decay); MARS, the runs in
# its code (10 times the rate of AdamW, and a tenth of the decay). The papers of the others compare
# them with AdamW at similar rates.
OPTIMIZERS: Mapping[str, OptimizerChoice] = MappingProxyType(
    {
        "adamw": OptimizerChoice("optax.adamw"),
        "lion": OptimizerChoice("optax.lion", {}, rate=0.1, decay=10.0),
        "ademamix": OptimizerChoice(
            f"{_OPTIM}.adamw_variants.ademamix", {**_ADAM, "num_steps": "MAX_STEPS"}
        ),
        "adafactor": OptimizerChoice(
            f"{_OPTIM}.sharded_adafactor.sharded_adafactor", {"beta1": "ADAM_BETA1"}, _ADAFACTOR
        ),
        "sophia": OptimizerChoice(f"{_OPTIM}.adamw_variants.sophia", {}, decay=2.0),
        "mars": OptimizerChoice(
            f"{_OPTIM}.adamw_variants.mars", {"eps": "ADAM_EPSILON"}, rate=10.0, decay=0.1
        ),
        "schedule_free": OptimizerChoice(
            f"{_OPTIM}.adamw_variants.schedule_free_adamw", keeps_rate=True
        ),
        "cautious_adamw": OptimizerChoice(
            f"{_OPTIM}.adamw_variants.cautious", wrapped="optax.adam"
        ),
        "muon": OptimizerChoice(f"{_OPTIM}.matrix.muon.muon", {}, only_matrices=True),
        "normuon": OptimizerChoice(
            f"{_OPTIM}.matrix.muon.muon", {}, {"variant": "normuon"}, only_matrices=True
        ),
        "adamuon": OptimizerChoice(
            f"{_OPTIM}.matrix.muon.muon", {}, {"variant": "adamuon"}, only_matrices=True
        ),
        "psgd": OptimizerChoice(
            f"{_OPTIM}.matrix.psgd.psgd", {}, rate=1 / 3, decay=3.0, only_matrices=True
        ),
        "shampoo": OptimizerChoice(f"{_OPTIM}.matrix.shampoo.shampoo", {}, only_matrices=True),
        "soap": OptimizerChoice(f"{_OPTIM}.matrix.soap.soap", {}, only_matrices=True),
    }
)
