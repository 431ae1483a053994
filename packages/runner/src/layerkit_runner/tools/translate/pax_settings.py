"""What `task()` of a Pax class sets, as fields of ours.

A path counts in full, from the task on: `epsilon` is one thing in a norm and another in an
optimizer. What recipes do anyway is passed over for just the value with which they do it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from layerkit_runner.tools.translate.pax_source import CannotTellError, Symbol
from layerkit_runner.tools.translate.pax_task import Gaussian, Setting, TaskPath
from layerkit_runner.tools.translate.values import (
    NotTranslatedError,
    Reader,
    number,
    or_none,
    positive_or_none,
    whole_number,
    yes_or_no,
)
from layerkit_runner.tools.translate.written import Leftover

_LM = "task.model.lm_tpl"
_SOFTMAX = f"{_LM}.softmax_tpl"
_STACK = f"{_LM}.stacked_transformer_tpl"
_LAYER = f"{_STACK}.transformer_layer_params_tpl"
_OPTIMIZER = "task.train.learner.optimizer"
_WEIGHT_INIT = "task.model.params_init"


def _deviation(value: Any) -> float:
    if not isinstance(value, Gaussian):
        raise NotTranslatedError("expected WeightInit.Gaussian")
    return number(value.std)


# Our field, and what it takes.
FIELDS: Mapping[str, tuple[str, Reader]] = {
    "task.train.num_train_steps": ("MAX_STEPS", whole_number),
    "task.train.summary_interval_steps": ("SUMMARY_INTERVAL_STEPS", whole_number),
    "task.train.eval_interval_steps": ("EVAL_INTERVAL_STEPS", or_none(whole_number)),
    "task.train.save_interval_steps": ("CHECKPOINT_EVERY_N_STEPS", whole_number),
    "task.train.save_max_to_keep": ("CHECKPOINT_MAX_TO_KEEP", or_none(whole_number)),
    f"{_OPTIMIZER}.learning_rate": ("LEARNING_RATE", number),
    f"{_OPTIMIZER}.beta1": ("ADAM_BETA1", number),
    f"{_OPTIMIZER}.beta2": ("ADAM_BETA2", number),
    f"{_OPTIMIZER}.epsilon": ("ADAM_EPSILON", number),
    f"{_OPTIMIZER}.weight_decay": ("WEIGHT_DECAY", number),
    f"{_OPTIMIZER}.clip_gradient_norm_to_value": ("CLIP_GRADIENT_NORM", positive_or_none),
    f"{_OPTIMIZER}.clip_threshold": ("UPDATE_RMS_CAP", positive_or_none),
    _WEIGHT_INIT: ("INIT_STD", _deviation),
    "task.model.decoder_tpl.eos_id": ("EOS_ID", whole_number),
    f"{_LM}.packed_input": ("PACKED_INPUT", yes_or_no),
    f"{_SOFTMAX}.soft_cap_logits": ("SOFTMAX_LOGIT_CAP", positive_or_none),
    f"{_SOFTMAX}.scale_sqrt_depth": ("SCALE_EMBEDDING", yes_or_no),
    f"{_STACK}.dropout_prob": ("DROPOUT_RATE", number),
    f"{_STACK}.input_dropout_prob": ("INPUT_DROPOUT_RATE", number),
    f"{_LAYER}.tr_atten_tpl.use_bias": ("ATTENTION_BIAS", yes_or_no),
    f"{_LAYER}.tr_atten_tpl.atten_logit_cap": ("ATTENTION_LOGIT_CAP", positive_or_none),
    f"{_LAYER}.tr_fflayer_tpl.has_bias": ("FEED_FORWARD_BIAS", yes_or_no),
    f"{_LAYER}.tr_fflayer_tpl.use_gated_activation": ("USE_GATED_ACTIVATION", yes_or_no),
}
_PER_DIM_SCALE = f"{_LAYER}.tr_atten_tpl.internal_enable_per_dim_scale"
_LOGIT_BIAS = f"{_SOFTMAX}.feed_forward_tpl.has_bias"
# What Pax learns unless a method turns it off, by the path that turns it on here.
_LEARNT_BESIDES = {
    _PER_DIM_SCALE: "task.model.lm_tpl.stack_tpl.layer_tpl.attention_tpl.per_dim_scale",
    _LOGIT_BIAS: "task.model.lm_tpl.softmax_tpl.use_bias",
}
_NORMS = (f"{_LAYER}.ln_tpl", f"{_LAYER}.tr_fflayer_tpl.ln_tpl", f"{_LM}.final_ln_tpl")
# What recipes do anyway, with this value.
DONE_ANYWAY: Mapping[str, Any] = {
    "task.model.apply_eval_sample_weights": True,
    _LOGIT_BIAS: False,
    _PER_DIM_SCALE: False,
    **dict.fromkeys((f"{norm}.reductions_in_fp32" for norm in _NORMS), True),
}
# How Pax's program is written; no number depends on it.
NEUTRAL = (
    f"{_SOFTMAX}.lookup_style",
    f"{_LM}.separate_embedding_tpl.lookup_style",
    f"{_LM}.position_emb_tpl.lookup_style",
    "task.train.learner.repeat_prefix_sep",
)
# Several of Pax's that are one field here.
_EPSILONS = tuple(f"{norm}.epsilon" for norm in _NORMS)
_PAX_EPSILON = 1e-6
_EMBEDDING_INIT = f"{_SOFTMAX}.params_init"
_TOGETHER = (*_EPSILONS, _EMBEDDING_INIT)

_APPROXIMATE = f"{_LAYER}.tr_fflayer_tpl.activation_tpl.approximate"
_GELUS = {True: "gelu", False: "gelu_exact"}
_DECODED_LENGTH = "task.model.decoder_tpl.seqlen"

_NOTHING = object()


def with_settings(
    settings: Sequence[tuple[str, Setting]], fields: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Leftover]]:
    """Fields after what methods set, and what was left over.

    Args:
      settings: With the names of their classes, in the order in which they take effect.
      fields: Ours, before.
    """
    fields = dict(fields)
    leftovers: list[Leftover] = []
    together: dict[str, Setting] = {}
    for cls, setting in _that_last(settings):
        try:
            if setting.path in _TOGETHER and setting.is_certain:
                together[setting.path] = setting
            else:
                fields |= _fields(setting, fields)
        except NotTranslatedError as error:
            reason = f"set in {cls}.task(); set it in a task() of your own"
            told = f"{error}; {reason}" if str(error) else reason
            leftovers.append(Leftover(setting.name, setting.text, told))
    compositions = [_norm_epsilon]
    if any(setting.path in (_WEIGHT_INIT, _EMBEDDING_INIT) for _, setting in settings):
        compositions.append(_embedding_init)
    for composition in compositions:
        found, untold = composition(together, fields)
        fields |= found
        leftovers += untold
    return fields, leftovers


def learnt_besides(settings: Sequence[tuple[str, Setting]]) -> dict[str, bool]:
    """Return what language models of Pax learn and no field of ours says, by its path from `task`.

    That is a scale for each coordinate of a head and a bias for each word, unless methods turn them
    off, as for GPT-3.
    """
    off = {
        setting.path
        for _, setting in _that_last(settings)
        if setting.value is False and setting.is_certain
    }
    return {ours: True for path, ours in _LEARNT_BESIDES.items() if path not in off}


def _that_last(settings: Sequence[tuple[str, Setting]]) -> list[tuple[str, Setting]]:
    """Without those that are certainly set anew."""
    last = {
        setting.path: position
        for position, (_, setting) in enumerate(settings)
        if setting.path is not None and setting.is_certain
    }
    return [
        pair
        for position, pair in enumerate(settings)
        if position >= last.get(pair[1].path or "", 0)
    ]


def _fields(setting: Setting, fields: Mapping[str, Any]) -> dict[str, Any]:
    path, value = setting.path, setting.value
    if path in NEUTRAL:
        return {}
    if path is None or isinstance(value, (CannotTellError, Symbol, TaskPath)):
        raise NotTranslatedError
    if path == _DECODED_LENGTH and value == fields.get("MAX_SEQ_LEN", _NOTHING):
        return {}
    if path in DONE_ANYWAY and setting.is_certain:
        if value is not DONE_ANYWAY[path]:
            raise NotTranslatedError(f"recipes have {DONE_ANYWAY[path]}")
        return {}
    if path == _APPROXIMATE:
        is_gelu = fields.get("ACTIVATION") in _GELUS.values()
        found = {"ACTIVATION": _GELUS[yes_or_no(value)]} if is_gelu else {}
    elif path in FIELDS:
        field, read = FIELDS[path]
        found = {field: read(value)}
    else:
        raise NotTranslatedError
    if not setting.is_certain and any(fields.get(name, _NOTHING) != found[name] for name in found):
        raise NotTranslatedError("under a condition that the source alone does not tell")
    return found


def _norm_epsilon(
    together: Mapping[str, Setting], fields: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Leftover]]:
    """One epsilon for all norms; those that no method sets have Pax's own."""
    if not any(path in together for path in _EPSILONS):
        return {}, []
    values = {
        path: together[path].value if path in together else _PAX_EPSILON for path in _EPSILONS
    }
    common = values[_EPSILONS[0]]
    if _is_number(common) and all(value == common for value in values.values()):
        return {"NORM_EPSILON": float(common)}, []
    ours = fields.get("NORM_EPSILON", _PAX_EPSILON)
    reason = f"recipes have one NORM_EPSILON for all norms, here {ours!r}"
    return {}, [
        _leftover(together, path, repr(_PAX_EPSILON), reason)
        for path, value in values.items()
        if value != ours
    ]


def _embedding_init(
    together: Mapping[str, Setting], fields: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Leftover]]:
    """Ours starts as INIT_STD says, or else as Pax's does if no method says another."""
    dims, deviation = fields.get("MODEL_DIMS"), fields.get("INIT_STD")
    usual = dims**-0.5 if dims else math.nan
    ours = usual if deviation is None else deviation
    is_set = _EMBEDDING_INIT in together
    init = together[_EMBEDDING_INIT].value if is_set else Gaussian(usual)
    std = init.std if isinstance(init, Gaussian) and _is_number(init.std) else math.nan
    if math.isclose(std, ours):
        return {}, []
    source = "1/√MODEL_DIMS" if deviation is None else f"INIT_STD, here {deviation!r}"
    reason = f"recipes start the embedding with the deviation {source}"
    return {}, [_leftover(together, _EMBEDDING_INIT, "Gaussian(1/√MODEL_DIMS)", reason)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _leftover(together: Mapping[str, Setting], path: str, usual: str, reason: str) -> Leftover:
    if path in together:
        return Leftover(together[path].name, together[path].text, reason)
    return Leftover(path, usual, f"so it is in Pax where no method sets it; {reason}")
