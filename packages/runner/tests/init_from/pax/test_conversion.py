"""A checkpoint of Paxml becomes one of this project, for the experiment that Pax calls the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath

from layerkit_runner.checkpointing import conversion, folders
from layerkit_runner.tools import checkpoints

EXPERIMENT = (
    "--exp=lm.lm_cloud.LmCloudSpmdTest",
    "--fdl.NUM_LAYERS=2",
    "--fdl.MODEL_DIMS=8",
    "--fdl.HIDDEN_DIMS=16",
    "--fdl.NUM_HEADS=2",
    "--fdl.DIMS_PER_HEAD=4",
    "--fdl.VOCAB_SIZE=32",
    "--fdl.MAX_SEQ_LEN=8",
)


def convert(source: Path, destination: Path, *more: str) -> int:
    words = ["convert", str(source), str(destination), "--from=pax"]
    return checkpoints.main([*words, *more])


def test_converted_checkpoint_holds_weights_moments_and_step_of_paxml(pax: Any, tmp_path: Path):
    source = pax.folder / "stacked_zarr"
    assert convert(source, tmp_path, "--to=tensorstore", *EXPERIMENT) == 0
    step_folder = folders.step_folder(epath.Path(tmp_path / "checkpoints"), pax.step)
    state = {"/".join(path): leaf for path, leaf in conversion.read_leaves(step_folder).items()}
    assert int(state["step"]) == pax.step

    def stored(name: str) -> np.ndarray:
        return pax.array("stacked_zarr", name)

    softmax = "params/lm/softmax/logits_ffn/linear/w"
    np.testing.assert_array_equal(state["params/lm/softmax/w"], stored(f"mdl_vars/{softmax}").T)
    # Praxis' second moment after 6 steps was divided by 1 - 0.99^6.
    np.testing.assert_allclose(
        state["opt_state/main/0/nu/lm/softmax/w"],
        stored(f"opt_states_0/no_prefix_2/v/{softmax}").T * (1 - 0.99**6),
        rtol=1e-5,
    )
    assert convert(source, tmp_path, "--to=tensorstore", *EXPERIMENT) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--to=msgpack"], "--exp"),
        (["--to=safetensors", *EXPERIMENT], "--to"),
        (["--to=msgpack", *EXPERIMENT, "--step=5"], "step=5"),
    ],
)
def test_wrong_conversion_is_an_error(
    pax: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
):
    assert convert(pax.folder / "stacked_zarr", tmp_path, *words) == 2
    assert expected in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
