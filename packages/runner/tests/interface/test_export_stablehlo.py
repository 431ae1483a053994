"""StableHLO export: a process that imports only JAX gets the same numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from layerkit.errors import UserError
from layerkit_runner import LoadedModel, TrainResult, cli
from layerkit_runner.run.export import export_stablehlo

DOCS = Path(__file__).resolve().parents[4] / "docs"
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHECKS = """
names = ("layerkit", "layerkit_runner", "flax", "safetensors", "orbax")
assert not [name for name in names if name in sys.modules]
logits = export.deserialize(bytearray(open(f"{folder}/logits.stablehlo", "rb").read()))
result = jax.jit(logits.call)(weights, ids, lengths)
np.savez(sys.argv[2], ids=ids, logits=result, new_ids=new_ids, new_lengths=new_lengths)
"""


@pytest.fixture(scope="module")
def served(run: TrainResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the command wrote."""
    pytest.importorskip("flatbuffers")
    pytest.importorskip("safetensors")
    folder = tmp_path_factory.mktemp("served")
    words = [f"--job_log_dir={run.job_log_dir}", f"--export_dir={folder}"]
    assert cli.main([*words, "--mode=export", "--export_format=stablehlo"]) == 0
    return folder


@pytest.mark.slow  # the next test has no process of its own
def test_documented_program_that_has_only_jax_gets_the_same_numbers(
    served: Path, model: LoadedModel, tmp_path: Path
):
    (program,) = CODE.findall((DOCS / "serving.md").read_text())
    script = tmp_path / "serve.py"
    # The exported function has fewer steps than that of the page.
    script.write_text(program.replace("np.full(rows, 16)", "np.full(rows, 6)") + CHECKS)
    output = tmp_path / "out.npz"
    command = [sys.executable, "-I", str(script), str(served), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = np.load(output)
    (ids,) = result["ids"]
    np.testing.assert_allclose(result["logits"][0], model.logits(ids), atol=1e-5)
    (expected,) = model.generate_ids([ids], max_new_tokens=6, temperature=0)
    assert result["new_ids"][0, len(ids) : result["new_lengths"][0]].tolist() == expected.tolist()


def test_baked_weights_need_no_file(model: LoadedModel, tmp_path: Path):
    pytest.importorskip("flatbuffers")
    from jax import export

    export_stablehlo(tmp_path, model.config, model.model, model.variables, bakes_weights=True)
    assert not (tmp_path / "weights.safetensors").exists()
    function = export.deserialize(bytearray((tmp_path / "logits.stablehlo").read_bytes()))
    ids = np.array([[1, 5, 9], [1, 7, 8]], np.int32)
    result = function.call(ids, np.array([3, 3], np.int32))
    np.testing.assert_allclose(result, model.logits(ids), atol=1e-5)


def test_model_without_next_tokens_cannot_be_exported(
    raises: Any, lines: ModuleType, tmp_path: Path
):
    pytest.importorskip("flatbuffers")
    config = lines.MaskedLm().model()
    with raises(UserError, field="--export_format"):
        export_stablehlo(tmp_path, config, config.Instantiate(), {})
