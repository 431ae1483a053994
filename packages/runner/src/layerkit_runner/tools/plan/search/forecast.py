"""What changes of an experiment would take, by estimate: the order in which to try them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.nested_map import NestedMap
from layerkit.sharding import ShardingRules
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import Partitioner, SpmdPartitioner
from layerkit_runner.tools.plan.hardware import DeviceKind
from layerkit_runner.tools.plan.plan import BatchPlan, Plan
from layerkit_runner.tools.plan.search import changes
from layerkit_runner.tools.plan.search.assumed_speeds import assumed_speeds
from layerkit_runner.tools.plan.search.changes import Changes
from layerkit_runner.tools.plan.search.estimates import (
    Estimate,
    Estimator,
    Kept,
    kept_arrays,
    state_arrays,
)
from layerkit_runner.tools.plan.search.meshes import MeshShape, mesh_shapes, split_of_networks
from layerkit_runner.trainer.job import build_parts

# What a policy computes again, as a part of the forward pass; the later ones keep less.
RECOMPUTED = {
    "none": 0.0,
    "dots": 0.05,
    "dots_no_batch": 0.15,
    "projections": 0.7,
    "attention_out": 0.95,
    "full": 1.0,
}
_HANDED_ON = "full"
_FIELD = re.compile(r"(\w+)\[([\d, ]*)\]")


class Forecast:
    """Estimates of changes of one experiment, scaled by its plan.

    Attributes:
      resolved: The experiment as it is.
      plan: Of it, compiled.
      kind: Of the devices.
      speeds: Theirs, as far as they are known, and assumed ones for the rest.
      remat: Its policy of rematerialisation; None where it has none to choose.
      meshes: All that its devices can be arranged in; none where it has no mesh to choose.
    """

    def __init__(
        self,
        resolved: ResolvedExperiment,
        plan: Plan,
        devices: Sequence[jax.Device],
    ):
        """Policies are traced when they are first asked for; nothing is compiled.

        Args:
          resolved: The experiment, whose mesh fits the devices.
          plan: Of it.
          devices: What it was planned for.
        """
        assert plan.device is not None
        self.resolved = resolved
        self.plan = plan
        self.kind: DeviceKind = plan.device
        self.speeds = assumed_speeds(plan.device)
        partitioner, task = build_parts(resolved)
        self._devices = devices
        self._batch = abstract_batch(plan.batch)
        self._estimator = Estimator(
            state_arrays(task),
            _rules(partitioner),
            rows=plan.batch.rows,
            batch_bytes=sum(
                math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._batch)
            ),
            fprop_itemsize=jnp.dtype(
                getattr(task.model, "fprop_dtype", None) or "float32"
            ).itemsize,
        )
        self.remat: str | None = changes.current(resolved, changes.REMAT)
        self._kept: dict[str | None, list[Kept] | None] = {}
        self.meshes: list[MeshShape] = []
        self._axes = tuple(plan.mesh)
        self.own_mesh = MeshShape(tuple(plan.mesh.values()))
        if isinstance(partitioner, SpmdPartitioner):
            self._find_meshes(partitioner)
        self._transient = 0.0
        own = self.estimate({})
        self._transient = max(0.0, plan.memory.peak - own.peak_bytes)

    @property
    def policies(self) -> list[str]:
        """Those that the layers take, the experiment's own first."""
        names = [] if self.remat is None else dict.fromkeys([self.remat, *RECOMPUTED])
        return [name for name in names if self._kept_by(name) is not None]

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that a program can have."""
        if self.kind.usable_bytes is None:
            raise ValueError(f"nothing is known of the memory of {self.kind.name}")
        return self.kind.usable_bytes

    def has(self, peak: int) -> bool:
        """Whether a device has so many bytes."""
        return self.kind.usable_bytes is None or peak <= self.kind.usable_bytes

    def estimate(self, wanted: Changes) -> Estimate:
        """What a step takes after some changes.

        Raises:
          ValueError: the mesh does not divide the model or the batch.
        """
        sizes = self.mesh_sizes(self._mesh(wanted))
        kept = self._kept_by(wanted.get(changes.REMAT, self.remat)) or []
        if wanted.get(changes.SOFTMAX_CHUNK) is not None:
            kept = [each for each in kept if not self._estimator.is_logits(each)]
        before = changes.current(self.resolved, changes.ACCUMULATION) or 1
        parts = wanted.get(changes.ACCUMULATION, before)
        rows = wanted.get(changes.ROWS, self.plan.batch.rows_per_device) * self.plan.num_devices
        found = self._estimator.estimate(
            sizes,
            kept,
            self._kept_by(None if self.remat is None else _HANDED_ON) or [],
            share=rows / self.plan.batch.rows / parts,
        )
        state, gradients = found.state_bytes, found.gradient_bytes
        if changes.FIRST_MOMENT in wanted:
            state -= gradients // 2
        if parts > 1 and before == 1:
            gradients *= 2  # one more that they are added to
        # What the compiler needs besides goes with the rows of a device.
        share = self.plan.batch.num_shards / self._estimator.batch_shards(sizes)
        transient = self._transient * share * rows / self.plan.batch.rows / parts * before
        return dataclasses.replace(
            found,
            state_bytes=state,
            gradient_bytes=gradients,
            transient_bytes=round(transient),
        )

    def peak(self, wanted: Changes) -> int | None:
        """Its bytes per device; None where the changes do not fit together."""
        try:
            return self.estimate(wanted).peak_bytes
        except ValueError:
            return None

    def seconds(self, wanted: Changes) -> float:
        """The time of a step; of devices whose speed is not known, an order and no time.

        Raises:
          ValueError: the mesh does not divide the model or the batch.
        """
        kind, speeds, mesh = self.kind, self.speeds, self._mesh(wanted)
        fast, slow = split_of_networks(
            self.estimate(wanted).sent_bytes,
            mesh,
            self._axes,
            devices_per_node=kind.devices_per_host if kind.platform == "gpu" else None,
        )
        repeated = 1 + RECOMPUTED.get(wanted.get(changes.REMAT, self.remat) or "none", 1.0) / 3
        compute = self.plan.flops_per_device * repeated / speeds.peak_flops
        sending = fast / speeds.fast_bandwidth + slow / speeds.slow_bandwidth
        return compute + sending / 2

    def mesh_changes(self, mesh: MeshShape) -> dict[str, Any]:
        """The changes that arrange the devices so; none for the mesh that the experiment has."""
        wanted: dict[str, Any] = {}
        if mesh.ici != self.own_mesh.ici:
            wanted[changes.ICI_MESH] = list(mesh.ici)
        if mesh.dcn is not None and mesh.dcn != self.own_mesh.dcn:
            wanted[changes.DCN_MESH] = list(mesh.dcn)
        return wanted

    def mesh_sizes(self, mesh: MeshShape) -> dict[str, int]:
        """Its axes by name."""
        return mesh.sizes(self._axes)

    def axes_across(self, mesh: MeshShape) -> dict[str, int]:
        """Those of them that slices lie along, and how many slices along each."""
        return mesh.across(self._axes)

    def policies_that_keep_less(self) -> list[str]:
        """Those after the experiment's own, in the order in which they keep less."""
        order = list(RECOMPUTED)
        if self.remat not in order:
            return []
        after = order[order.index(self.remat) + 1 :]
        return [name for name in after if self._kept_by(name) is not None]

    def smaller_meshes(self, count: int) -> Iterator[tuple[Changes, dict[str, int]]]:
        """Meshes that take less memory than the experiment's own: those that are estimated to fit,
        or where none does the smallest, the fastest first."""
        own = self.peak({})
        found = []
        for position, mesh in enumerate(self.meshes):
            wanted = self.mesh_changes(mesh)
            peak = self.peak(wanted)
            if peak is not None and own is not None and peak < own:
                found.append((self.seconds(wanted), position, peak, wanted, mesh))
        fitting = [each for each in found if self.has(each[2])]
        chosen = sorted(fitting, key=lambda each: each[:2])[:count]
        if not fitting:
            chosen = sorted(found, key=lambda each: (-each[2], each[1]))[-count:]
        for _, _, _, wanted, mesh in chosen:
            yield wanted, self.mesh_sizes(mesh)

    def divides_pipelines(self, rows: int) -> bool:
        """Whether the microbatches of all pipelines divide so many rows."""
        return all(rows % each.num_microbatches == 0 for each in self.plan.pipelines)

    def _kept_by(self, policy: str | None) -> list[Kept] | None:
        """What the forward pass keeps; None where a layer refuses the policy."""
        if policy not in self._kept:
            try:
                self._kept[policy] = self._trace(policy)
            except (UsageError, ValueError):
                self._kept[policy] = None
        return self._kept[policy]

    def _trace(self, policy: str | None) -> list[Kept]:
        resolved = self.resolved
        if policy != self.remat:
            resolved = changes.changed(resolved, {changes.REMAT: policy})
        partitioner, task = build_parts(resolved)
        partitioner.start(self._devices)
        partitioner.bind(task)
        return kept_arrays(partitioner, task, self._batch)

    def _find_meshes(self, partitioner: SpmdPartitioner) -> None:
        dcn = tuple(partitioner.dcn_mesh_shape or ())
        if math.prod(dcn) > 1:
            slices = math.prod(dcn)
            ici = tuple(
                size // outer for size, outer in zip(self.plan.mesh.values(), dcn, strict=True)
            )
            self.own_mesh = MeshShape(ici, dcn)
        else:
            # Slices of TPUs must be told apart; a mesh of GPUs fills node after node.
            slices = self.plan.num_slices if self.kind.platform == "tpu" else 1
        self.meshes = list(
            mesh_shapes(
                self._axes,
                current=self.own_mesh,
                num_slices=slices,
                devices_per_slice=self.plan.num_devices // slices,
            )
        )

    def _mesh(self, wanted: Changes) -> MeshShape:
        dcn = wanted.get(changes.DCN_MESH, self.own_mesh.dcn)
        ici = wanted.get(changes.ICI_MESH, self.own_mesh.ici)
        return MeshShape(tuple(ici), None if dcn is None else tuple(dcn))


def abstract_batch(batch: BatchPlan) -> NestedMap:
    """The shapes of the global batch that a plan tells of."""
    result = NestedMap()
    for path, text in batch.fields.items():
        match = _FIELD.fullmatch(text)
        assert match is not None, text
        shape = tuple(int(size) for size in match[2].split(",") if size.strip())
        *parents, name = path.split(".")
        inner = result
        for parent in parents:
            inner = inner.setdefault(parent, NestedMap())
        inner[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(match[1]))
    return result


def _rules(partitioner: Partitioner) -> ShardingRules:
    """By which the state is split; under pmap nothing is, but for the rows."""
    if isinstance(partitioner, SpmdPartitioner):
        return partitioner.rules
    rules = SpmdPartitioner().rules
    return rules.replace(**dict.fromkeys(dict(rules.table))).replace(batch=partitioner.batch_axes())
