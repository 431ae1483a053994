"""The report before the first step."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.layers import TransformerFeedForward, quantize_model
from layerkit_inputs import IndexedInput, LocalText, Prefetch
from layerkit_inputs.text.tokenizers import HuggingFaceTokenizer
from layerkit_runner.run.report.start_report import (
    LayerNotes,
    compiled_lines,
    input_lines,
    num_params,
)


def test_notes_of_layers_are_collected_once_and_not_propagated(caplog: pytest.LogCaptureFixture):
    # caplog listens at the root logger, as absl does once TensorFlow is imported.
    logger = logging.getLogger("layerkit.attention")
    with caplog.at_level(logging.INFO, "layerkit"):
        with LayerNotes() as notes:
            logger.info("attention backend: %s", "xla")
            logger.info("attention backend: xla")
            logger.warning("slow")
        assert notes.lines == ["attention backend: xla", "slow"]
        assert caplog.messages == []
        logger.info("afterwards")
    assert caplog.messages == ["afterwards"]


def test_notes_are_logged_if_tracing_fails(caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        with LayerNotes():
            logging.getLogger("layerkit.attention").warning("slow")
            raise ValueError("shapes do not fit")

    with pytest.raises(ValueError, match="shapes"):
        fail()
    assert caplog.messages == ["slow"]


@pytest.mark.parametrize(
    ("value", "become"), [("ids", "encoded as their ids"), ("text", "encoded as text")]
)
def test_special_tokens_in_text_are_reported_at_the_start(tmp_path: Path, value: str, become: str):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, "?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens(["<s>", "<|assistant|>"])
    (tmp_path / "model").mkdir()
    model.save(str(tmp_path / "model" / "tokenizer.json"))
    for name in ("a.txt", "val.txt"):
        (tmp_path / name).write_text("a a")
    tokenizer = HuggingFaceTokenizer(path=str(tmp_path / "model"), special_tokens_in_text=value)
    source = LocalText(
        batch_size=1, paths=[str(tmp_path / "*.txt")], tokenizer=tokenizer, is_training=True
    )
    _, line, ids = input_lines(Prefetch(source=source))
    for fact in ("<s>, <|assistant|>", become, f"special_tokens_in_text={value!r}"):
        assert fact in line
    assert ids == "text ids     start none, end none, padding 0"
    of_bytes = LocalText(batch_size=1, paths=[str(tmp_path / "*.txt")])
    only, ids, ends = input_lines(of_bytes, decoder_ids=(5,))
    assert only.startswith("input ")
    assert ids == "text ids     start BOS (1), end EOS (2), padding PAD (0)"
    assert ends.endswith("all of these end decoding: tokenizer 2; decoder 5")


class Doubles(IndexedInput):
    def _num_rows(self) -> int:
        return 4

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return NestedMap(x=rows / 2, y=rows.astype(np.float32))


def test_cast_of_float64_batches_is_reported_at_the_start():
    _, line = input_lines(Prefetch(source=Doubles(batch_size=2, is_training=True)))
    assert line == "cast         x: float64 → float32 (JAX_ENABLE_X64 is off)"


def test_temporary_memory_of_the_largest_step_is_reported():
    def compiled(size: int):
        # The product is sorted before the sum, so all of it is stored: 4 bytes for each number.
        step = jax.jit(lambda x: jnp.sort(x @ x.T, axis=None)[::2].sum())
        return step.lower(jnp.ones((size, 1))).compile()

    small, large = compiled(500), compiled(2000)
    (line,) = compiled_lines([large, small])
    size, unit = line.removeprefix("step memory").split()[:2]
    assert unit == "MB" and 16 <= float(size) < 100
    assert [*compiled_lines([small, large])] == [line] != [*compiled_lines([small])]
    assert line.endswith("of temporaries per device")
    assert not [*compiled_lines([])]


@pytest.mark.parametrize("weight_format", ["int8", "int4", "nf4:2"])
def test_weights_in_integers_count_as_those_in_floats(weight_format: str):
    config = TransformerFeedForward.HParams.config(input_dims=4, hidden_dims=8, has_bias=True)
    variables = config.Instantiate().init(jax.random.key(0))
    _, stored = quantize_model(config, variables, weight_format=weight_format)
    assert num_params(stored["params"]) == num_params(variables["params"]) == 2 * 4 * 8 + 4 + 8


def test_scales_of_weights_in_floats_count():
    weight = jnp.zeros((3, 2))
    assert num_params({"w": weight, "w_scale": weight, "other_scale": weight}) == 18
