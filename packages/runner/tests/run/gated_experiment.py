"""An experiment so small that a process of its own trains it in seconds, and that can wait.

With WAITS_FOR set, a training job does not read the batch after a checkpoint before the job beside
it has looked at that checkpoint, and with SECOND_WAITS_FOR there is a second held-out data set,
which waits for a file. So what happens at the same time happens in a known order.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Config, Partial
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import Linear
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_runner import BaseExperiment
from layerkit_runner.observers import Observer
from layerkit_runner.optim.learner import Learner
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams

SAVE_EVERY = 2
_TIMEOUT = 120.0


class Line(BaseModel):
    """½·(x·w − y)²; decoding repeats what was asked, as often as the weights say."""

    def setup(self) -> None:
        self.create_child("linear", Linear.HParams.config(input_dims=2, output_dims=1))

    def compute_predictions(self, batch: NestedMap) -> jax.Array:
        return self.linear(batch.x)[:, 0]

    def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        loss = jnp.mean(0.5 * jnp.square(predictions - batch.y))
        return {"loss": WeightedScalar.of(loss, len(batch.y))}, NestedMap()

    def decode(self, batch: NestedMap) -> NestedMap:
        ids = jnp.pad(batch.ids, ((0, 0), (0, 1)), constant_values=7)
        score = jnp.full((len(ids), 1), jnp.sum(self.linear(jnp.ones((1, 2)))))
        return NestedMap(ids=ids, lengths=batch.prompt_lengths + 1, log_probs=score)


class Points(IndexedInput):
    """Row n is x = (n mod 5, 1), y = n mod 3."""

    waits_for: str = ""

    def _num_rows(self) -> int:
        return 16

    def _next(self) -> NestedMap:
        step = self._rows_done // self.global_batch_size
        if self.waits_for and (not self.is_training or (step and step % SAVE_EVERY == 0)):
            _wait_for(Path(self.waits_for.format(step)))
        return super()._next()

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        x = np.stack([rows % 5, np.ones_like(rows)], axis=1).astype(np.float32)
        return NestedMap(x=x, y=(rows % 3).astype(np.float32))


class Prompts(IndexedInput):
    """Prompt n is the id n + 1."""

    def _num_rows(self) -> int:
        return 8

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        ids = (rows[:, None] + 1).astype(np.int32)
        return NestedMap(ids=ids, prompt_lengths=np.ones(len(rows), np.int32))

    def ids_to_strings(self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None):
        return ["".join(map(str, row[:n])) for row, n in zip(ids, lengths, strict=True)]


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.01)


class Gated(BaseExperiment):
    """Six steps, a checkpoint at every second."""

    MAX_STEPS: int = 6
    MAX_TO_KEEP: int | None = None
    # A path, with {} in place of the step.
    WAITS_FOR: str = ""
    SECOND_WAITS_FOR: str = ""

    def task(self) -> Config:
        train = TrainHParams.HParams.config(
            learner=Learner.HParams.config(optimizer=Partial(optax.adam), learning_rate=0.1),
            num_train_steps=self.MAX_STEPS,
            save_interval_steps=SAVE_EVERY,
            save_max_to_keep=self.MAX_TO_KEEP,
            eval_interval_steps=SAVE_EVERY,
            summary_interval_steps=1,
        )
        return SingleTask.HParams.config(name="line", model=Line.HParams.config(), train=train)

    def datasets(self) -> list[Config]:
        points = Points.HParams
        training = {"is_training": True, "waits_for": self.WAITS_FOR}
        second = points.config(name="second", batch_size=8, waits_for=self.SECOND_WAITS_FOR)
        return [
            points.config(name="train", batch_size=8, **training),
            points.config(name="heldout", batch_size=8),
            *([second] if self.SECOND_WAITS_FOR else []),
        ]

    def decode_datasets(self) -> list[Config]:
        return [Prompts.HParams.config(name="prompts", batch_size=8)]


class BlockedObserver(Observer):
    """Never returns from `close`."""

    close_timeout_secs = 3600.0

    def close(self) -> None:
        print("closing blocks", flush=True)
        threading.Event().wait()


class BlockedClose(Gated):
    """An observer that blocks when it is closed."""

    def observers(self) -> list[Config]:
        return [Config(BlockedObserver)]


class Endless(Line):
    """Decodes in a loop that never ends, and prints once the loop has begun."""

    def decode(self, batch: NestedMap) -> NestedMap:
        jax.debug.callback(lambda: print("decoding begins", flush=True))
        one = self.linear(jnp.ones((1, 2)))[0, 0]
        count = jax.lax.while_loop(
            lambda count: count > -1.0, lambda count: jnp.abs(jnp.sin(count)), jnp.abs(one)
        )
        return NestedMap(count=jnp.full(len(batch.ids), count))


class EndlessDecoding(Gated):
    """Two steps, and a decoding that does not end."""

    MAX_STEPS = 2

    def task(self) -> Config:
        return super().task().set(model=Endless.HParams.config())


class Doubling(Line):
    """Decodes twice the first number of each row."""

    def decode(self, batch: NestedMap) -> NestedMap:
        return NestedMap(twice=2 * batch.x[:, 0])


class Counting(BaseInput):
    """Rows 1 to 5 of host 0, and 101 to 103 of host 1, in batches of one number."""

    def _reset(self) -> None:
        self._num_read = 0

    def _next(self) -> NestedMap:
        self._num_read = getattr(self, "_num_read", 0) + 1
        if self._num_read > (5, 3)[self.infeed_host_index]:
            raise StopIteration
        number = 100 * self.infeed_host_index + self._num_read
        return NestedMap(x=np.full((self.batch_size, 2), number, np.float32))


class UnmarkedRows(Gated):
    """Two steps, then the decoding."""

    MAX_STEPS = 2

    def task(self) -> Config:
        return super().task().set(model=Doubling.HParams.config())

    def decode_datasets(self) -> list[Config]:
        return [Counting.HParams.config(name="points", percore_batch_size=1.0)]
