from __future__ import annotations

import pickle
import shlex

import pytest
from packaging.requirements import Requirement

from layerkit.errors import ConfigError, hub_hint, near_names, pip_install


def test_message_holds_every_part_in_order(raises):
    with raises(ConfigError, owner="task", field="learner.rate", value=-1, choices=()):
        raise ConfigError(
            "cannot train",
            owner="task",
            field="learner.rate",
            value=-1,
            expected="a number above 0",
            hint="Leave it out for 0.1.",
        )


def test_message_follows_attributes_that_a_caller_completes():
    error = ConfigError(field="rate", value=2, expected="a number in [0, 1)")
    error.owner, error.field = "task", "learner.rate"
    assert str(error) == "task: learner.rate=2. Expected a number in [0, 1)."


def test_pickled_error_keeps_its_data():
    error = ConfigError(field="rate", value=2, choices=("a", "b"), hint="Choose one")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), vars(copy), str(copy)) == (ConfigError, vars(error), str(error))


@pytest.mark.parametrize(
    ("name", "valid", "expected"),
    [
        ("NUM-Layers", ["num_layers"], "; did you mean 'num_layers'?"),
        ("--mood", ["--mode", "--exp"], "; did you mean '--mode'?"),
        ("--x", ["--a", "--b"], ""),
        ("--ab", ["--cd"], ""),
        ("lm/norm/scale", ["lm/norm/bias", "lm/norm/scales"], "; did you mean 'lm/norm/scales'?"),
        ("/data/runs/of/a/long/path/x", ["/data/runs/of/a/long/path/base"], ""),
        ("LR", ["TRAIN", "LEARNING_RATE"], "; did you mean 'LEARNING_RATE'?"),
        ("tensr", ["tensor", "sensor"], "; did you mean 'tensor'?"),
    ],
)
def test_near_names_ignores_case_dashes_and_shared_folders(name, valid, expected):
    assert near_names(name, valid) == expected


def test_command_for_an_extra_names_packages_of_an_index():
    # The package itself may be on no index.
    words = shlex.split(pip_install("layerkit", "hf"))
    assert words[:2] == ["pip", "install"]
    [requirement] = map(Requirement, words[2:])
    assert requirement.name == "safetensors" and "0.6.0" in requirement.specifier


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("meta-llama/Llama-3.2-1B", "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B"),
        ("https://huggingface.co/org/name", "hf download org/name --local-dir name"),
        ("gpt2", "hf download gpt2 --local-dir gpt2"),
        ("./org/name", None),
        ("/org/name", None),
        ("texts/a.txt", None),
        ("here/name", None),
        ("a/b/c", None),
        ("runs", None),
    ],
)
def test_missing_path_like_an_id_of_the_hub_has_the_command_to_download_it(
    path, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    hint = hub_hint(path)
    assert hint is None if command is None else f"`{command}`" in hint
