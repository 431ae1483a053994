"""Checkpoints of Paxml that do not fit the model, or that are damaged."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath

from layerkit_runner.checkpointing import DamagedCheckpointError
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from.pax.paxml_folders import find, open_arrays
from layerkit_runner.init_from.pax.stored_pax import StoredPax

STATE = "checkpoints/checkpoint_00000006/state"
SCALE = "mdl_vars.params.lm.final_ln.scale"


def copied(pax: Any, case: str, tmp_path: Path) -> Path:
    """A copy of a recorded checkpoint that a test may change."""
    return Path(shutil.copytree(pax.folder / case, tmp_path / case))


def read_all(folder: Path) -> None:
    """Read every array of a checkpoint."""
    _, step_folder = find(epath.Path(folder)).choose(None)
    arrays = open_arrays(step_folder)
    for name, array in arrays.by_name.items():
        arrays.read(name, array)


@pytest.mark.parametrize("case", ["stacked_zarr", "stacked_ocdbt"])
@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/checkpoint_00000006"])
def test_job_checkpoints_and_step_of_paxml_are_found(pax: Any, case: str, place: str):
    actual = find(epath.Path(pax.folder / case / place))
    assert list(actual.steps) == [6]
    assert str(actual.directory) == str(pax.folder / case / "checkpoints")


def test_step_without_state_folder_is_read(pax: Any, tmp_path: Path):
    # Paxml before version 1.0 wrote the arrays into the step folder.
    shutil.copytree(pax.folder / "stacked_zarr" / STATE, tmp_path / "checkpoint_00000006")
    actual = find(epath.Path(tmp_path))
    assert open_arrays(actual.steps[6]).specs[SCALE.replace(".", "/")].shape == (8,)


def test_step_that_paxml_did_not_save_is_an_error(raises, pax: Any):
    with raises(UsageError, field="step", value=7, choices=(6,)):
        pax.plan("stacked_zarr", step=7)


def test_differences_name_weights_and_shapes_of_both_sides(pax: Any):
    edit = {
        "lm_tpl.vocab_size": 40,
        "lm_tpl.softmax_tpl.use_bias": False,
        "lm_tpl.stack_tpl.layer_tpl.attention_tpl.use_bias": True,
    }
    with pytest.raises(UsageError) as caught:
        pax.plan("stacked_zarr", edit=edit)
    text, label = str(caught.value), f"{pax.folder}/stacked_zarr/checkpoints:6"
    for line in (
        f"lm/softmax/w: float32[40, 8] here, but float32[32, 8] in {label}",
        f"lm/softmax/logits_ffn/bias/b float32[32]: in {label}, not in the model",
        f"lm/stack/repeat/sub/attention/query/b float32[2, 2, 4]: not in {label}",
        "Draw weights with --init_draw=PATTERN",
    ):
        assert line in text


def test_layers_that_the_checkpoint_lacks_are_drawn_or_named(pax: Any):
    with pytest.raises(UsageError, match=r"stack/layers_2/attention/query/w .*: not in "):
        pax.plan("stacked_zarr", "unstacked", num_layers=3)
    state = pax.plan("stacked_zarr", "unstacked", num_layers=3, draw=[r".*/layers_2/.*"])().state
    stacked = pax.plan("stacked_zarr")().state
    stored, read = (x.params["lm"]["stack"] for x in (stacked, state))
    up = stored["repeat"]["sub"]["feed_forward"]["up"]["w"][1]
    np.testing.assert_array_equal(read["layers_1"]["feed_forward"]["up"]["w"], up)


@pytest.mark.parametrize("kept", [0, 100, 5_000, 20_000])
def test_truncated_msgpack_file_is_an_error(pax: Any, tmp_path: Path, kept: int):
    folder = copied(pax, "unstacked_flax", tmp_path)
    (path,) = folder.glob("checkpoints/checkpoint_6/state/checkpoint")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DamagedCheckpointError, match="incomplete input") as caught:
        read_all(folder)
    assert caught.value.value == str(path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (".zarray", b"{", "Invalid JSON"),
        ("0", b"no frame", "ZSTD"),
        ("0", None, "cannot be read"),
    ],
)
def test_damaged_zarr_array_is_an_error(
    pax: Any, tmp_path: Path, name: str, content: bytes | None, reason: str
):
    folder = copied(pax, "stacked_zarr", tmp_path)
    path = folder / STATE / SCALE / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=reason) as caught:
        read_all(folder)
    assert caught.value.value == SCALE.replace(".", "/")


def test_array_that_claims_a_huge_shape_is_an_error_before_memory_is_allocated(
    pax: Any, tmp_path: Path
):
    folder = copied(pax, "stacked_zarr", tmp_path)
    path = folder / STATE / SCALE / ".zarray"
    metadata = json.loads(path.read_text()) | {"shape": [2**40], "chunks": [2**40]}
    path.write_text(json.dumps(metadata))
    with pytest.raises(UsageError, match=re.escape("float32[8] here, but float32[1099511627776]")):
        pax.plan(folder)


def test_value_that_is_not_finite_is_an_error(pax: Any, tmp_path: Path):
    import tensorstore as ts

    folder = copied(pax, "stacked_zarr", tmp_path)
    kvstore = f"file://{folder / STATE / SCALE}/"
    array = ts.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()
    array[3] = np.nan
    read = pax.plan(folder)
    with pytest.raises(DamagedCheckpointError, match="finite") as caught:
        read()
    assert caught.value.value == SCALE.replace(".", "/")


def test_padding_of_uneven_axes_is_not_read(pax: Any, tmp_path: Path):
    folder = copied(pax, "stacked_zarr", tmp_path)
    step_folder = folder / "checkpoints" / "checkpoint_00000006"
    path = step_folder / "metadata" / "metadata"
    metadata = json.loads(path.read_text())
    params = metadata["train_state_metadata"]["mdl_vars"]["params"]
    params["lm"]["final_ln"]["scale"]["unpadded_shape"] = [7]
    path.write_text(json.dumps(metadata))
    stored = StoredPax(epath.Path(step_folder), step=6, like={})
    assert stored.leaves["params", "lm", "final_ln", "scale"].shape == (7,)
    assert stored.leaves["params", "lm", "final_ln", "bias"].shape == (8,)
