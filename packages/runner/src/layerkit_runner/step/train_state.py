"""TrainState, which a step changes and a checkpoint holds, and the first state of a run.

A fresh start records the origin of each initial value in `initial_values.json` of the job folder. A
resumed run keeps the existing record.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from etils import epath
from flax import struct

from layerkit.errors import first_names
from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write, read_regular
from layerkit_runner.optim.optimizer_updates import is_schedule_free

# Fields of a state that evaluation and decoding do not need; see `TrainState.for_inference`.
TRAINING_ONLY = ("opt_state", "spikes")
OPTIMIZER_FIELDS = ("opt_state", "ema", "ema_statistics")
"""Fields of a state that only the update reads, of all that a training step computes."""

RECORD = "initial_values.json"
RANDOM_INIT = "random_init"
# Starts of the origins of a copy of another weight, and of a value of PEFT adapters.
COPY_OF = "copy_of:"
ADAPTERS = "adapters of "


class TrainState(struct.PyTreeNode):
    """The state of one training run.

    Random keys are not part of it. They are folded from the experiment's seed and `step`, so a
    resumed run draws the same numbers as an uninterrupted one.

    Attributes:
      step: Number of completed steps, int32 scalar.
      overwrite_with_gradient: Variables of the model whose gradient is their next value, such as
        the scales of fp8 products.
      ema: Exponential moving averages of the trained weights, in float32; empty if the learner
        keeps none, as are the next two.
      ema_statistics: Averages of `non_trainable`, likewise.
      ema_count: Number of updates in the averages, int32 scalar.
      spikes: Statistics of applied steps, a `SpikeWindow`; empty without `learner.on_spike`.
    """

    step: jax.Array
    params: Any
    non_trainable: Any
    opt_state: Any
    overwrite_with_gradient: Any = dataclasses.field(default_factory=dict)
    ema: Any = dataclasses.field(default_factory=dict)
    ema_statistics: Any = dataclasses.field(default_factory=dict)
    ema_count: Any = dataclasses.field(default_factory=dict)
    spikes: Any = dataclasses.field(default_factory=dict)

    def for_inference(self) -> TrainState:
        """Return the state without `TRAINING_ONLY`, unless evaluation needs it."""
        if is_schedule_free(self.opt_state):
            return self
        return self.replace(**dict.fromkeys(TRAINING_ONLY, ()))


def batch_spec(
    leaf: Any, *, rows: int, sharding: jax.sharding.Sharding | None = None
) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype on the devices of an array `[host_rows, …]` of a batch."""
    # JAX stores 64-bit values of the host in 32 bits, unless `jax_enable_x64` is set.
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), dtype, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Origins of initial values.

    Attributes:
      weights: Origin of each weight, by path: `DIR:STEP:PATH`, `DIR:PATH` in a Hugging Face folder,
        `copy_of:PATH` for a copy of another weight, or `random_init`.
      opt_state: Origin of each value of the optimizer state that was read, by path.
      step: `DIR:STEP` from which the step count continues; None if it starts at 0.
      converted: Paths of the converted values, by conversion such as `float32 → bfloat16`.
      num_opt_state: Number of values in the optimizer state.
      hugging_face: First Hugging Face folder, also of a chain of jobs, whose tokenizer an export
        copies.
    """

    weights: Mapping[str, str]
    opt_state: Mapping[str, str] = dataclasses.field(default_factory=dict)
    step: str | None = None
    converted: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    num_opt_state: int = 0
    hugging_face: str | None = None

    def lines(self) -> Iterator[str]:
        """Yield the lines of the start report."""
        sources = collections.Counter(
            origin.rpartition(":")[0] or origin
            for origin in self.weights.values()
            if origin != RANDOM_INIT and not origin.startswith(COPY_OF)
        )
        counts = [
            f"{count} weight{'' if count == 1 else 's'} from {source}"
            for source, count in sources.items()
        ]
        drawn = [name for name, origin in self.weights.items() if origin == RANDOM_INIT]
        if drawn:
            counts.append(f"{len(drawn)} initialized randomly ({first_names(drawn, limit=3)})")
        copies = collections.Counter(
            (name.partition("/")[0], origin.removeprefix(COPY_OF).partition("/")[0])
            for name, origin in self.weights.items()
            if origin.startswith(COPY_OF)
        )
        counts += [
            f"{count} copied ({copy} from {original})" for (copy, original), count in copies.items()
        ]
        yield f"init from    {'; '.join(counts)}"
        for dtypes, names in self.converted.items():
            count = len(names)
            yield f"             {dtypes}: {count} value{'' if count == 1 else 's'} converted"
        if self.opt_state:
            read, total = len(self.opt_state), self.num_opt_state
            rest = "; the others are initialized" if read < total else ""
            yield f"             {read} of {total} values of the optimizer state{rest}"
        if self.step is not None:
            yield f"             step count continues from {self.step}"

    def write(self, directory: epath.Path) -> None:
        """Write the record into a job folder."""
        record = {
            "weights": self.weights,
            "opt_state": self.opt_state,
            "step": self.step,
            "hugging_face": self.hugging_face,
        }
        atomic_write(directory / RECORD, json.dumps(record, indent=2) + "\n")


@dataclasses.dataclass(frozen=True)
class FirstState:
    """The state with which a run starts.

    `provenance` is None if all values are initialized randomly, or all restored. A restored state
    comes from the folder `restored_from`, with its input states; a resumed one has metadata too.
    """

    state: TrainState
    step: int = 0
    provenance: Provenance | None = None
    restored_from: str | None = None
    input_states: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def recorded_hugging_face(directory: epath.Path) -> str | None:
    """Return the Hugging Face folder that provided a job's initial weights; None if none did."""
    folder: str | None = _read_record(directory).get("hugging_face")
    return folder


def recorded_from_adapters(directory: epath.Path) -> list[str]:
    """Return the paths of a job's weights that adapters of PEFT provided."""
    weights = _read_record(directory).get("weights", {})
    return [name for name, origin in weights.items() if origin.startswith(ADAPTERS)]


def _read_record(directory: epath.Path) -> dict[str, Any]:
    """Return the record of the initial weights of a job; empty if there is none."""
    try:
        return {**json.loads(read_regular(directory / RECORD))}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"the file is damaged: {error}",
            owner=os.fspath(directory / RECORD),
            expected="the record of the initial weights, which a training run writes",
            hint="Restore it from a backup, or delete it to export without the folder.",
        ) from error
