"""Names and sizes of TPUs, as Google Cloud writes them.

`v4-128` and `v5p-128` count tensor cores, two to a chip, and a chip is one device of JAX;
`v5litepod-16` and `v6e-16` count chips of one core; `v2-8` and `v3-8` count cores, each a device.

Source: Google Cloud documentation, "TPU versions", "TPU runtime versions" and "TPUs in GKE".
"""

from __future__ import annotations

import dataclasses
import math
import re

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError


@dataclasses.dataclass(frozen=True)
class TpuGeneration:
    """What is alike in all slices of a generation.

    Attributes:
      name: In accelerator types, before the dash.
      counts_per_chip: By how much the number after the dash goes up with each chip.
      devices_per_chip: Of JAX.
      runtime_version: The image of its virtual machines.
      gke_accelerator: The label of its nodes in GKE; None where GKE has none.
      topology_dims: The length of its topologies.
      preset: The compiler flags for one slice.
    """

    name: str
    counts_per_chip: int
    devices_per_chip: int
    runtime_version: str
    gke_accelerator: str | None
    topology_dims: int
    preset: str | None = None


GENERATIONS = {
    generation.name: generation
    for generation in (
        TpuGeneration("v2", 2, 2, "tpu-ubuntu2204-base", None, 2),
        TpuGeneration("v3", 2, 2, "tpu-ubuntu2204-base", None, 2),
        TpuGeneration("v4", 2, 1, "tpu-ubuntu2204-base", "tpu-v4-podslice", 3),
        TpuGeneration("v5p", 2, 1, "v2-alpha-tpuv5", "tpu-v5p-slice", 3),
        TpuGeneration(
            "v5litepod",
            1,
            1,
            "v2-alpha-tpuv5-lite",
            "tpu-v5-lite-podslice",
            2,
            preset="tpu_v5e_collective_fusion",
        ),
        TpuGeneration("v6e", 1, 1, "v2-alpha-tpuv6e", "tpu-v6e-slice", 2, preset="tpu_v6e_dense"),
    )
}
_OTHER_NAMES = {"v5e": "v5litepod", "v5lite": "v5litepod"}

_MULTISLICE_PRESET = "tpu_multislice"


@dataclasses.dataclass(frozen=True)
class TpuSlice:
    """One slice: a generation and a number of chips."""

    generation: TpuGeneration
    num_chips: int

    @property
    def num_devices(self) -> int:
        """As JAX counts them."""
        return self.num_chips * self.generation.devices_per_chip

    @property
    def accelerator_type(self) -> str:
        """Its name for gcloud."""
        return f"{self.generation.name}-{self.num_chips * self.generation.counts_per_chip}"

    def preset(self, num_slices: int) -> str | None:
        """The compiler flags that are recommended for so many slices of this kind."""
        if num_slices > 1 and self.generation.name not in ("v2", "v3"):
            return _MULTISLICE_PRESET
        return self.generation.preset


def find_generation(name: str) -> TpuGeneration:
    """The generation of that name; `v5e` is `v5litepod`.

    Raises:
      UsageError: there is none.
    """
    found = GENERATIONS.get(_OTHER_NAMES.get(name, name))
    if found is None:
        raise UsageError(
            f"there is no TPU {name!r}{near_names(name, GENERATIONS)} It is one of"
            f" {', '.join(GENERATIONS)}."
        )
    return found


def parse_accelerator_type(text: str) -> TpuSlice:
    """Reads `v4-128`.

    Raises:
      UsageError: it is no such name.
    """
    match = re.fullmatch(r"(\w+)-(\d+)", text)
    if match is None:
        raise UsageError(f"--accelerator_type={text}: expected such as v4-128, v5p-128 or v6e-16")
    generation = find_generation(match[1])
    chips, rest = divmod(int(match[2]), generation.counts_per_chip)
    if rest or chips == 0:
        raise UsageError(
            f"--accelerator_type={text}: {generation.name} counts {generation.counts_per_chip}"
            " cores for each chip"
        )
    return TpuSlice(generation, chips)


def parse_topology(text: str, generation: TpuGeneration) -> TpuSlice:
    """Reads `4x4x8`.

    Raises:
      UsageError: it is no topology of this generation.
    """
    sides = text.split("x")
    is_topology = all(side.isdecimal() and int(side) > 0 for side in sides)
    if not is_topology or len(sides) != generation.topology_dims:
        example = "4x4x8" if generation.topology_dims == 3 else "4x8"
        raise UsageError(f"topologies of {generation.name} are written {example}, not {text!r}")
    return TpuSlice(generation, math.prod(int(side) for side in sides))
