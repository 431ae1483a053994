from __future__ import annotations

import dataclasses
import re

import pytest

from layerkit_runner.observers.speed import peak_flops
from layerkit_runner.tools.plan.hardware import KINDS, device_kind, kind_of_device, target_config


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kind_is_found_by_name_and_by_device_kind_of_jax(kind):
    assert device_kind(kind.name) is kind
    assert kind_of_device(kind.device_kind, platform=kind.platform) is kind
    assert kind.peak_flops == peak_flops(kind.device_kind)
    assert (kind.peak_flops is None) == (kind.name == "cpu")


def test_unknown_device_kind_has_no_figures():
    kind = kind_of_device("NVIDIA H100 PCIe", platform="gpu")
    assert (kind.name, kind.platform) == ("NVIDIA H100 PCIe", "gpu")
    figures = dataclasses.asdict(kind)
    known = ("name", "platform", "device_kind", "pattern", "reserved_bytes", "peak_flops")
    assert {name for name, value in figures.items() if value not in (None, {})} == set(known)


def test_usable_memory_of_a_kind():
    gpu, tpu = device_kind("h100"), device_kind("v5p")
    assert gpu.usable_bytes == gpu.memory_bytes - round(0.08 * gpu.memory_bytes)
    assert tpu.usable_bytes == round(95.73 * 2**30)
    assert device_kind("cpu").usable_bytes is None


@pytest.mark.parametrize("name", ["a100", "a100-40gb", "h100", "h200", "b200", "gb200"])
def test_target_config_of_a_gpu(name):
    kind = device_kind(name)
    text = target_config(kind)
    fields = dict(re.findall(r"(\w+): (\d+)\b", text))
    assert int(fields["device_memory_size"]) == kind.memory_bytes
    assert int(fields["memory_bandwidth"]) == kind.memory_bandwidth
    assert f'device_description_str: "{kind.device_kind}"' in text
    assert text.count("{") == text.count("}")
