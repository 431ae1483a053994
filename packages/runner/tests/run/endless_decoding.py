"""An experiment whose decoding is one device computation that does not end."""

from __future__ import annotations

import gated_experiment
import jax
import jax.numpy as jnp

from layerkit.config import Config
from layerkit.config.nested_map import NestedMap


class Endless(gated_experiment.Line):
    """Decodes in a loop that never ends, and prints once the loop has begun."""

    def decode(self, batch: NestedMap) -> NestedMap:
        jax.debug.callback(lambda: print("decoding begins", flush=True))
        one = self.linear(jnp.ones((1, 2)))[0, 0]
        count = jax.lax.while_loop(
            lambda count: count > -1.0, lambda count: jnp.abs(jnp.sin(count)), jnp.abs(one)
        )
        return NestedMap(count=jnp.full(len(batch.ids), count))


class EndlessDecoding(gated_experiment.Gated):
    """Two steps, and a decoding that does not end."""

    MAX_STEPS = 2

    def task(self) -> Config:
        return super().task().set(model=Endless.HParams.config())
