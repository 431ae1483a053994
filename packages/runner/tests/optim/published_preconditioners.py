"""Records weights of published optimizers in `published_preconditioners.npz`.

    python published_preconditioners.py FOLDER

The folder holds `soap.py` of github.com/nikhilvyas/SOAP (a1e55353), `psgd.py` of
github.com/lixilinx/psgd_torch (a8616f1d) and the package `precondition` of
github.com/google-research/precondition (239a8cda), which Praxis uses. It needs PyTorch, opt_einsum
and chex. The noise of PSGD's code is set to 0, and it is called as kron_torch 0.3.3 does.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import numpy as np

RECORDED = pathlib.Path(__file__).with_suffix(".npz")
RATE, STEPS = 0.05, 14
SHAPES = [(6, 6), (5, 8)]


def weights_and_gradients(shape: tuple[int, int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a first weight and correlated gradients."""
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(shape[0], shape[0]))
    weight = rng.normal(size=shape).astype(np.float32)
    return weight, [np.float32(0.3 * mixing @ rng.normal(size=shape)) for _ in range(STEPS)]


def record_soap(weight: np.ndarray, gradients: list[np.ndarray]) -> list[np.ndarray]:
    import torch
    from soap import SOAP

    parameter, weights = torch.nn.Parameter(torch.tensor(weight)), []
    options: dict[str, Any] = {"betas": (0.9, 0.95), "shampoo_beta": 0.8, "weight_decay": 0.0}
    options |= {"precondition_frequency": 3, "max_precond_dim": 6}
    optimizer = SOAP([parameter], lr=RATE, **options)
    for grad in gradients:
        parameter.grad = torch.tensor(grad)
        optimizer.step()
        weights.append(parameter.detach().numpy().copy())
    return weights


def record_psgd(weight: np.ndarray, gradients: list[np.ndarray]) -> list[np.ndarray]:
    import psgd
    import torch

    torch.randn_like = torch.zeros_like
    torch.randn = lambda *sizes, **options: torch.zeros(*sizes, **options)
    torch.rand = lambda *_: torch.tensor(1.0)
    parameter, momentum, weights = torch.tensor(weight), torch.zeros(weight.shape), []
    roots, products = psgd.init_kron(momentum, 1.0, max_size=6, max_skew=1e9, dQ="QUAD")
    for step, grad in enumerate(gradients, 1):
        momentum = 0.9 * momentum + 0.1 * torch.tensor(grad)
        unbiased = momentum / (1 - 0.9**step)
        psgd.update_precond_kron_whiten_quad(roots, products, unbiased.clone(), lr=0.1)
        update = psgd.precond_grad_kron(roots, products, unbiased)
        update = update * min(1.0, 1.1 / (update.square().mean().sqrt() + 1e-12))
        parameter = parameter - RATE * update
        weights.append(parameter.numpy().copy())
    return weights


def record_shampoo(
    weight: np.ndarray, gradients: list[np.ndarray], *, eigh: bool
) -> list[np.ndarray]:
    from precondition import distributed_shampoo as published

    optimizer = published.distributed_shampoo(
        RATE,
        block_size=4,
        beta1=0.9,
        beta2=0.95,
        diagonal_epsilon=1e-8,
        matrix_epsilon=1e-3,
        weight_decay=0.02,
        start_preconditioning_step=0,
        preconditioning_compute_steps=4,
        statistics_compute_steps=2,
        best_effort_shape_interpretation=False,
        graft_type=published.GraftingType.RMSPROP,
        nesterov=False,
        moving_average_for_momentum=True,
        decoupled_weight_decay=True,
        eigh=eigh,
    )
    state, weights = optimizer.init(weight), []
    for grad in gradients:
        updates, state = optimizer.update(grad, state, weight)
        weight = weight + np.asarray(updates)
        weights.append(weight)
    return weights


if __name__ == "__main__":
    sys.path[:0] = sys.argv[1:]
    recorded = {}
    for shape in SHAPES:
        name, case = "x".join(map(str, shape)), weights_and_gradients(shape)
        recorded[f"soap_{name}"] = record_soap(*case)
        recorded[f"eigh_{name}"] = record_shampoo(*case, eigh=True)
        recorded[f"newton_{name}"] = record_shampoo(*case, eigh=False)
        recorded[f"psgd_{name}"] = record_psgd(*case)
    np.savez_compressed(RECORDED, **recorded)
