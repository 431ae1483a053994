"""Pax's experiment classes as classes of ours.

A class is translated with all that it inherits: from classes of the same files, and from those of
Pax's own bases that `pax_fields.BASES` knows. What its `task()` sets is translated where a field
says it here, and told otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.translate import pax_fields
from layerkit_runner.tools.translate.pax_fields import BASES, PaxBase
from layerkit_runner.tools.translate.pax_settings import learnt_besides, with_settings
from layerkit_runner.tools.translate.pax_source import (
    CannotTellError,
    PaxClass,
    PaxSource,
    Symbol,
    read_source,
)
from layerkit_runner.tools.translate.pax_task import Setting, goes_on_from_base, settings_of
from layerkit_runner.tools.translate.values import (
    NotTranslatedError,
    number,
    whole_number,
    yes_or_no,
)
from layerkit_runner.tools.translate.written import Leftover, Translation, fields_of

_POSITIONS = {"USE_ROTARY_POSITION_EMB": "rotary", "TRAINABLE_POSITION_EMB": "trainable"}
_SCHEDULE_PARTS = {
    "WARMUP": "WARMUP_STEPS",
    "DECAY_START": "DECAY_START",
    "DECAY_END": "DECAY_END",
    "MIN_RATIO": "MIN_LEARNING_RATE_RATIO",
}
_OWN_TASK = "it makes a task without super().task(); fields of its bases are taken over"
_OTHER_METHOD = "a method; recipes of data and partitioners are listed in docs/experiments.md"
_PROGRAMS = "write it anew; what programs and executors look like here is in docs/programs.md"
_METHODS = dict.fromkeys(
    ("train_programs", "eval_programs", "decode_programs", "executor"), _PROGRAMS
)
_OTHER_DATA = "C4"
_UNKNOWN_DATA = f"no recipe is known for its data; put one in place of {_OTHER_DATA}"
_UNKNOWN_BASE = "give the file that has it as well, or write what it sets"


def translate_pax(texts: Mapping[str, str], names: list[str] | None = None) -> list[Translation]:
    """Return the experiments that classes of Pax files describe.

    Args:
      texts: The files, by their names.
      names: Of classes; None for those that are registered, or where none is, for all that no
        other class of the files inherits.

    Raises:
      UsageError: A file is no Python or too deeply nested, or has no such class, or there is none
        at all.
    """
    try:
        return _translations(texts, names)
    except RecursionError:
        raise UsageError(
            f"{', '.join(texts)}: expected expressions that are less deeply nested."
        ) from None


def _translations(texts: Mapping[str, str], names: list[str] | None) -> list[Translation]:
    source = read_source(texts)
    if not source.classes:
        raise UsageError(f"there is no class in {', '.join(texts)}")
    names = source.experiments() if names is None else names
    for name in names:
        if name not in source.classes:
            raise UsageError(
                f"there is no class {name!r} in {', '.join(texts)}"
                f"{near_names(name, source.classes)}"
            )
    return [_translate(source, name) for name in names]


def other_classes(texts: Mapping[str, str]) -> list[str]:
    """Those that `translate_pax` leaves out where no names are given."""
    source = read_source(texts)
    experiments = source.experiments()
    return [name for name in source.classes if name not in experiments]


def _translate(source: PaxSource, name: str) -> Translation:
    lineage, leftovers = _lineage(source, name)
    values: dict[str, Any] = {}
    for cls in reversed(lineage):
        values |= cls.fields
    pax, untold = _plain(values)
    leftovers += untold
    fields: dict[str, Any] = {}
    for field, value in pax.items():
        try:
            fields |= _field(field, value)
        except NotTranslatedError as error:
            leftovers.append(Leftover(field, _shown(value), str(error)))
    recipes, untold = _recipes(pax, lineage)
    leftovers += untold
    for compose in (_schedule, _composed):
        composed, untold = compose(pax)
        fields |= composed
        leftovers += untold
    is_language_model = any(base.is_language_model for base in _bases(lineage))
    settings, untold = _settings(
        source, lineage, {**pax_fields.UNSET, **values} if is_language_model else values
    )
    leftovers += untold
    fields, untold = with_settings(settings, fields)
    leftovers += untold
    leftovers += _optimizer_leftovers(fields, recipes, lineage)
    return Translation(
        name=name,
        summary=source.classes[name].summary,
        fields=fields_of(_in_our_order(fields), recipes),
        recipes=recipes,
        leftovers=leftovers,
        settings=learnt_besides(settings) if is_language_model else {},
    )


def _lineage(source: PaxSource, name: str) -> tuple[list[PaxClass | PaxBase], list[Leftover]]:
    """The class and all its bases, in Python's order."""
    unknown: list[Leftover] = []
    made: dict[str, type] = {}
    found: dict[type, PaxClass | PaxBase] = {}

    def make(cls: str, heirs: tuple[str, ...]) -> type:
        # A class may have the name of the one that it inherits from Pax.
        is_of_pax = cls in heirs or cls not in source.classes
        key = f"{cls} of Pax" if is_of_pax else cls
        if key not in made:
            described = BASES.get(cls) if is_of_pax else source.classes[cls]
            if described is None:
                unknown.append(Leftover(f"base {cls}", "?", _UNKNOWN_BASE))
            names = () if described is None else described.bases
            bases = (make(base, (*heirs, cls)) for base in names if base != "object")
            made[key] = type(cls, tuple(bases), {})
            if described is not None:
                found[made[key]] = described
        return made[key]

    try:
        order = make(name, ()).__mro__
    except TypeError as error:
        raise UsageError(f"the bases of {name} are in no order: {error}") from error
    return [found[cls] for cls in order if cls in found], unknown


def _bases(lineage: list[PaxClass | PaxBase]) -> list[PaxBase]:
    return [cls for cls in lineage if isinstance(cls, PaxBase)]


def _plain(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Leftover]]:
    """Fields whose values the source tells, and the others."""
    plain: dict[str, Any] = {}
    leftovers: list[Leftover] = []
    for name, value in values.items():
        is_neutral = name in pax_fields.NEUTRAL
        if isinstance(value, CannotTellError):
            reason = value.reason
        elif isinstance(value, Symbol) and name not in pax_fields.NAMED_BY_SYMBOLS:
            reason = "it is no plain value"
        else:
            plain[name] = value
            continue
        if not is_neutral:
            leftovers.append(Leftover(name, _shown(value), reason))
    return plain, leftovers


def _field(name: str, value: Any) -> dict[str, Any]:
    if name in pax_fields.NEUTRAL or name in pax_fields.COMPOSED:
        return {}
    if name == "FPROP_DTYPE" and value not in pax_fields.DTYPES:
        raise NotTranslatedError(f"it is one of {', '.join(pax_fields.DTYPES)}")
    if name in pax_fields.SAME:
        return {name: pax_fields.SAME[name](value)}
    if name in pax_fields.RENAMED:
        field, read = pax_fields.RENAMED[name]
        return {field: read(value)}
    if name in pax_fields.ONLY:
        allowed, reason = pax_fields.ONLY[name]
        if value not in allowed:
            raise NotTranslatedError(reason)
        return {}
    raise NotTranslatedError("no field of this name is known; declare one where it is used")


def _composed(pax: Mapping[str, Any]) -> tuple[dict[str, Any], list[Leftover]]:
    fields: dict[str, Any] = {}
    leftovers = []
    if "ATTEN_LOGIT_CAP" in pax:  # a language model
        fields["POSITIONS"] = "sinusoidal"
        fields["SCALE_EMBEDDING"] = True
        fields["FEED_FORWARD_BIAS"] = True  # whatever USE_BIAS says, which is of attention
    dims, per_head = pax.get("MODEL_DIMS"), pax.get("DIMS_PER_HEAD")
    if pax.get("NUM_HEADS") is None and type(dims) is type(per_head) is int and per_head:
        fields["NUM_HEADS"] = dims // per_head
    for name, positions in _POSITIONS.items():
        try:
            if name in pax and yes_or_no(pax[name]):
                fields["POSITIONS"] = positions
        except NotTranslatedError as error:
            leftovers.append(Leftover(name, _shown(pax[name]), str(error)))
    policies = dict(pax_fields.CHECKPOINT_POLICIES)
    if not pax.get("USE_REPEATED_LAYER") and not pax.get("NUM_STAGES"):
        # Elsewhere Pax does not look at it.
        policies = dict.fromkeys([*policies, str(pax.get("CHECKPOINT_POLICY"))], "none")
    for name, field, table in (
        ("ACTIVATION_CLS", "ACTIVATION", pax_fields.ACTIVATIONS),
        ("CHECKPOINT_POLICY", "CHECKPOINT_POLICY", policies),
    ):
        value = pax.get(name)
        if isinstance(value, str) and value in table:
            fields[field] = table[value]
        elif value is not None:
            reason = f"{field} is one of {', '.join(sorted(set(table.values())))}"
            leftovers.append(Leftover(name, _shown(value), reason))
    return fields, leftovers


def _schedule(pax: Mapping[str, Any]) -> tuple[dict[str, Any], list[Leftover]]:
    kinds = {"linear_rampup_exponential_decay": "LRED", "linear_rampup_cosine_decay": "COS"}
    name = pax.get("LR_SCHEDULE")
    parts: dict[str, str] = {}
    fields: dict[str, Any] = {}
    leftovers: list[Leftover] = []
    if name is None:  # exponential, of which only the end can be chosen
        parts = {"DECAY_END": "DECAY_END"}
    elif isinstance(name, str) and name in kinds:
        parts = {f"LR_{kinds[name]}_{part}": field for part, field in _SCHEDULE_PARTS.items()}
        fields = {"DECAYED_WEIGHTS": "all"} if kinds[name] == "COS" else {}
    else:
        reason = f"recipes have {' and '.join(kinds)}"
        leftovers.append(Leftover("LR_SCHEDULE", _shown(name), reason))
    for part, field in parts.items():
        if part in pax:
            read = number if field.endswith("RATIO") else whole_number
            try:
                fields[field] = read(pax[part])
            except NotTranslatedError as error:
                leftovers.append(Leftover(part, _shown(pax[part]), str(error)))
    return fields, leftovers


def _recipes(
    pax: Mapping[str, Any], lineage: list[PaxClass | PaxBase]
) -> tuple[list[str], list[Leftover]]:
    is_cosine = pax.get("LR_SCHEDULE") == "linear_rampup_cosine_decay"
    # Pax's own files define these bases; their data are known, but not what reads them.
    described = [BASES.get(cls.name) if isinstance(cls, PaxClass) else cls for cls in lineage]
    known = [base.recipe for base in described if base is not None]
    given = [recipe for recipe in known if recipe is not None]
    partitioners = [recipe for recipe in given if recipe in ("Pipelined", "Pmap")]
    data = next((recipe for recipe in given if recipe not in partitioners), None)
    recipes = [
        "AdamWCosine" if is_cosine else "AdamExponential",
        partitioners[0] if partitioners else "Spmd",
        data or _OTHER_DATA,
        "LmExperiment",
    ]
    # A method of the files is left over as such.
    has_method = any(isinstance(cls, PaxClass) and "datasets" in cls.methods for cls in lineage)
    is_told = data is not None or has_method
    return recipes, [] if is_told else [Leftover("datasets()", "?", _UNKNOWN_DATA)]


def _optimizer_leftovers(
    fields: Mapping[str, Any], recipes: list[str], lineage: list[PaxClass | PaxBase]
) -> Iterator[Leftover]:
    known = (base.optimizer for base in _bases(lineage))
    optimizer = next((name for name in known if name is not None), "Adam")
    if optimizer != "Adam":
        reason = "no recipe has it; Adam is taken instead"
        yield Leftover("optimizer", optimizer, reason)
    cap = fields.get("UPDATE_RMS_CAP")
    if cap is not None and "AdamWCosine" in recipes:
        reason = "AdamWCosine bounds no updates; AdamExponential does"
        yield Leftover("ADAM_CLIP_THRESHOLD", repr(cap), reason)


def _settings(
    source: PaxSource, lineage: list[PaxClass | PaxBase], values: Mapping[str, Any]
) -> tuple[list[tuple[str, Setting]], list[Leftover]]:
    """What `task()` of each class sets, from the farthest base on; and its other methods."""
    settings: list[tuple[str, Setting]] = []
    leftovers: list[Leftover] = []
    for cls in (found for found in reversed(lineage) if isinstance(found, PaxClass)):
        for name, method in cls.methods.items():
            if name == "task":
                if not goes_on_from_base(method):
                    settings.clear()
                    leftovers.append(Leftover(f"{cls.name}.task()", "…", _OWN_TASK))
                settings += [(cls.name, one) for one in settings_of(method, source, values)]
                continue
            reason = _METHODS.get(name, _OTHER_METHOD)
            leftovers.append(Leftover(f"{cls.name}.{name}()", "…", reason))
    return settings, leftovers


def _in_our_order(fields: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in pax_fields.SAME if name in fields]
    return {name: fields[name] for name in [*names, *(n for n in fields if n not in names)]}


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, (Symbol, CannotTellError)) else repr(value)
