"""Rotary positions in a config.json: the newer `rope_parameters`, and the older two keys.

Written are the older ones, `rope_theta` and `rope_scaling`, since every version reads those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.keys import (
    ConfigFile,
    UnsupportedModelError,
    get_field,
    set_field,
)
from layerkit.layers.positions import RotaryPositionalEmbedding
from layerkit.layers.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
)
from layerkit.near_names import near_names

_LENGTH = "original_max_position_embeddings"
# For each rope_type: our class, and (their key, our field). Theirs may leave out those of ours that
# have a default.
_SCALINGS: dict[str, tuple[type, tuple[tuple[str, str], ...]]] = {
    "linear": (LinearScaling, (("factor", "factor"),)),
    "llama3": (
        Llama3Scaling,
        (
            ("factor", "factor"),
            ("low_freq_factor", "low_freq_factor"),
            ("high_freq_factor", "high_freq_factor"),
            (_LENGTH, "original_max_position"),
        ),
    ),
    "yarn": (
        YarnScaling,
        (
            ("factor", "factor"),
            (_LENGTH, "original_max_position"),
            ("beta_fast", "beta_fast"),
            ("beta_slow", "beta_slow"),
            ("attention_factor", "attention_factor"),
            ("mscale", "mscale"),
            ("mscale_all_dim", "mscale_all_dim"),
            ("truncate", "truncate"),
        ),
    ),
    "longrope": (
        LongRopeScaling,
        (
            ("short_factor", "short_factors"),
            ("long_factor", "long_factors"),
            ("attention_factor", "attention_factor"),
            (_LENGTH, "original_max_position"),
            ("max_position_embeddings", "max_position"),
        ),
    ),
}
# `su` is what Phi 3 called LongRoPE before it had that name.
_OTHER_NAMES = {"su": "longrope"}
_NOT_OF_SCALING = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotation of queries and keys.

    Attributes:
      default_theta: Where the file does not say.
      has_fraction: Whether models of the family may turn a part of each head.
    """

    default_theta: float = 10_000.0
    has_fraction: bool = False

    def read(self, file: ConfigFile, network: Config) -> None:
        parameters = parameters_of(file, self.default_theta)
        set_field(network, "layer.attention_tpl.rotary_tpl", self._rotary(file, parameters))

    def _rotary(self, file: ConfigFile, parameters: Mapping[str, Any]) -> Config:
        fraction = file.get("partial_rotary_factor", 1.0) if self.has_fraction else 1.0
        parameters = {"partial_rotary_factor": fraction, **parameters}
        if parameters["partial_rotary_factor"] != 1.0 and not self.has_fraction:
            raise file.refuse("rope_parameters", "turns a part of each head, as no such model does")
        return rotary_config(file, parameters)

    def write(self, network: Config) -> dict[str, Any]:
        rotary = get_field(network, "layer.attention_tpl.rotary_tpl")
        content = rotary_keys(rotary)
        if self.has_fraction:
            content["partial_rotary_factor"] = rotary.fraction
        return content


def parameters_of(file: ConfigFile, default_theta: float) -> dict[str, Any]:
    """What a file says of the rotation, in the newer form."""
    newer = file.get("rope_parameters", None) or {}
    older = {"rope_theta": file.get("rope_theta", default_theta)}
    return {**older, **(file.get("rope_scaling", None) or {}), **newer}


def rotary_config(file: ConfigFile, parameters: Mapping[str, Any]) -> Config:
    """Our rotation of parameters in the newer form.

    Raises:
      UnsupportedModelError: a type, or an option of a type, that we do not have.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = _OTHER_NAMES.get(kind, kind)
    rotary: Config = RotaryPositionalEmbedding.HParams.config(
        max_timescale=float(parameters["rope_theta"]),
        fraction=float(parameters.get("partial_rotary_factor", 1.0)),
    )
    if kind == "default":
        _refuse_unknown(file, kind, parameters, known={_LENGTH})
        return rotary
    if kind not in _SCALINGS:
        reason = "changes with the length of a sequence, which a cache cannot follow"
        if kind != "dynamic":
            reason = f"is not supported{near_names(kind, _SCALINGS)}"
        raise UnsupportedModelError(
            f"config.json of a {file.model_type} model: rope_type={kind!r} {reason}"
        )
    rotary.scaling = _scaling(file, kind, dict(parameters))
    return rotary


def _scaling(file: ConfigFile, kind: str, parameters: dict[str, Any]) -> Any:
    scaling_class, names = _SCALINGS[kind]
    if kind != "linear":
        # Some families say it beside the parameters, and there it counts.
        length = file.get(_LENGTH, None) or parameters.get(_LENGTH)
        longest = file.get("max_position_embeddings", None)
        parameters[_LENGTH] = length or longest
        parameters["max_position_embeddings"] = longest
        if kind != "longrope":
            del parameters["max_position_embeddings"]
        elif parameters.pop("factor", None) not in (None, longest / parameters[_LENGTH]):
            raise file.refuse("rope_scaling", "has a factor that is not the ratio of its lengths")
    _refuse_unknown(file, kind, parameters, known={theirs for theirs, _ in names})
    given = {ours: parameters[theirs] for theirs, ours in names if theirs in parameters}
    return scaling_class(**{name: value for name, value in given.items() if value is not None})


def _refuse_unknown(
    file: ConfigFile, kind: str, parameters: Mapping[str, Any], *, known: set[str]
) -> None:
    unknown = {k: v for k, v in parameters.items() if k not in known and k not in _NOT_OF_SCALING}
    if any(value is not None for value in unknown.values()):
        raise UnsupportedModelError(
            f"config.json of a {file.model_type} model: {unknown} of rope_type={kind!r} is not"
            " supported"
        )


def rotary_keys(rotary: Any) -> dict[str, Any]:
    """The older keys of a rotation of ours.

    Raises:
      UnsupportedModelError: there is none, or one that folders cannot say.
    """
    if rotary is None:
        raise UnsupportedModelError("rotary_tpl is not set")
    content: dict[str, Any] = {"rope_theta": rotary.max_timescale, "rope_scaling": None}
    if rotary.scaling is None:
        return content
    for kind, (scaling_class, names) in _SCALINGS.items():
        if type(rotary.scaling) is scaling_class:
            values = {theirs: getattr(rotary.scaling, ours) for theirs, ours in names}
            values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
            if kind == "longrope":
                content["max_position_embeddings"] = values.pop("max_position_embeddings")
                content[_LENGTH] = values[_LENGTH]
            kept = {key: value for key, value in values.items() if value is not None}
            return {**content, "rope_scaling": {"rope_type": kind, "type": kind, **kept}}
    raise UnsupportedModelError(f"rotary scaling {type(rotary.scaling).__name__}")
