from __future__ import annotations

import pytest

from layerkit_runner.observers import peak_flops


@pytest.mark.parametrize(
    ("device_kind", "teraflops"),
    [
        ("TPU v2", 22.5),
        ("TPU v4", 275),
        ("TPU v4 lite", 138),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 1153.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
    ],
)
def test_peak_flops_of_known_devices(device_kind, teraflops):
    assert peak_flops(device_kind) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "device_kind", ["cpu", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "TPU v99", "NVIDIA T400", ""]
)
def test_peak_flops_of_unknown_devices_is_none(device_kind):
    assert peak_flops(device_kind) is None
