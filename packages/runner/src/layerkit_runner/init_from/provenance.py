"""The record of where each first value came from: `initial_values.json` in the folder of a job.

It is written on a fresh start, since a run that goes on begins from its own checkpoint and keeps
the record it has.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping

from etils import epath

from layerkit.errors import first_names
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.training.train_state import TrainState

RECORD = "initial_values.json"
RANDOM_INIT = "random_init"
_COPY = "copy_of:"


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where first values came from.

    Attributes:
      weights: By name: `DIR:STEP:PATH`, a Hugging Face folder's `DIR:PATH`, `copy_of:PATH` of
        another weight of the model, or `random_init`.
      opt_state: The same of those values of the optimizer that were read.
      step: `DIR:STEP` where the run counts on from there; None where it counts from 0.
      converted: Weights whose dtype differs from the stored one, by `float32 → bfloat16`.
      num_opt_state: How many values the optimizer has.
      hugging_face: The first Hugging Face folder of which weights were taken, where there is one;
        an export takes its tokenizer.
    """

    weights: Mapping[str, str]
    opt_state: Mapping[str, str] = dataclasses.field(default_factory=dict)
    step: str | None = None
    converted: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    num_opt_state: int = 0
    hugging_face: str | None = None

    def lines(self) -> Iterator[str]:
        """What the start report says of it."""
        sources = collections.Counter(
            origin.rpartition(":")[0] or origin
            for origin in self.weights.values()
            if origin != RANDOM_INIT and not origin.startswith(_COPY)
        )
        counts = [f"{_weights(count)} from {source}" for source, count in sources.items()]
        drawn = [name for name, origin in self.weights.items() if origin == RANDOM_INIT]
        if drawn:
            counts.append(f"{len(drawn)} drawn ({first_names(drawn, limit=3)})")
        counts += self._copies()
        yield f"init from    {'; '.join(counts)}"
        for dtypes, names in self.converted.items():
            count = len(names)
            yield f"             {dtypes}: {count} value{'' if count == 1 else 's'} converted"
        if self.opt_state:
            read, total = len(self.opt_state), self.num_opt_state
            rest = "; the others begin anew" if read < total else ""
            yield f"             {read} of {total} values of the optimizer{rest}"
        if self.step is not None:
            yield f"             counts on from the step of {self.step}"

    def _copies(self) -> Iterator[str]:
        """What the start report says of copies: `8 copied (reference_lm from lm)`."""
        children = collections.Counter(
            (name.partition("/")[0], origin.removeprefix(_COPY).partition("/")[0])
            for name, origin in self.weights.items()
            if origin.startswith(_COPY)
        )
        for (copy, original), count in children.items():
            yield f"{count} copied ({copy} from {original})"

    def write(self, directory: epath.Path) -> None:
        """Writes the record into the folder of a job."""
        record = {
            "weights": self.weights,
            "opt_state": self.opt_state,
            "step": self.step,
            "hugging_face": self.hugging_face,
        }
        atomic_write(directory / RECORD, json.dumps(record, indent=2) + "\n")


@dataclasses.dataclass(frozen=True)
class FirstState:
    """The state that a run starts from.

    Attributes:
      state: State on the devices.
      step: Number of completed steps.
      provenance: Record of where first values came from; None if all are drawn or restored.
      is_restored: Whether the state comes from a checkpoint that is resumed.
    """

    state: TrainState
    step: int = 0
    provenance: Provenance | None = None
    is_restored: bool = False


def copy_of(name: str) -> str:
    """Return the origin of a weight that starts as a copy of another weight of the model."""
    return f"{_COPY}{name}"


def recorded_hugging_face(directory: epath.Path) -> str | None:
    """The Hugging Face folder that the weights of a job began from; None where there was none."""
    try:
        return json.loads((directory / RECORD).read_text()).get("hugging_face")
    except FileNotFoundError:
        return None


def _weights(count: int) -> str:
    return "1 weight" if count == 1 else f"{count} weights"
