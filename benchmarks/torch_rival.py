"""The model of `handwritten.py` and its training step in PyTorch, for `peers.py`.

It imports nothing of this project, and uses the GPU if PyTorch finds one. Rows are whole documents,
so that attention is plainly causal and PyTorch's fused kernels apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

CLIP, LEARNING_RATE = 1.0, 1e-3


class Layer(nn.Module):
    """A pre-norm decoder layer with RMSNorm, rotary positions and a gated SiLU feed-forward."""

    def __init__(self, weights: Mapping[str, np.ndarray], index: int, heads: int) -> None:
        """Copy layer `index` of the stacked weights of `handwritten.init_params`."""
        super().__init__()
        for name, stacked in weights.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(stacked[index])))
        self.heads = heads

    def forward(self, x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        """Map `[batch, length, dims]` to the same shape; `sin` and `cos` are `[length, head/2]`."""
        batch, length, dims = x.shape
        normed = functional.rms_norm(x, (dims,), self.attention_norm, 1e-6)

        def heads(weight: torch.Tensor) -> torch.Tensor:
            return (normed @ weight).view(batch, length, self.heads, -1).transpose(1, 2)

        query, key = (rotated(heads(w), sin, cos) for w in (self.query, self.key))
        mixed = functional.scaled_dot_product_attention(
            query, key, heads(self.value), is_causal=True
        )
        x = x + mixed.transpose(1, 2).reshape(batch, length, -1) @ self.attention_out
        normed = functional.rms_norm(x, (dims,), self.mlp_norm, 1e-6)
        gated = functional.silu(normed @ self.mlp_gate) * (normed @ self.mlp_up)
        return x + gated @ self.mlp_down


def rotated(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + head/2) of `[batch, heads, length, head]`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Model(nn.Module):
    """A decoder-only language model whose embedding is also its output projection."""

    def __init__(self, params: Mapping[str, Any], heads: int) -> None:
        """Copy the weights of `handwritten.init_params`, as NumPy arrays."""
        super().__init__()
        layers = params["layers"]
        count = len(layers["query"])
        self.layers = nn.ModuleList(Layer(layers, index, heads) for index in range(count))
        self.embedding = nn.Parameter(torch.tensor(params["embedding"]))
        self.final_norm = nn.Parameter(torch.tensor(params["final_norm"]))
        self.head = layers["query"].shape[-1] // heads

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of `labels` `[batch, length]` in nats, a scalar."""
        numbers = {"dtype": torch.float32, "device": ids.device}
        exponents = torch.arange(0, self.head, 2, **numbers) / self.head
        angles = torch.arange(ids.shape[1], **numbers)[:, None] / 10_000.0**exponents
        sin, cos = angles.sin(), angles.cos()
        x = self.embedding[ids]
        for layer in self.layers:
            x = layer(x, sin, cos)
        x = functional.rms_norm(x, x.shape[-1:], self.final_norm, 1e-6)
        logits = x.flatten(0, 1) @ self.embedding.T
        return functional.cross_entropy(logits, labels.flatten())


def make_step(
    params: Mapping[str, Any],
    batch: Mapping[str, np.ndarray],
    *,
    heads: int,
    bf16: bool,
    is_compiled: bool,
) -> Callable[[], float]:
    """Return a function that trains one step with AdamW and returns the loss before it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(params, heads).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, (0.9, 0.95), 1e-8, weight_decay=0.0, fused=True
    )
    ids, labels = (
        torch.tensor(batch[name], dtype=torch.long, device=device) for name in ("ids", "labels")
    )
    forward = torch.compile(model) if is_compiled else model

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = forward(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        return float(loss.detach())

    return step
