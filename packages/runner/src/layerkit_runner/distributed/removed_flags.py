"""XLA flags of published scripts that XLA no longer has.

XLA ends the process for a flag that it does not know. The flags in the table are missing in every
supported version. This module imports neither JAX nor XLA.

Sources: openxla/xla, pull requests 11422 (asynchronous collectives) and 30187 (graph levels), and
its commits d7a758b (conversions) and 896e241 (softmax); jax-ml/jax, pull request 25444.
"""

from __future__ import annotations

from collections.abc import Mapping

from layerkit_runner.errors import UsageError

_ASYNC = "asynchronous by default; --xla_gpu_disable_async_collectives=NAMES turns it off"
_GRAPHS = "--xla_gpu_enable_command_buffer=NAMES; an empty list, or level 0 before, means no graphs"

SUCCESSORS: Mapping[str, str] = {
    "xla_gpu_enable_async_collectives": _ASYNC,
    "xla_gpu_enable_async_all_gather": _ASYNC,
    "xla_gpu_enable_async_all_reduce": _ASYNC,
    "xla_gpu_enable_async_all_to_all": _ASYNC,
    "xla_gpu_enable_async_collective_permute": _ASYNC,
    "xla_gpu_enable_async_reduce_scatter": _ASYNC,
    "xla_gpu_cuda_graph_level": _GRAPHS,
    "xla_gpu_enable_cuda_graphs": _GRAPHS,
    "xla_gpu_graph_level": _GRAPHS,
    "xla_gpu_simplify_all_fp_conversions": "--xla_allow_excess_precision, which is on by default",
    "xla_gpu_enable_triton_softmax_fusion": "on by default, without a flag",
    "xla_gpu_enable_xla_runtime_executable": "no successor; the runtime no longer exists",
}
"""What replaces each removed flag, by its name."""


def check_removed_flags(environment: Mapping[str, str]) -> None:
    """Raise an error if XLA_FLAGS holds a removed flag.

    Args:
      environment: Environment variables.

    Raises:
      UsageError: One or more flags were removed; each is named with its successor.
    """
    words = environment.get("XLA_FLAGS", "").split()
    # Each group of flags with the same answer is one sentence.
    removed: dict[str, list[str]] = {}
    for word in words:
        name = word.lstrip("-").partition("=")[0]
        if name in SUCCESSORS:
            removed.setdefault(SUCCESSORS[name], []).append(word)
    if removed:
        raise UsageError(
            "XLA no longer has these flags and would end the process",
            field="XLA_FLAGS",
            value=" ".join(word for group in removed.values() for word in group),
            expected="flags of the installed XLA",
            hint="; ".join(f"{', '.join(group)}: {answer}" for answer, group in removed.items()),
        )
