"""The command line of the translation; the classes that it writes are experiments that run."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from layerkit_runner import cli
from layerkit_runner.tools.translate import __main__ as translate

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
    """Return the working directory, with files of Pax."""
    (tmp_path / "theirs.py").write_text(PAX)
    (tmp_path / "latin.py").write_bytes(b'class Tiny:\n  """\xe9"""\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_class_is_an_experiment_whose_model_can_be_built(folder: Path, capsys):
    assert translate.main(["pax", "theirs.py"]) == 0
    text, err = capsys.readouterr()
    assert err == ""
    (folder / "translated.py").write_text(text)
    assert cli.main(["--exp=translated.Tiny", "--print_config"]) == 0
    assert "task.model.lm_tpl.num_layers = 2\n" in capsys.readouterr().out
    assert cli.main(["--exp=translated.Tiny", "--mode=inspect", "--inspect=parameters"]) == 0
    assert "optimizer state" in capsys.readouterr().out


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


LLAMA = """
class Llama(TransformerLmSpmdAdam, SyntheticDataset):
  NUM_LAYERS = 2
  TRAINABLE_POSITION_EMB = True

  def task(self):
    return with_rms_norm(super().task())
"""


def test_class_with_leftovers_does_not_run(folder: Path, capsys):
    (folder / "llama.py").write_text(LLAMA)
    assert translate.main(["pax", "llama.py"]) == 1
    text, err = capsys.readouterr()
    assert "    # NOT TRANSLATED " in text and "Llama is abstract" in err
    (folder / "unsettled.py").write_text(text)
    for more in (["--job_log_dir=job"], ["--mode=plan"], ["--print_config"]):
        assert cli.main(["--exp=unsettled.Llama", *more]) == 2
        assert "abstract" in capsys.readouterr().err
    assert not (folder / "job").exists()
    (folder / "settled.py").write_text(text.replace(", abstract=True)", ")"))
    assert cli.main(["--exp=settled.Llama", "--print_config"]) == 0


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
        (["pax", "latin.py"], "latin.py: "),
        ([], "pax"),
        (["paxx", "theirs.py"], "'pax'"),
        (["pax"], "files=[]"),
        (["pax", "theirs.py", "--clas=Tiny"], "'--class'"),
    ],
)
def test_mistake_exits_with_2_and_prints_no_class(folder: Path, capsys, words, fact):
    assert translate.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and fact in err and "Traceback" not in err
