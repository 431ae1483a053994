"""Width transfer: a decoder whose best rate is that of a narrower one, by the field WIDTH_TRANSFER.

The rules are those of muP for Adam (Yang et al., 2022, arXiv:2203.03466, table 8) and the spectral
condition for Muon (Yang et al., 2023, arXiv:2310.17813). They follow from the declared axes of the
weights. With m = MODEL_DIMS / WIDTH_TRANSFER, at which all sizes of a layer have grown by m:

- Weights that contract a dimension of the width start with a variance of 1 / inputs. Their rate is
  divided by m under Adam, and by √m under Muon, whose update grows by √m in the spectral norm; with
  another `scale` of Muon than "rms" it does not grow. The product of rate and weight decay stays.
- Embeddings, head, positions, norms and biases keep initial scale and rate.
- Logits of tokens are divided by m, and those of attention by √m more than by √head size if heads
  grow.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import optax

from layerkit.base.weights import WeightBox, WeightInit
from layerkit.config import Config, assigned_fields, is_config, target_of, walk_configs
from layerkit.config.checks import check_sizes, require
from layerkit.layers.attention.base_attention import AttentionLayer, BaseAttention
from layerkit.layers.recurrent.token_mixer import TokenMixer
from layerkit_runner.optim import adamw_variants
from layerkit_runner.optim.learner import AuxiliaryOptimizer
from layerkit_runner.optim.matrix.matrices import all_but_matrices
from layerkit_runner.optim.matrix.muon import muon
from layerkit_runner.optim.optimizers import adam_with_update_cap
from layerkit_runner.optim.weight_selection import mask_of

_WIDTH_AXES = frozenset({"embed", "mlp", "heads", "kv_heads"})
# Power of m by which the rate of matrices falls.
_POWERS: Mapping[Callable[..., Any], float] = MappingProxyType(
    {
        optax.adamw: 1.0,
        optax.adam: 1.0,
        optax.lion: 1.0,
        adam_with_update_cap: 1.0,
        adamw_variants.ademamix: 1.0,
        adamw_variants.cautious: 1.0,
        adamw_variants.mars: 1.0,
        muon: 0.5,
    }
)


def contracts_width(params: Any) -> Any:
    """Return a tree of booleans: True for weights that contract a dimension of the width.

    Args:
      params: Boxed weights, or plain ones inside a learner.
    """
    return mask_of(params, _contracts_width)


def keeps_rate(params: Any) -> Any:
    """Return a tree of booleans: True for the other weights; see `contracts_width`."""
    return mask_of(params, lambda box: not _contracts_width(box))


def is_router(params: Any) -> Any:
    """Return a tree of booleans: True for weights that contract the width and are no matrices."""
    return jax.tree.map(operator.and_, contracts_width(params), all_but_matrices(params))


class WidthTransfer(NamedTuple):
    """The change of width of a decoder.

    Attributes:
      base: Width for which the rate was chosen.
      width: MODEL_DIMS.
    """

    base: int
    width: int

    @classmethod
    def apply(cls, experiment: Any, task: Config) -> Config:
        """Set rates, initial weights and scales of a task of a decoder, and return it.

        Raises:
          ConfigError: The model is no decoder, or scales its embeddings or logits, or no rule is
            known for the optimizer.
        """
        base = experiment.WIDTH_TRANSFER
        owner, model = type(experiment).__qualname__, task.model
        check_sizes(owner, WIDTH_TRANSFER=base)
        expected = "None, since the model is no decoder with lm_tpl"
        require(hasattr(model, "lm_tpl"), owner, "WIDTH_TRANSFER", base, expected)
        for config in walk_configs(model.lm_tpl.stack_tpl):
            layer = target_of(config)
            is_mixer = issubclass(layer, (AttentionLayer, TokenMixer))
            has_rule = not is_mixer or issubclass(layer, BaseAttention)
            expected = f"None, since no rule is known for {layer.__name__}"
            require(has_rule, owner, "WIDTH_TRANSFER", base, expected)
        expected = "False with WIDTH_TRANSFER, since its factor grows with the width"
        scales = experiment.SCALE_EMBEDDING
        require(not scales, owner, "SCALE_EMBEDDING", scales, expected)
        scale = model.lm_tpl.softmax_tpl.logit_scale
        expected = "None with WIDTH_TRANSFER; the scales of Praxis' experts depend on MODEL_DIMS"
        require(scale is None, owner, "lm_tpl.softmax_tpl.logit_scale", scale, expected)
        transfer = cls(base, experiment.MODEL_DIMS)
        transfer._set_initial_weights(model.lm_tpl)
        transfer._set_logit_scales(model.lm_tpl, grows=experiment.DIMS_PER_HEAD is None)
        transfer._set_rates(task.train.learner, owner)
        return task

    @property
    def growth(self) -> float:
        """Return m."""
        return self.width / self.base

    def _set_initial_weights(self, lm: Config) -> None:
        def scaled(init: WeightInit) -> WeightInit:
            # Praxis takes the axis of the width for a batch in projections of heads.
            expected = "another method with WIDTH_TRANSFER, whose fans are those of the matrix"
            is_known = init.method != "xavier_last_axes"
            require(is_known, "WIDTH_TRANSFER", "params_init", init.method, expected)
            if init.method not in ("gaussian", "truncated_gaussian"):
                return init
            return dataclasses.replace(init, scale=init.scale * self.growth**-0.5)

        for config in walk_configs(lm.stack_tpl):
            for name, value in assigned_fields(config).items():
                if isinstance(value, WeightInit):
                    setattr(config, name, scaled(value))
        inherited = lm.params_init
        lm.stack_tpl.params_init = scaled(inherited)
        softmax, positions = lm.softmax_tpl, lm.position_tpl
        if softmax.weight_init is None:
            softmax.weight_init = _with_fans(inherited, self.base, lm.vocab_size)
        elif lm.embedding_tpl is None and softmax.weight_init.scale == self.width**-0.5:
            softmax.weight_init = WeightInit.Gaussian(self.base**-0.5)
        if getattr(positions, "max_length", None) and positions.weight_init is None:
            positions.weight_init = _with_fans(inherited, positions.max_length, self.base)

    def _set_logit_scales(self, lm: Config, *, grows: bool) -> None:
        lm.softmax_tpl.logit_scale = 1.0 / self.growth
        for config in walk_configs(lm.stack_tpl):
            if grows and issubclass(target_of(config), BaseAttention):
                heads = config.num_heads or lm.num_heads
                scale = config.logit_scale or (self.width / heads) ** -0.5
                config.logit_scale = scale * self.growth**-0.5

    def _set_rates(self, learner: Config, owner: str) -> None:
        function = target_of(learner.optimizer)
        expected = f"one of {', '.join(f.__name__ for f in _POWERS)} with WIDTH_TRANSFER"
        require(function in _POWERS, owner, "optimizer", function.__name__, expected)
        others = learner.auxiliary_optimizers
        is_known = not others or (function is muon and len(others) == 1)
        require(is_known, owner, "auxiliary_optimizers", others, "none with WIDTH_TRANSFER")
        adam = others[0] if others else learner
        rest = AuxiliaryOptimizer.HParams.config(
            name="adamw" if others else "width_free",
            weights=keeps_rate,
            optimizer=adam.optimizer,
            learning_rate=adam.learning_rate,
        )
        routers = rest.clone(name="routers", weights=is_router)
        self._divide_rate(routers, power=1.0)
        power, scale = _POWERS[function], assigned_fields(learner.optimizer).get("scale", "rms")
        if function is muon and scale != "rms":
            power = 0.0  # Its updates do not grow in the spectral norm.
        self._divide_rate(learner, power=power)
        learner.auxiliary_optimizers = [rest, routers] if others else [rest]

    def _divide_rate(self, config: Config, *, power: float) -> None:
        rate, optimizer = copy.deepcopy(config.learning_rate), copy.deepcopy(config.optimizer)
        is_schedule = is_config(rate) and "peak" in assigned_fields(rate)
        expected = "a schedule with a peak, for WIDTH_TRANSFER"
        require(is_schedule, "Learner", "learning_rate", rate, expected)
        rate.peak /= self.growth**power
        if decay := assigned_fields(optimizer).get("weight_decay"):
            optimizer.weight_decay = decay * self.growth**power
        config.set(learning_rate=rate, optimizer=optimizer)


def _contracts_width(box: WeightBox) -> bool:
    axes = {box.axes[dim] for dim in box.fan_in_dims} & _WIDTH_AXES
    is_product = box.is_factor or ("embed" in axes and box.decays)
    return bool(axes) and is_product and "vocab" not in box.axes


def _with_fans(init: WeightInit, fan_in: int, fan_out: int) -> WeightInit:
    """Return the initializer that draws what another one draws for a weight with these fans."""
    if init.method.startswith("xavier"):
        return WeightInit.Uniform(init.scale * math.sqrt(6.0 / (fan_in + fan_out)))
    return WeightInit.Gaussian(init.scale / math.sqrt(fan_in)) if init.method == "fan_in" else init
