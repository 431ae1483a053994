"""The command line of the translation; the classes that it writes are experiments that run."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from layerkit_runner import cli
from layerkit_runner.tools.translate import __main__ as translate

KEYS = """
base_num_decoder_layers: 2
base_emb_dim: 16
base_mlp_dim: 32
base_num_query_heads: 2
base_num_kv_heads: 1
head_dim: 8
vocab_size: 64
max_target_length: 16
per_device_batch_size: 1
decoder_block: llama2
mlp_activations: [silu, linear]
dataset_type: synthetic
steps: 3
warmup_steps_fraction: 0.34
opt_type: adamw
ici_fsdp_parallelism: 1
"""
PAX = """
class Tiny(TransformerLmSpmdAdam, SyntheticDataset):
  '''Tiny "model" of Pax's.'''
  NUM_LAYERS = 2
  NUM_HEADS = 2
  DIMS_PER_HEAD = None
  MODEL_DIMS = 16
  HIDDEN_DIMS = MODEL_DIMS * 4
  VOCAB_SIZE = 64
  MAX_SEQ_LEN = 16
  PERCORE_BATCH_SIZE = 1
  ICI_MESH_SHAPE = [1, 1, 1]
"""


@pytest.fixture(scope="module", autouse=True)
def started_devices() -> None:
    """Start JAX, so that --mode=inspect does not fix the number of devices for later tests."""
    jax.devices()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with files of both frameworks."""
    (tmp_path / "model.yml").write_text(KEYS)
    (tmp_path / "theirs.py").write_text(PAX)
    (tmp_path / "latin.py").write_bytes(b'class Tiny:\n  """\xe9"""\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "name", "line"),
    [
        (["maxtext", "model.yml", "--name=Theirs"], "Theirs", "num_layers = 2"),
        (["pax", "theirs.py"], "Tiny", "num_layers = 2"),
        (
            ["maxtext", "model.yml", "rope_max_timescale=500_000", "--name=Llama3"],
            "Llama3",
            "stack_tpl.layer_tpl.attention_tpl.rotary_tpl.max_timescale = 500000.0",
        ),
    ],
)
def test_the_class_is_an_experiment(folder: Path, capsys, words, name, line):
    assert translate.main(words) == 0
    text, err = capsys.readouterr()
    assert err == ""
    module = f"translated_{name.lower()}"
    (folder / f"{module}.py").write_text(text)
    assert cli.main([f"--exp={module}.{name}", "--print_config"]) == 0
    assert f"task.model.lm_tpl.{line}\n" in capsys.readouterr().out


def test_skipped_classes_are_listed(folder: Path, capsys):
    registered = PAX.replace("class", "@experiment_registry.register\nclass", 1)
    heir = "\nclass Heir(Tiny):\n  NUM_LAYERS = 3\n"
    (folder / "theirs.py").write_text(registered + heir)
    assert translate.main(["pax", "theirs.py"]) == 0
    out, err = capsys.readouterr()
    assert "class Tiny(" in out and "class Heir(" not in out
    assert err == "translate: skipped: Heir; --class=NAME writes one\n"
    assert translate.main(["pax", "theirs.py", "--class=Heir", "--class=Tiny"]) == 0
    out, err = capsys.readouterr()
    assert "class Tiny(" in out and "class Heir(" in out and err == ""


def test_model_of_a_translated_class_can_be_built(folder: Path, capsys):
    assert translate.main(["maxtext", "model.yml", "--name=Built"]) == 0
    (folder / "translated_built.py").write_text(capsys.readouterr().out)
    words = ["--exp=translated_built.Built", "--mode=inspect", "--inspect=parameters"]
    assert cli.main(words) == 0
    assert "optimizer state" in capsys.readouterr().out


def test_leftovers_are_printed_and_are_comments_of_the_class(folder: Path, capsys):
    assert translate.main(["maxtext", "model.yml", "quantization=intmp", "ours=1"]) == 1
    text, err = capsys.readouterr()
    assert "    # NOT TRANSLATED quantization = 'intmp': QUANTIZATION is int8" in text
    assert "translate: FromMaxText: not translated: ours = 1: unknown key" in err


LLAMA = """
class Llama(TransformerLmSpmdAdam, SyntheticDataset):
  NUM_LAYERS = 2
  TRAINABLE_POSITION_EMB = True

  def task(self):
    return with_rms_norm(super().task())
"""


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["pax", "llama.py"], "Llama"),
        (["maxtext", "model.yml", "quantization=intmp"], "FromMaxText"),
    ],
)
def test_class_with_leftovers_does_not_run(folder: Path, capsys, words, name):
    (folder / "llama.py").write_text(LLAMA)
    assert translate.main(words) == 1
    text, err = capsys.readouterr()
    assert f"{name} is abstract" in err
    module = f"unsettled_{name.lower()}"
    (folder / f"{module}.py").write_text(text)
    for more in (["--job_log_dir=job"], ["--mode=plan"], ["--print_config"]):
        assert cli.main([f"--exp={module}.{name}", *more]) == 2
        assert "abstract" in capsys.readouterr().err
    assert not (folder / "job").exists()
    (folder / f"{module}_settled.py").write_text(text.replace(", abstract=True)", ")"))
    assert cli.main([f"--exp={module}_settled.{name}", "--print_config"]) == 0


@pytest.mark.parametrize(
    ("name", "bases", "fields"),
    [
        ("Listed", "TransformerLmSpmdAdam, SyntheticDataset", []),
        ("Repeated", "TransformerLmSpmdAdam, SyntheticDataset", ["USE_REPEATED_LAYER = True"]),
        (
            "Pipelined",
            "TransformerLmSpmdPipelineAdam, SyntheticDataset",
            ["NUM_STAGES = 1", "NUM_MICROBATCHES = 1", "ICI_MESH_SHAPE = [1, 1, 1, 1]"],
        ),
    ],
)
def test_translated_class_has_additional_weights_of_pax(folder: Path, capsys, name, bases, fields):
    body = PAX.replace("TransformerLmSpmdAdam, SyntheticDataset", bases).replace(
        "Tiny(", f"{name}("
    )
    (folder / "theirs.py").write_text("".join([body, *(f"  {field}\n" for field in fields)]))
    translate.main(["pax", "theirs.py"])
    text = capsys.readouterr().out.replace(", abstract=True)", ")")
    (folder / f"learns_{name.lower()}.py").write_text(text)
    words = [f"--exp=learns_{name.lower()}.{name}", "--mode=inspect", "--inspect=parameters"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "attention/scale " in out and "lm/softmax/b " in out


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["maxtext", "missing.yml"], "'missing.yml'"),
        (["maxtext", "model.yml", "--name=my-class"], "--name='my-class'"),
        (["maxtext", "model.yml", "--defaults=latin.py"], "latin.py: "),
        (["maxtext", "mlp_activations=[silu"], "mlp_activations=[silu: "),
        (["maxtext", "1=2"], "'1=2'"),
        (["pax", "latin.py"], "latin.py: "),
        ([], "maxtext, pax"),
        (["maxtxt", "model.yml"], "'maxtext'"),
        (["pax"], "files=[]"),
        (["pax", "theirs.py", "--clas=Tiny"], "'--class'"),
    ],
)
def test_mistake_exits_with_2_and_prints_no_class(folder: Path, capsys, words, fact):
    assert translate.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and fact in err and "Traceback" not in err
