from __future__ import annotations

import pytest

from layerkit.errors import near_names


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
