"""What a compiled step needs besides its arguments and results."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp

from layerkit_runner.training.step_cost import temporary_bytes


def test_tpu_temporaries_are_the_peak_less_other_memory():
    # `lm.c4.C4Spmd16BAdam32Replicas` on v4:2x4x4, which libtpu 0.0.42 fits into 33.0 GB.
    stats = types.SimpleNamespace(
        argument_size_in_bytes=6_201_625_088,
        output_size_in_bytes=6_200_976_384,
        alias_size_in_bytes=6_200_969_728,
        temp_size_in_bytes=31_022_552_576,
        peak_memory_in_bytes=29_400_133_120,
        host_argument_size_in_bytes=0,
        host_output_size_in_bytes=0,
        host_alias_size_in_bytes=0,
    )
    results = 6_200_976_384 - 6_200_969_728
    found = temporary_bytes(stats, platform="tpu")
    assert 6_201_625_088 + results + found == 29_400_133_120
    assert temporary_bytes(stats, platform="gpu") == 31_022_552_576
    stats.peak_memory_in_bytes = 0
    assert temporary_bytes(stats, platform="tpu") == 31_022_552_576


def test_tpu_temporaries_do_not_include_a_state_in_host_memory():
    # A loop over 16 layers of 4096 × 4096 on v5e:2x2, with Adam's state in host memory. The device
    # holds 270.5 MB of arguments and at most 403.8 MB of temporaries, but the peak is 1,210 MB.
    stats = types.SimpleNamespace(
        argument_size_in_bytes=270_532_608,
        output_size_in_bytes=268_435_968,
        alias_size_in_bytes=268_435_456,
        temp_size_in_bytes=403_750_400,
        peak_memory_in_bytes=1_210_081_792,
        host_argument_size_in_bytes=536_870_912,
        host_output_size_in_bytes=536_870_912,
        host_alias_size_in_bytes=536_870_912,
    )
    found = temporary_bytes(stats, platform="tpu")
    assert found == 1_210_081_792 - 536_870_912 - 270_533_120 < stats.temp_size_in_bytes


def test_cpu_temporaries_hold_intermediate_results():
    compiled = jax.jit(lambda x: (x @ x) @ x).lower(jnp.ones((64, 64))).compile()
    assert temporary_bytes(compiled.memory_analysis(), platform="cpu") >= 4 * 64 * 64
