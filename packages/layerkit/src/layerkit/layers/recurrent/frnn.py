"""Recurrent layers over rows: `Frnn` in one direction, and `StackedFrnn` in one or both.

A scan runs the steps of a cell. A step at padding keeps the state, and the first token of the next
document of a packed row starts from zeros. So packed rows have the results of separate rows.

They are mixers of tokens. A Transformer layer takes them as `attention_tpl`, and `mix` takes and
returns states.

If a mesh splits rows by position (`context`), it also splits the products of the inputs, but every
device runs the steps of whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_divisible, check_rates, check_sizes, require
from layerkit.layers.attention.cache import Axes
from layerkit.layers.basic.elementwise import Dropout
from layerkit.layers.recurrent.cells import BaseRnnCell, LstmCell
from layerkit.layers.recurrent.token_mixer import State, TokenMixer
from layerkit.ops.recurrence.linear_attention import document_starts
from layerkit.ops.remat import check_remat_policy, remat_in_scan


class Frnn(TokenMixer):
    """A layer that runs a cell over rows: `[batch, length, input_dims]` → `output_dims`.

    The outputs of padding repeat the state. The other fields are those of `TokenMixer`.

    Attributes:
      output_dims: Size of the outputs; None for `input_dims`, as in a Transformer layer.
      cell_tpl: Cell.
      reverse: True to run from the last position to the first.
      unroll: Number of steps in an iteration of the compiled loop. More compile longer and run
        faster.
      remat: Name of the rematerialization policy of a step; see `layerkit.ops.remat`. With `full`
        the backward pass keeps the states alone and computes the gates again.
    """

    output_dims: int | None = None
    cell_tpl: Config[BaseRnnCell] = sub_config_field(LstmCell.HParams)
    reverse: bool = False
    unroll: int = 1
    remat: str = "none"

    def setup(self) -> None:
        """Check the fields and create the cell."""
        check_sizes(self, unroll=self.unroll)
        check_remat_policy(self.remat, owner=self.path_name)
        output_dims = self.input_dims if self.output_dims is None else self.output_dims
        sizes = {"input_dims": self.input_dims, "output_dims": output_dims}
        self.create_child("cell", self.cell_tpl, **sizes)

    @property
    def is_causal(self) -> bool:
        """True if no output depends on later tokens."""
        return not self.reverse

    @property
    def state_axes(self) -> dict[str, Axes]:  # type: ignore[override]  # those of the cell
        """Logical axes of each array of the state."""
        axes: dict[str, Axes] = self.cell.state_axes
        return axes

    def initial_state(self, batch_size: int) -> State:
        """Return the state `[batch, units]` of the cell before its first step."""
        state: State = self.cell.initial_state(batch_size)
        return state

    def mix(
        self, x: jax.Array, state: State | None = None, *, segments: jax.Array | None = None
    ) -> tuple[jax.Array, State]:
        """Run the steps of `[batch, t, input_dims]`; see `TokenMixer.mix`."""
        first = self.initial_state(x.shape[0])
        inputs = self.constrain(self.cell.project_inputs(x), "batch", None, None, "act_mlp")
        step, keys = self.cell.make_step(), None
        if self.cell.draws:
            keys = jax.random.split(self.cell.next_prng_key(), x.shape[1])
        marks = None
        if segments is not None:
            order = -1 if self.reverse else 1
            marks = (segments != 0, document_starts(segments[:, ::order])[:, ::order])

        def body(state: State, of_step: Any) -> tuple[State, jax.Array]:
            (inputs, marks), key = of_step
            if marks is not None:
                is_token, resets = marks
                state = _where(resets, first, state)
            after = step(state, inputs, key)
            if marks is not None:
                after = _where(is_token, after, state)
            return after, after["output"]

        by_step = jax.tree.map(lambda array: jnp.swapaxes(array, 0, 1), (inputs, marks))
        after, outputs = jax.lax.scan(
            remat_in_scan(body, self.remat),
            first if state is None else state,
            (by_step, keys),
            reverse=self.reverse,
            unroll=self.unroll,
        )
        outputs = jnp.swapaxes(outputs, 0, 1)
        return self.constrain(outputs, "batch", "length", "act_embed"), after


class StackedFrnn(TokenMixer):
    """Layers in sequence, each of which runs a cell over rows in one direction or in both.

    The other fields are those of `TokenMixer`.

    Attributes:
      output_dims: Size of the outputs of each layer; None for `input_dims`.
      num_layers: Number of layers.
      frnn_tpl: Layer.
      is_bidirectional: True for layers of two directions, each with half of the outputs.
      has_residual: True to add the inputs of each layer to its outputs, but for a first layer that
        changes the size.
      dropout_rate: Dropout rate of the inputs of all layers but the first in training.
    """

    output_dims: int | None = None
    num_layers: int = 1
    frnn_tpl: Config[Frnn] = sub_config_field(Frnn.HParams)
    is_bidirectional: bool = False
    has_residual: bool = False
    dropout_rate: float = 0.0

    def setup(self) -> None:
        """Create the layers `forward_<index>` and `backward_<index>`."""
        check_sizes(self, num_layers=self.num_layers)
        check_rates(self, dropout_rate=self.dropout_rate)
        is_valid = self.num_layers > 1 or not self.dropout_rate
        require(is_valid, self, "dropout_rate", self.dropout_rate, "0.0 for a single layer")
        input_dims = self.input_dims
        output_dims = input_dims if self.output_dims is None else self.output_dims
        directions = len(self._layer(0))
        check_divisible(self, by=("directions", directions), output_dims=output_dims)
        for index in range(self.num_layers):
            for name in self._layer(index):
                sizes = {"input_dims": input_dims, "output_dims": output_dims // directions}
                reverse = name.startswith("backward")
                self.create_child(name, self.frnn_tpl, **sizes, reverse=reverse)
            input_dims = output_dims
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    def _layer(self, index: int) -> list[str]:
        """Return the names of the directions of a layer."""
        names = [f"forward_{index}", f"backward_{index}"]
        return names if self.is_bidirectional else names[:1]

    def _join(self, read: Callable[[Frnn], dict[str, Any]]) -> dict[str, Any]:
        """Return the entries of all directions, with their names as prefixes."""
        names = [name for index in range(self.num_layers) for name in self._layer(index)]
        entries = {name: read(getattr(self, name)) for name in names}
        return {f"{name}.{key}": x for name, part in entries.items() for key, x in part.items()}

    @property
    def is_causal(self) -> bool:
        """True if no output depends on later tokens."""
        return not self.is_bidirectional

    @property
    def state_axes(self) -> dict[str, Axes]:  # type: ignore[override]  # those of the cells
        """Logical axes of each array of the state."""
        return self._join(lambda layer: layer.state_axes)

    def initial_state(self, batch_size: int) -> State:
        """Return the states `[batch, units]` of all cells before their first step."""
        return self._join(lambda layer: layer.initial_state(batch_size))

    def mix(
        self, x: jax.Array, state: State | None = None, *, segments: jax.Array | None = None
    ) -> tuple[jax.Array, State]:
        """Run `[batch, t, input_dims]` through all layers; see `TokenMixer.mix`."""
        state = self.initial_state(x.shape[0]) if state is None else state
        after: State = {}
        for index in range(self.num_layers):
            inputs, outputs = self.cast(self.dropout(x) if index else x), []
            for name in self._layer(index):
                before = {key: state[f"{name}.{key}"] for key in getattr(self, name).state_axes}
                output, new = getattr(self, name).mix(inputs, before, segments=segments)
                after |= {f"{name}.{key}": value for key, value in new.items()}
                outputs.append(output)
            x = jnp.concatenate(outputs, axis=-1)
            if self.has_residual and x.shape == inputs.shape:
                x = x + inputs
        return x, after


def _where(condition: jax.Array, yes: State, no: State) -> State:
    """Return the rows of `yes` where a condition `[batch]` holds, and else those of `no`."""
    return {name: jnp.where(condition[:, None], x, no[name]) for name, x in yes.items()}
