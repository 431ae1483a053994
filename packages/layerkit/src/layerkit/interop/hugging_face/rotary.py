"""Rotary positions in a config.json: `rope_parameters`, or `rope_theta` and `rope_scaling`.

Export writes the older keys, which all versions of Transformers read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.keys import (
    NEWER_SPELLINGS,
    ConfigFile,
    Entry,
    UnsupportedModelError,
    get_field,
    set_field,
)
from layerkit.interop.hugging_face.layer_types import FAR, NEAR
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.ops.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)

_SPELLINGS = ("rope_scaling", NEWER_SPELLINGS["rope_scaling"])
_LENGTH = "original_max_position_embeddings"
_SCALINGS: dict[str, Any] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
    "proportional": ProportionalScaling,
}
# Keys of fields that have other names here; other keys have the names of the fields.
_KEYS = {
    "original_max_position": _LENGTH,
    "max_position": "max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
    "fraction": "partial_rotary_factor",
}
_UNSCALED = {"rope_type": "default"}
# Phi 3 first called LongRoPE `su`. `mrope` states sections, which may come with a scaling.
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}
# `finetuned` marks models that were trained with the scaling (YaRN's authors). The last two divide
# the coordinates of a head among the axes of images, which have one position in text.
_NOT_OF_SCALING = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"),
    *("mrope_section", "mrope_interleaved"),
)


def rotary(
    default_theta: float = 10_000.0,
    *,
    default_fraction: float | None = None,
    theta: str = "rope_theta",
    fraction: str = "partial_rotary_factor",
    default_scaling: Mapping[str, Any] | None = None,
    pairing: str = "halves",
    sections: tuple[int, ...] | None = None,
    section_order: str = "blocks",
) -> Entry:
    """Return the entry of the rotary positions of queries and keys.

    Args:
      default_theta: Default of `rope_theta`.
      default_fraction: Default of `partial_rotary_factor`; None if the family has no such key.
      theta: Older key of `rope_theta`.
      fraction: Older key of `partial_rotary_factor`.
      default_scaling: Scaling of Transformers if both `rope_scaling` and `rope_parameters` are left
        out.
      pairing: Coordinates that are rotated together; see `RotaryPositionalEmbedding`.
      sections: Default of `mrope_section` for families that read images; None for others, whose
        texts have positions of one axis.
      section_order: Order of the sections.
    """

    def read(file: ConfigFile, network: Config) -> None:
        parameters = {
            "partial_rotary_factor": float(file.get(fraction, default_fraction or 1.0)),
            "rope_theta": float(file.get(theta, default_theta)),
            **(read_scaling(file) or default_scaling or {}),
        }
        rotated = parameters["partial_rotary_factor"]
        head_dim = network.dim_per_head or network.model_dims // network.num_heads
        if int(rotated * head_dim) % 2 or int(rotated * head_dim) != round(rotated * head_dim):
            expected = f"an even number of the {head_dim} coordinates of a head"
            raise file.invalid(fraction, expected, value=rotated)
        config = rotary_config(file, parameters, has_fraction=default_fraction is not None)
        config.pairing = pairing
        if sections is not None:
            sizes = tuple(parameters.get("mrope_section") or sections)
            if len(sizes) != len(sections) or sum(sizes) * 2 != round(rotated * head_dim):
                expected = f"{len(sections)} sections of all pairs"
                raise file.invalid("mrope_section", expected, value=sizes)
            is_interleaved = section_order == "interleaved"
            stated = parameters.get("mrope_interleaved", is_interleaved)
            if stated != is_interleaved:
                raise file.invalid("mrope_interleaved", f"{is_interleaved}", value=stated)
            config.set(sections=sizes, section_order=section_order)
        set_field(network, "layer.attention_tpl.rotary_tpl", config)

    def write(network: Config) -> dict[str, Any]:
        config = get_field(network, "layer.attention_tpl.rotary_tpl")
        content = rotary_keys(config)
        content = {theta: content.pop("rope_theta"), **content}
        if config.sections is not None:
            section_keys: dict[str, Any] = {"mrope_section": list(config.sections)}
            if config.section_order == "interleaved":
                section_keys["mrope_interleaved"] = True
            content["rope_scaling"] = (content["rope_scaling"] or _UNSCALED) | section_keys
        if default_scaling and content["rope_scaling"] is None:
            content["rope_scaling"] = {"rope_type": "default"}
        return content | ({} if default_fraction is None else {fraction: config.fraction})

    return Entry(read, write)


def read_scaling(file: ConfigFile, kind: str | None = None) -> dict[str, Any]:
    """Return the parameters under both spellings of the key.

    Args:
      file: File to read.
      kind: Type of the layers that are rotated, if the newer key has parameters for each type. The
        older key is for layers of full attention.

    Raises:
      UnsupportedModelError: The newer key has parameters for other types.
    """
    older, newer = (file.get(key, None) or {} for key in _SPELLINGS)
    if kind is None:
        # Versions of Transformers differ in which of two unequal parameters they apply.
        if any(newer.get(name, value) != value for name, value in older.items()):
            raise file.invalid(_SPELLINGS[0], f"the parameters of {_SPELLINGS[1]}, or none")
        return {**older, **newer}
    if not set(newer) <= {NEAR, FAR}:
        raise file.invalid(_SPELLINGS[1], f"keys {NEAR!r} and {FAR!r}")
    return {**(older if kind == FAR else {}), **(newer.get(kind) or {})}


def rotary_of_kinds(
    thetas: Mapping[str, tuple[str, float]],
) -> tuple[Entry, Callable[[ConfigFile, Config], None]]:
    """Return the entry of far layers' rotary positions, and `make_near` of `layer_types`.

    `write_more` of `layer_types` writes both.

    Args:
      thetas: Older key of `rope_theta` and its default, by type of the layers.
    """

    def read(file: ConfigFile, template: Config, kind: str) -> None:
        parameters = {"rope_theta": file.get(*thetas[kind]), **read_scaling(file, kind)}
        template.attention_tpl.rotary_tpl = rotary_config(file, parameters)

    far = Entry(lambda file, network: read(file, network.stack_tpl.layer_tpl, FAR))
    return far, lambda file, template: read(file, template, NEAR)


def rotary_config(
    file: ConfigFile, parameters: Mapping[str, Any], *, has_fraction: bool = False
) -> Config:
    """Return the config of rotary positions for parameters in the newer form; see `rotary`.

    Raises:
      UnsupportedModelError: The type, or an option of the type, is not supported.
    """
    parameters = dict(parameters)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = _OTHER_NAMES.get(kind, kind)
    config: Config = RotaryPositionalEmbedding.HParams.config(
        max_timescale=float(parameters["rope_theta"]),
    )
    if kind != "proportional":
        config.fraction = float(parameters.get("partial_rotary_factor", 1.0))
        if config.fraction != 1.0 and not has_fraction:
            expected = "1 in rope_parameters of this family, unless rope_type is 'proportional'"
            raise file.invalid("partial_rotary_factor", expected, value=config.fraction)
    if kind != "default" and kind not in _SCALINGS:
        hint = "A cache needs one that does not depend on the sequence length."
        raise file.invalid("rope_type", value=kind, choices=_SCALINGS, hint=hint)
    keys = {"": _LENGTH} if kind == "default" else _keys(_SCALINGS[kind])
    if kind not in ("default", "linear", "proportional"):
        # Some families have the length outside of the parameters, where it takes precedence.
        length = file.get(_LENGTH, None) or parameters.get(_LENGTH)
        longest = file.get("max_position_embeddings", None)
        parameters[_LENGTH] = length or longest
        if kind == "longrope":
            parameters["max_position_embeddings"] = longest
            if parameters.pop("factor", None) not in (None, longest / parameters[_LENGTH]):
                raise file.invalid("rope_scaling", "a factor that is the ratio of its lengths")
        else:
            parameters.pop("max_position_embeddings", None)
    known = {*keys.values(), *_NOT_OF_SCALING}
    unknown = {key: value for key, value in parameters.items() if key not in known}
    if any(unknown.values()):
        raise UnsupportedModelError(
            f"unknown parameters of rope_type={kind!r}",
            owner=file.owner,
            value=unknown,
            choices=sorted(keys.values()),
        )
    if kind != "default":
        fields = {field: parameters.get(key) for field, key in keys.items()}
        fields = {field: value for field, value in fields.items() if value is not None}
        config.scaling = _SCALINGS[kind](**fields)
    return config


def _keys(scaling: Any) -> dict[str, str]:
    """Return the keys of a scaling by field; keys of fields with a default may be left out."""
    fields = [field.name for field in dataclasses.fields(scaling)]
    return {name: _KEYS.get(name, name) for name in fields if name != "longest_sequence"}


def rotary_parameters(rotary: Any) -> dict[str, Any]:
    """Return the parameters of rotary positions in the newer form; see `rotary_keys`."""
    older = rotary_keys(rotary)
    return {"rope_theta": older["rope_theta"], **(older["rope_scaling"] or _UNSCALED)}


def rotary_by_kind(near: Config | None, far: Config | None) -> dict[str, dict[str, Any]]:
    """Return the newer parameters of near and far layers, from the templates of both kinds."""
    return {
        kind: rotary_parameters(template.attention_tpl.rotary_tpl)
        for kind, template in ((NEAR, near), (FAR, far))
        if template is not None
    }


def rotary_keys(rotary: Any) -> dict[str, Any]:
    """Return the older keys of rotary positions.

    Raises:
      UnsupportedModelError: The scaling has no keys.
      AttributeError: The rotary positions are missing.
    """
    content: dict[str, Any] = {"rope_theta": rotary.max_timescale, "rope_scaling": None}
    if rotary.scaling is None:
        return content
    for kind, scaling_class in _SCALINGS.items():
        if type(rotary.scaling) is scaling_class:
            keys = _keys(scaling_class)
            values = {key: getattr(rotary.scaling, field) for field, key in keys.items()}
            values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
            if kind == "longrope":
                content["max_position_embeddings"] = values.pop("max_position_embeddings")
                content[_LENGTH] = values[_LENGTH]
            kept = {key: value for key, value in values.items() if value is not None}
            return {**content, "rope_scaling": {"rope_type": kind, "type": kind, **kept}}
    raise UnsupportedModelError(
        field="rotary_tpl.scaling",
        value=type(rotary.scaling).__name__,
        choices=[scaling_class.__name__ for scaling_class in _SCALINGS.values()],
    )
