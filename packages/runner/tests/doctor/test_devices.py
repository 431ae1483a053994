"""Devices that work, and checks that notice when they do not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit_runner.doctor import devices


def test_eight_devices():
    found = devices.check_devices({})
    assert found.values["platform"] == "cpu"
    assert [each["id"] for each in found.values["devices"]] == list(range(8))
    assert not found.problems


def test_gpus_that_jax_does_not_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "num_nvidia_gpus", lambda: 4)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    [problem] = devices.check_devices({}).problems
    assert not problem.fails and "JAX_PLATFORMS=cpu hides them" in problem.what
    monkeypatch.delenv("JAX_PLATFORMS")
    [problem] = devices.check_devices({}).problems
    assert problem.fails and "layerkit-runner[cuda]" in problem.to_do


def test_arithmetic(monkeypatch: pytest.MonkeyPatch):
    found = devices.check_arithmetic({})
    assert found.lines == ["products of matrices are right on 8 of 8 device(s)"]
    right = devices._product
    bad = jax.devices()[3]

    def flips_a_bit(left: jax.Array, right_: jax.Array) -> jax.Array:
        result = right(left, right_)
        return result.at[5, 5].add(1.0) if left.devices() == {bad} else result

    monkeypatch.setattr(devices, "_product", flips_a_bit)
    found = devices.check_arithmetic({})
    assert found.values["wrong_devices"] == [3]
    assert [problem.fails for problem in found.problems] == [True]


def test_attention_backends_of_a_cpu(monkeypatch: pytest.MonkeyPatch):
    found = devices.check_attention({})
    assert {name: value["runs"] for name, value in found.values.items()} == {
        "xla": True,
        "cudnn": False,
        "pallas": False,
    }
    assert "it needs a GPU, not cpu" in found.values["cudnn"]["why"]
    assert not found.problems
    # As if the kernel forgot the causal mask.
    attend = devices.dot_product_attention
    monkeypatch.setattr(
        devices, "dot_product_attention", lambda *a, mask, **more: attend(*a, mask=None, **more)
    )
    [problem] = devices.check_attention({}).problems
    assert problem.fails and problem.what.startswith("Attention backend xla computes other")


def test_the_attention_that_others_are_compared_with():
    draw = np.random.default_rng(1)
    arrays = [draw.normal(size=(2, 5, 2, 3)) for _ in range(4)]

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    out, pull_back = jax.vjp(attend, *(jnp.asarray(a, jnp.float32) for a in arrays[:3]))
    expected = [out, *pull_back(jnp.asarray(arrays[3], jnp.float32))]
    found, gradients = devices.attention_by_numpy(*arrays)
    for mine, theirs in zip([found, *gradients], expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_collectives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "_COLLECTIVE_BYTES_ON_CPU", 4096)
    found = devices.check_collectives({})
    for name in ("psum", "all_gather"):
        assert found.values[name]["is_right"]
        assert found.values[name]["bytes_per_second"] > 0
    assert not found.problems
    right = devices._sum

    def sums_too_little(mesh: Mesh) -> Any:
        return lambda numbers: right(mesh)(numbers.at[2].set(0.0))

    monkeypatch.setattr(devices, "_sum", sums_too_little)
    found = devices.check_collectives({})
    assert [problem.what for problem in found.problems] == [
        "psum over the 8 devices gives wrong numbers."
    ]
