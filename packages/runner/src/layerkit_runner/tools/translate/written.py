"""A translation, and how it is written: as a class, or as a command."""

from __future__ import annotations

import dataclasses
import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

# Where the recipes stand that a translated class inherits, in the order in which it names them.
RECIPE_MODULES = {
    "AdamExponential": "layerkit_experiments.lm.recipes.optimization",
    "AdamWCosine": "layerkit_experiments.lm.recipes.optimization",
    "Pmap": "layerkit_experiments.lm.recipes.parallelism",
    "Spmd": "layerkit_experiments.lm.recipes.parallelism",
    "Pipelined": "layerkit_experiments.lm.recipes.parallelism",
    "C4": "layerkit_experiments.lm.recipes.corpora",
    "ThePile": "layerkit_experiments.lm.recipes.corpora",
    "Lambada": "layerkit_experiments.lm.recipes.corpora",
    "SyntheticTokens": "layerkit_experiments.lm.recipes.data",
    "LlamaDecoder": "layerkit_experiments.lm.llama",
    "LmExperiment": "layerkit_experiments.lm.recipes.experiment",
}

# Fields that only some recipes have.
_FIELDS_OF = {
    "UPDATE_RMS_CAP": ("AdamExponential",),
    "DECAYED_WEIGHTS": ("AdamWCosine",),
    "PACKED_INPUT": ("C4", "ThePile", "Lambada"),
    "VOCAB_PATH": ("C4", "ThePile", "Lambada"),
    "ICI_MESH_SHAPE": ("Spmd", "Pipelined"),
    "DCN_MESH_SHAPE": ("Spmd", "Pipelined"),
}


_ABSTRACT = (
    "Abstract, because it is not the original yet: do what each NOT TRANSLATED line says or decide"
    " that it changes nothing, then remove abstract=True."
)


@dataclasses.dataclass(frozen=True)
class Leftover:
    """What has no counterpart, or none that is known.

    Attributes:
      name: As it is called there.
      value: Its text there.
      reason: Why, and what to do instead.
    """

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Translation:
    """What a configuration of another framework is here.

    Attributes:
      name: Of the class.
      summary: The first line of its docstring.
      fields: Our fields, with their values.
      recipes: What the class inherits, of `RECIPE_MODULES`.
      leftovers: What was not translated.
      remarks: What is good to know.
      settings: Values that no field says, by their paths from `task`.
    """

    name: str
    summary: str
    fields: Mapping[str, Any]
    recipes: Sequence[str]
    leftovers: Sequence[Leftover] = ()
    remarks: Sequence[str] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def modules_text(translations: Sequence[Translation], source: str) -> str:
    """A module with a class for each translation."""
    imports: dict[str, set[str]] = {}
    for translation in translations:
        for recipe in translation.recipes:
            imports.setdefault(RECIPE_MODULES[recipe], set()).add(recipe)
        if translation.settings:
            imports.setdefault("layerkit.config", set()).add("Config")
    lines = [f'"""Translated from {source}."""', "", "from __future__ import annotations", ""]
    lines += [f"from {name} import {', '.join(sorted(imports[name]))}" for name in sorted(imports)]
    return "\n".join(lines) + "\n\n\n" + "\n\n".join(map(class_text, translations))


def class_text(translation: Translation) -> str:
    """Return the class, with a comment for each thing that was left over.

    A class with anything left over is abstract: it would run, as another model than the original.
    """
    bases = [name for name in RECIPE_MODULES if name in translation.recipes]
    if translation.leftovers:
        bases.append("abstract=True")
    summary = translation.summary.replace("\\", "\\\\").replace('"', "'")
    lines = [f"class {translation.name}({', '.join(bases)}):", f'    """{summary}"""', ""]
    if translation.leftovers:
        lines += _comment(_ABSTRACT)
    for leftover in translation.leftovers:
        lines += _comment(f"NOT TRANSLATED {leftover}")
    for remark in translation.remarks:
        lines += _comment(remark)
    lines += [f"    {name} = {_source(value)}" for name, value in translation.fields.items()]
    if translation.settings:
        lines += ["", "    def task(self) -> Config:"]
        lines += [
            '        """The task, with what no field says."""',
            "        task = super().task()",
        ]
        lines += [
            f"        {path} = {_source(value)}" for path, value in translation.settings.items()
        ]
        lines += ["        return task"]
    return "\n".join(lines).rstrip() + "\n"


def command_text(translation: Translation, experiment: str) -> str:
    """The command that runs `experiment` with the translated fields."""
    words = [f"--exp={experiment}"]
    said = {**translation.fields, **translation.settings}
    words += [f"--fdl.{name}={_literal(value)}" for name, value in said.items()]
    return " \\\n  ".join(["runner", *map(shlex.quote, words), "--job_log_dir=DIR"])


def fields_of(fields: Mapping[str, Any], recipes: Sequence[str]) -> dict[str, Any]:
    """Those fields that the recipes have."""
    return {
        name: value
        for name, value in fields.items()
        if name not in _FIELDS_OF or any(recipe in recipes for recipe in _FIELDS_OF[name])
    }


def _source(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _literal(value: Any) -> str:
    # As people write it on a command line, where bare words are strings.
    return value if isinstance(value, str) else repr(value).replace(" ", "")


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        96,
        initial_indent="    # ",
        subsequent_indent="    # ",
        break_long_words=False,  # a flag can be copied
        break_on_hyphens=False,
    )
