"""A tiny language model on the bytes of a few lines, one line a row."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import optax

from layerkit.config import Config, Partial, instance_field
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import SampleDecoder
from layerkit.layers import RotaryPositionalEmbedding
from layerkit.models import BertModel, LanguageModel, TransformerLm
from layerkit_inputs import ByteTokenizer
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.packing.model_features import lm_features, prompt_features
from layerkit_runner import BaseExperiment, Learner, Observer, SingleTask, TrainHParams

LINES = ("import os", "def f(x):", "return x", "x = f(1)", "import re", "pass", "é = 2", "y")
PROMPTS = ("im", "def ", "re")


class Lines(IndexedInput):
    """Row n is line n."""

    tokenizer: Any = instance_field(ByteTokenizer)

    def _num_rows(self) -> int:
        return len(LINES)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        ids = [self.tokenizer.encode(LINES[row]) for row in rows]
        return lm_features(None, ids, length=16, bos_id=self.tokenizer.start_id)


class PromptLines(IndexedInput):
    """Row n is prompt n."""

    def _num_rows(self) -> int:
        return len(PROMPTS)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        tokenizer = ByteTokenizer()
        ids = [tokenizer.encode(PROMPTS[row]) for row in rows]
        return prompt_features(ids, length=8, bos_id=tokenizer.start_id)

    def ids_to_strings(self, ids: Any, lengths: Any, key: str | None = None) -> list[str]:
        return [ByteTokenizer().decode(row[:n]) for row, n in zip(ids, lengths, strict=True)]


class Interrupter(Observer):
    """An observer that presses Ctrl-C after a step."""

    in_background = False
    optional = False

    def __init__(self, step: int) -> None:
        self._step = step

    def progress(self, step: int) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGINT)


class LinesLm(BaseExperiment):
    """A causal model of one layer."""

    MAX_STEPS: int = 4
    LEARNING_RATE: float = 0.05
    INTERRUPTED_AFTER: int | None = None

    def model(self) -> Config:
        network = TransformerLm.HParams.config(
            vocab_size=259, model_dims=16, hidden_dims=32, num_layers=1, num_heads=2
        )
        attention = network.stack_tpl.layer_tpl.attention_tpl
        attention.rotary_tpl = RotaryPositionalEmbedding.HParams.config()
        decoder = SampleDecoder.HParams.config(max_decode_steps=6, temperature=0.0, eos_id=2)
        return LanguageModel.HParams.config(lm_tpl=network, decoder=decoder)

    def task(self) -> Config:
        learner = Learner.HParams.config(
            optimizer=Partial(optax.adam), learning_rate=self.LEARNING_RATE
        )
        train = TrainHParams.HParams.config(
            learner=learner,
            num_train_steps=self.MAX_STEPS,
            save_interval_steps=100,
            summary_interval_steps=1,
            max_inflight_steps=1,
        )
        return SingleTask.HParams.config(model=self.model(), train=train)

    def datasets(self) -> list[Config]:
        return [
            Lines.HParams.config(name="train", batch_size=8, is_training=True),
            Lines.HParams.config(name="heldout", batch_size=8),
        ]

    def decode_datasets(self) -> list[Config]:
        return [PromptLines.HParams.config(name="prompts", batch_size=8)]

    def observers(self) -> list[Config]:
        if self.INTERRUPTED_AFTER is None:
            return []
        return [Config(Interrupter, step=self.INTERRUPTED_AFTER)]


class MaskedLm(LinesLm):
    """An encoder, which cannot continue texts."""

    def model(self) -> Config:
        network = LinesLm.model(self).lm_tpl.clone()
        return BertModel.HParams.config(lm_tpl=network.set(is_causal=False))

    def decode_datasets(self) -> list[Config]:
        return []
