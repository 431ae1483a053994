"""The whole configuration of every experiment, as text, and what `--list` tells of it.

The golden of one experiment of a folder is its whole text. The others begin with the name of
another experiment, the first of the module or else that one. The lines that differ from it follow;
`- PATH` is a path that they lack.

A golden changes only on purpose: look at the difference, then write them all anew with

    REWRITE_GOLDENS=1 python -m pytest -m '' packages/experiments/tests/test_goldens.py
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import layerkit_experiments
from layerkit_runner.config.config_tree import config_text
from layerkit_runner.config.registry import (
    CATALOGUE_FILE,
    entry_of,
    experiment_classes,
    list_experiments,
    read_catalogue,
)
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools.catalogue import (
    catalogue_file_text,
    catalogue_line,
    catalogue_lines,
    fields_without_value,
)

GOLDENS = Path(__file__).parent / "goldens"
PACKAGE = Path(layerkit_experiments.__file__).parent
REWRITE = bool(os.environ.get("REWRITE_GOLDENS"))
# Building the others takes longer than the ordinary run has.
SAMPLES = (
    "lm.c4_multislice.C4Spmd22BAdam2xv4_128",
    "lm.fine_tune.FineTune",
    "lm.fine_tune.FineTuneLora",
    "lm.quickstart.LocalText",
)
PREFIX = f"{layerkit_experiments.__name__}."


PACKAGE_NAME = layerkit_experiments.__name__
# Second names of a class, such as Pile5B, are listed and have no golden of their own.
LISTED = {name.removeprefix(PREFIX): cls for name, cls in experiment_classes(PACKAGE_NAME).items()}
EXPERIMENTS = {name: cls for name, cls in LISTED.items() if name.endswith(f".{cls.__name__}")}


@pytest.fixture
def hf_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder as Hugging Face writes it, without the weights, which only a run reads.

    In the current folder, so that goldens do not tell where that is.
    """
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    words = {"<s>": 0, "</s>": 1, "once": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    contents = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    return folder.name


@pytest.fixture
def chat_files() -> tuple[str, ...]:
    """Files of conversations, which only a run reads."""
    return ("chat.jsonl",)


@pytest.fixture
def teacher(hf_folder: str) -> str:
    """A folder with weights, since the files of a teacher tell its kind, and no tokenizer."""
    arrays = pytest.importorskip("safetensors.numpy")
    folder = Path(hf_folder).with_name("teacher")
    folder.mkdir()
    (folder / "config.json").write_text(Path(hf_folder, "config.json").read_text())
    arrays.save_file({f"w{i}": np.zeros(1, np.float32) for i in range(9)}, folder / "w.safetensors")
    return folder.name


@pytest.fixture
def whisper_folder(hf_folder: str) -> str:
    """A folder of a speech model without weights, with the tokenizer of `hf_folder`."""
    folder = Path(hf_folder).with_name("tiny-whisper")
    folder.mkdir()
    sizes = {"model_type": "whisper", "vocab_size": 16, "eos_token_id": 1, "max_length": 448}
    defaults = {"lang_to_id": {"<|en|>": 4}, "task_to_id": {"transcribe": 5}}
    defaults |= {"no_timestamps_token_id": 6, "suppress_tokens": [3]}
    (folder / "config.json").write_text(json.dumps(sizes))
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(Path(hf_folder, name).read_text())
    return folder.name


FIRST: dict[str, str] = {}
for listed, experiment in EXPERIMENTS.items():
    FIRST.setdefault(experiment.__module__, listed)
# The experiment of each folder whose golden is its whole text.
WHOLE = {
    "lm": "lm.quickstart.LocalText",
    "speech": "speech.digits.Digits",
    "time_series": "time_series.timesfm.TimesFM200M",
    "translation": "translation.wmt.TransformerBase",
    "vision": "vision.digits.Digits",
}


@functools.cache
def configuration(name: str, **fields: Any) -> str:
    return config_text(resolve(EXPERIMENTS[name](**fields)))


def differences(text: str, first: str) -> str:
    """The lines of `text` that `first` does not have, and the paths that only `first` has."""
    lines, known = text.splitlines(), first.splitlines()
    paths = {line.partition(" = ")[0] for line in lines}
    absent = [path for line in known if (path := line.partition(" = ")[0]) not in paths]
    own = set(known)
    changed = [line for line in lines if line not in own]
    return "".join(f"{line}\n" for line in (*changed, *(f"- {path}" for path in absent)))


def golden_text(name: str, value_of: Callable[[str], Any]) -> str:
    def text_of(name: str) -> str:
        # A field that has no value is given that of the fixture of its name.
        unset = fields_without_value(EXPERIMENTS[name])
        return configuration(name, **{field: value_of(field.lower()) for field in unset})

    text, first = text_of(name), FIRST[EXPERIMENTS[name].__module__]
    if name == (whole := WHOLE[name.partition(".")[0]]):
        return text
    if name == first:
        return f"differs from {whole}\n{differences(text, configuration(whole))}"
    return f"differs from {first}\n{differences(text, text_of(first))}"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_configuration_is_as_it_was(name: str, request: pytest.FixtureRequest):
    text = golden_text(name, request.getfixturevalue)
    golden = GOLDENS / f"{name}.txt"
    if REWRITE:
        GOLDENS.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.exists(), f"{name} has no golden yet; see the docstring of this file"
    assert text == golden.read_text()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_at_most_five_classes_are_behind_an_experiment(name: str):
    bases = [cls for cls in EXPERIMENTS[name].__mro__[1:] if cls is not object]
    assert len(bases) <= 5


def test_the_source_behind_an_experiment_is_short():
    # Bases, and the recipes that their methods call; a reader of DATA_FORMAT is looked up.
    parts: dict[Any, list[str]] = {}
    rest = [cls for cls in EXPERIMENTS["lm.llama.Llama7B"].__mro__ if cls is not object]
    while rest:
        part = rest.pop()
        if part in parts:
            continue
        parts[part] = inspect.getsourcelines(part)[0]
        values = [part] if inspect.isfunction(part) else vars(part).values()
        functions = [value for value in values if inspect.isfunction(value)]
        called = [f.__globals__.get(name) for f in functions for name in f.__code__.co_names]
        rest += [
            function
            for function in (*functions, *called)
            if inspect.isfunction(function)
            and function.__module__.startswith(PREFIX)
            and "." not in function.__qualname__
        ]
    assert len({part.__module__ for part in parts}) <= 4
    assert sum(map(len, parts.values())) <= 600


def test_every_golden_is_of_an_experiment():
    assert {path.stem for path in GOLDENS.glob("*.txt")} == set(EXPERIMENTS)


def test_command_line_lists_the_same_experiments():
    listed = {entry.dotted for entry in list_experiments() if entry.module.startswith(PREFIX)}
    assert {dotted.removeprefix(PREFIX) for dotted in listed} == set(LISTED)


def test_catalogue_has_every_experiment():
    if REWRITE:
        text = catalogue_file_text(catalogue_lines(PACKAGE_NAME))
        (PACKAGE / CATALOGUE_FILE).write_text(text)
    catalogue = read_catalogue(PACKAGE)
    assert catalogue is not None
    assert set(catalogue) == set(LISTED)
    assert (PACKAGE / CATALOGUE_FILE).read_text() == catalogue_file_text(catalogue)
    # What needs no built model is compared for all of them.
    for name, cls in LISTED.items():
        line = entry_of(cls, PREFIX + name, [PACKAGE_NAME]).line
        assert (catalogue[name].summary, catalogue[name].tags) == (line.summary, line.tags)


@pytest.mark.parametrize(
    "name",
    [
        name if name in SAMPLES else pytest.param(name, marks=pytest.mark.experiments)
        for name in EXPERIMENTS
    ],
)
def test_catalogue_line_is_that_of_the_built_model(name: str):
    catalogue = read_catalogue(PACKAGE)
    assert catalogue is not None
    assert catalogue[name] == catalogue_line(EXPERIMENTS[name], PREFIX + name, PACKAGE_NAME)
