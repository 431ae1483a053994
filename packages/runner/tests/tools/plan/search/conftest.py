from __future__ import annotations

import dataclasses

import jax
import pytest

from layerkit_runner.config.resolve import resolve
from layerkit_runner.tools.plan.hardware import device_kind
from layerkit_runner.tools.plan.plan import make_plan
from layerkit_runner.tools.plan.search.changes import overriding_flags
from layerkit_runner.tools.plan.search.trials import Limits, Trials
from layerkit_runner.tools.plan.targets import Target

CPU = device_kind("cpu")


@pytest.fixture(scope="session")
def tunable_lm(small_lm):
    """`SmallLm` with the usual fields for what advice and searches change."""

    class TunableLm(small_lm):
        """Eight devices, and a policy that keeps everything."""

        NUM_LAYERS = 4
        MESH = None
        PERCORE_BATCH_SIZE = 4
        ICI_MESH_SHAPE: list[int] | None = [8, 1, 1]
        DCN_MESH_SHAPE: list[int] | None = None
        CHECKPOINT_POLICY: str = "none"

        def task(self):
            task = super().task()
            task.model.lm_tpl.stack_tpl.remat = self.CHECKPOINT_POLICY
            return task

        def partitioner(self):
            partitioner = super().partitioner()
            if not self.USE_PMAP:
                partitioner.ici_mesh_shape = self.ICI_MESH_SHAPE
                partitioner.dcn_mesh_shape = self.DCN_MESH_SHAPE
            return partitioner

    return TunableLm


@pytest.fixture(scope="session")
def devices():
    return jax.devices("cpu")[:8]


@pytest.fixture(scope="session")
def plan_for(devices, plan_of):
    """Plans an experiment for devices with so many bytes of memory, each once."""
    planned = plan_of("spmd")
    made = {_key(planned.resolved): planned.plan}

    def plan(resolved, memory_bytes=None):
        key = _key(resolved)
        if key not in made:
            made[key] = make_plan(resolved, devices, target=Target(CPU, len(devices)))
        kind = dataclasses.replace(CPU, memory_bytes=memory_bytes)
        fits = None if memory_bytes is None else made[key].memory.peak <= memory_bytes
        return dataclasses.replace(made[key], device=kind, fits=fits)

    return plan


def _key(resolved):
    return resolved.name, *overriding_flags(resolved)


@pytest.fixture(scope="session")
def small(plan_of):
    """`SmallLm` on a mesh of 2 × 2 × 2, which is planned for other tests already."""
    return plan_of("spmd").resolved


@pytest.fixture
def trials_for(plan_for):
    """Trials on devices with so many bytes of memory."""

    def make(memory_bytes=None, *, compilations=12, seconds=600.0):
        limits = Limits(compilations, seconds)
        return Trials(lambda resolved: plan_for(resolved, memory_bytes), limits)

    return make


@pytest.fixture(scope="session")
def resolve_flags(tunable_lm):
    """`TunableLm` as flags make it, as the command line does."""
    from layerkit_runner.config.experiment import experiment_fields
    from layerkit_runner.config.flags import parse_flags
    from layerkit_runner.config.overrides import parse_fields

    def make(flags):
        overrides = parse_flags(["--exp=x", "--mode=plan", *flags]).overrides
        fields = parse_fields("TunableLm", experiment_fields(tunable_lm), overrides)
        return resolve(tunable_lm(**fields), [each for each in overrides if each.is_deep])

    return make
