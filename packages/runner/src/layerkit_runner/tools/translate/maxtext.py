"""MaxText's YAML files and `key=value` words as an experiment.

    scale=3 base_num_decoder_layers=16  →  NUM_LAYERS = 48
    ici_fsdp_parallelism=64             →  ICI_MESH_SHAPE = [1, 64, 1]

Only what the files and words say is translated: where they leave a key out, the field is left to
the recipes. MaxText's own base.yml may be given as `defaults`; then keys that say there what they
say in the files need no counterpart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError
from layerkit_runner.files.bounded_documents import DocumentError, parse_yaml
from layerkit_runner.tools.translate.maxtext_keys import (
    COMPOSED,
    NEUTRAL,
    RULES,
    data_recipe,
)
from layerkit_runner.tools.translate.values import NotTranslatedError, number, whole_number
from layerkit_runner.tools.translate.written import Leftover, Translation, fields_of

_AXES = ("data", "fsdp", "tensor")

# Our field by the keys that hold its base: today's name, and that of 2023.
_SCALED = {
    "NUM_LAYERS": ("base_num_decoder_layers",),
    "MODEL_DIMS": ("base_emb_dim",),
    "HIDDEN_DIMS": ("base_mlp_dim",),
    "NUM_HEADS": ("base_num_query_heads", "base_num_heads"),
    "NUM_KV_HEADS": ("base_num_kv_heads",),
}


# Where the layer keeps them, by the key; with the values that it has anyway.
_ROTARY_TPL = "task.model.lm_tpl.stack_tpl.layer_tpl.attention_tpl.rotary_tpl"
_TIMESCALES = {
    "rope_min_timescale": (f"{_ROTARY_TPL}.min_timescale", 1),
    "rope_max_timescale": (f"{_ROTARY_TPL}.max_timescale", 10_000),
}

# Fields or settings, and what was left over of the keys that they are made of.
_Composed = tuple[dict[str, Any], list[Leftover]]


def read_values(texts: Mapping[str, str], words: Sequence[str]) -> dict[str, Any]:
    """The keys of YAML texts, by the names of their files, and of `key=value` words.

    Later ones win.

    Raises:
      UsageError: a text that is no YAML mapping, or a word that is not `key=value`.
    """
    values: dict[str, Any] = {}
    for file, text in texts.items():
        read = _yaml(text, file)
        if not isinstance(read, dict):
            raise UsageError(
                f"{file}: expected keys and values as MaxText has them, got {read!r:.60}"
            )
        for name, value in read.items():
            if not isinstance(name, str):
                raise UsageError(f"{file}: the key {name!r} is no name")
            values[name] = _number(value)
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"{word!r}: expected KEY=VALUE, as MaxText's command line has them")
        values[name] = _number(_yaml(text, repr(word)))
    return values


def _yaml(text: str, name: str) -> Any:
    try:
        return parse_yaml(text)
    except DocumentError as error:
        raise UsageError(f"{name} is no YAML: {error}") from error


def _number(value: Any) -> Any:
    """YAML 1.1 takes `1e-3` for text, which MaxText turns into a number."""
    if isinstance(value, str) and value[:1] in "0123456789.-":
        try:
            return float(value)
        except ValueError:
            return value
    return value


def translate_maxtext(
    values: Mapping[str, Any],
    *,
    name: str = "FromMaxText",
    defaults: Mapping[str, Any] | None = None,
    devices_per_slice: int | None = None,
) -> Translation:
    """The experiment that the keys describe.

    Args:
      values: Keys and values.
      name: Of the class.
      defaults: MaxText's base.yml: read where `values` say nothing.
      devices_per_slice: What a parallelism of -1 fills up to.
    """
    defaults = defaults or {}
    everything = {**defaults, **values}
    fields: dict[str, Any] = {}
    leftovers: list[Leftover] = []
    for compose in (_sizes, _schedule):
        composed, untold = compose(everything)
        fields |= composed
        leftovers += untold
    for key, value in everything.items():
        if key in NEUTRAL or key in COMPOSED or _is_parallelism(key):
            continue
        try:
            fields |= _rule(key)(value, everything)
        except NotTranslatedError as error:
            if key in values and values[key] != defaults.get(key, _NOTHING):
                leftovers.append(Leftover(key, repr(value), str(error)))
    meshes, wrong_axes = _meshes(everything, devices_per_slice)
    recipes = _recipes(everything)
    is_rotary = fields.get("POSITIONS", "rotary" if "LlamaDecoder" in recipes else "") == "rotary"
    settings, wrong_scales = _timescales(everything, is_rotary=is_rotary)
    ordered = {**_in_order(fields), **meshes}
    return Translation(
        name=name,
        summary=f"{everything.get('run_name') or 'A configuration'}, from MaxText.",
        fields=fields_of(ordered, recipes),
        recipes=recipes,
        settings=settings,
        leftovers=[*leftovers, *wrong_axes, *wrong_scales],
        remarks=_remarks(everything),
    )


_NOTHING = object()


def _rule(key: str) -> Any:
    if key in RULES:
        return RULES[key]

    def unknown(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        known = [*RULES, *NEUTRAL, *COMPOSED]
        raise NotTranslatedError(f"this key is not known{near_names(key, known)}")

    return unknown


def _sizes(values: Mapping[str, Any]) -> _Composed:
    """Sizes after scale.

    In 2023 `scale` multiplied all of them; `global_parameter_scale` is a power of 2 that doubles
    heads and feed-forward, width, and depth in turn.
    """
    reading = _Reading(values)
    scale = reading.whole_number("scale", 1)
    power = reading.whole_number("global_parameter_scale", 1)
    if power is not None and (power < 1 or power & (power - 1)):
        reading.refuse("global_parameter_scale", "it is a power of 2")
        power = None
    if scale is None or power is None:
        return {}, reading.leftovers
    turns, rest = divmod(int(math.log2(power)), 3)
    doublings = {
        "NUM_LAYERS": turns,
        "MODEL_DIMS": turns + (rest > 1),
        "HIDDEN_DIMS": turns + (rest > 0),
        "NUM_HEADS": turns + (rest > 0),
        "NUM_KV_HEADS": turns + (rest > 0),
    }
    factors = {field: scale * 2**count for field, count in doublings.items()}
    sizes = {}
    for field, keys in _SCALED.items():
        key = next((key for key in keys if key in values), None)
        base = None if key is None else reading.whole_number(key)
        if base is not None:
            sizes[field] = base * factors[field]
    return sizes, reading.leftovers


def _schedule(values: Mapping[str, Any]) -> _Composed:
    fields: dict[str, Any] = {}
    reading = _Reading(values)
    steps = reading.whole_number("steps", -1)
    length = reading.whole_number("learning_rate_schedule_steps", -1)
    fraction = reading.number("warmup_steps_fraction")
    if steps is None or length is None:
        return {}, reading.leftovers
    if steps == -1:
        steps = length
    if length == -1:
        length = steps
    if steps != -1:
        fields["MAX_STEPS"] = steps
    if length < steps:
        reason = "less than steps: MaxText's rate is 0 from there on, ours stays at its lowest"
        reading.refuse("learning_rate_schedule_steps", reason)
    elif length != steps:
        fields["DECAY_END"] = length
    if fraction is not None and length == -1:
        reading.refuse("warmup_steps_fraction", "of how many steps? Give steps=N")
    elif fraction is not None:
        fields["WARMUP_STEPS"] = int(length * fraction)
    return fields, reading.leftovers


def _timescales(values: Mapping[str, Any], *, is_rotary: bool) -> _Composed:
    """Of rotary positions, which no field says."""
    settings: dict[str, Any] = {}
    reading = _Reading(values)
    for key, (path, usual) in _TIMESCALES.items():
        scale = reading.number(key, usual)
        if scale is None or scale == usual:
            continue
        if is_rotary:
            settings[path] = scale
        elif "decoder_block" not in values:
            flag = f"--fdl.{path}={scale!r}"
            reading.refuse(key, f"give decoder_block; a model with rotary positions takes {flag}")
    return settings, reading.leftovers


class _Reading:
    """Reads values of several keys, and keeps what they were told instead."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.leftovers: list[Leftover] = []

    def whole_number(self, key: str, default: int | None = None) -> int | None:
        """The value of a key; None if it is none."""
        return self._read(key, whole_number, default)

    def number(self, key: str, default: float | None = None) -> float | None:
        """The value of a key; None if it is none."""
        return self._read(key, number, default)

    def refuse(self, key: str, reason: str) -> None:
        """Leaves a key over."""
        self.leftovers.append(Leftover(key, repr(self._values.get(key)), reason))

    def _read(self, key: str, read: Callable[[Any], Any], default: Any) -> Any:
        if key not in self._values:
            return default
        try:
            return read(self._values[key])
        except NotTranslatedError as error:
            self.refuse(key, str(error))
            return None


def _is_parallelism(key: str) -> bool:
    return key.startswith(("ici_", "dcn_")) and key.endswith("_parallelism")


def _meshes(values: Mapping[str, Any], devices_per_slice: int | None) -> _Composed:
    meshes: dict[str, Any] = {}
    reading = _Reading(values)
    for kind, field in (("ici", "ICI_MESH_SHAPE"), ("dcn", "DCN_MESH_SHAPE")):
        keys = [key for key in values if _is_parallelism(key) and key.startswith(kind)]
        sizes = {key: reading.whole_number(key) for key in keys}
        for key, size in sizes.items():
            if size is not None and size != -1 and size < 1:
                reading.refuse(key, "expected a number of devices, or -1")
                sizes[key] = None
        if None in sizes.values():
            continue
        axes = [f"{kind}_{axis}_parallelism" for axis in _AXES]
        for key, size in sizes.items():
            if key not in axes and size != 1:
                reason = "the recipe's mesh is data × fsdp × tensor; docs/partitioning.md has more"
                reading.refuse(key, reason)
        shape = [sizes.get(key) or 1 for key in axes]
        if -1 in shape:
            filling = axes[shape.index(-1)]
            total = devices_per_slice if kind == "ici" else reading.whole_number("num_slices", 1)
            total = 1 if kind == "dcn" and total == -1 else total
            rest = math.prod(size for size in shape if size != -1)
            if total is None or total < rest or total % rest or shape.count(-1) > 1:
                reason = "how many devices has a slice? Say --devices_per_slice=N"
                reading.refuse(filling, reason)
                continue
            shape[shape.index(-1)] = total // rest
        if sizes and (kind == "ici" or math.prod(shape) > 1):
            meshes[field] = shape
    return meshes, reading.leftovers


def _recipes(values: Mapping[str, Any]) -> list[str]:
    data = data_recipe(values) or "C4"
    # The only block of MaxText's that ties the embedding by default is that of GPT-3.
    is_tied = values.get("logits_via_embedding", values.get("decoder_block") in (None, "gpt3"))
    return ["AdamWCosine", "Spmd", data, "LmExperiment" if is_tied else "LlamaDecoder"]


def _in_order(fields: Mapping[str, Any]) -> dict[str, Any]:
    first = [*_SCALED, "DIMS_PER_HEAD", "VOCAB_SIZE", "MAX_SEQ_LEN", "PERCORE_BATCH_SIZE"]
    names = [name for name in first if name in fields]
    return {name: fields[name] for name in [*names, *(n for n in fields if n not in names)]}


def _remarks(values: Mapping[str, Any]) -> list[str]:
    remarks = []
    if "decoder_block" not in values:
        remarks.append(
            "decoder_block was not given: norm, positions and activation are the recipe's"
        )
    if data_recipe(values) not in (None, "SyntheticTokens"):
        remarks.append("VOCAB_PATH and TFDS_DATA_DIR say where vocabulary and data lie")
    return remarks
