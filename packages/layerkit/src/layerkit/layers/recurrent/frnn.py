"""Recurrent layers over rows: `Frnn` in one direction, `BidirectionalFrnn`, and `StackedFrnn`.

A scan runs the steps of a cell. A step at padding keeps the state, and the first token of the next
document of a packed row starts from zeros. So packed rows have the results of separate rows.

They are mixers of tokens. A Transformer layer takes them as `attention_tpl`, and `mix` takes and
returns states.

If a mesh splits rows by position (`context`), it also splits the products of the inputs, but every
device runs the steps of whole rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_divisible, check_rates, check_sizes, require
from layerkit.config.hparams import derive_fields
from layerkit.layers.attention.cache import Axes
from layerkit.layers.basic.elementwise import Dropout
from layerkit.layers.recurrent.cells import BaseRnnCell, LstmCell
from layerkit.layers.recurrent.token_mixer import State, TokenMixer
from layerkit.ops.remat import check_remat_policy, remat_in_scan


class BaseFrnn(TokenMixer):
    """The base class of recurrent layers: `[batch, length, input_dims]` → `output_dims`.

    The other fields are those of `TokenMixer`.

    Attributes:
      output_dims: Size of the outputs; None for `input_dims`, as in a Transformer layer.
    """

    output_dims: int | None = None

    @property
    def _output_dims(self) -> int:
        check_sizes(self, input_dims=self.input_dims, output_dims=self.output_dims)
        return self.input_dims if self.output_dims is None else self.output_dims

    @property
    def _parts(self) -> dict[str, Any]:
        """The layers that have the states, by the prefix of their names."""
        raise NotImplementedError

    @property
    def is_causal(self) -> bool:
        """True if no output depends on later tokens."""
        return all(layer.is_causal for layer in self._parts.values())

    @property
    def state_axes(self) -> dict[str, Axes]:  # type: ignore[override]  # those of the parts
        """Logical axes of each array of the state, of all parts."""
        return _join({part: layer.state_axes for part, layer in self._parts.items()})

    def initial_state(self, batch_size: int) -> State:
        """Return the state `[batch, …]` before the first step, of all parts."""
        parts = self._parts.items()
        return _join({part: layer.initial_state(batch_size) for part, layer in parts})


class Frnn(BaseFrnn):
    """A layer that runs a cell over rows, one step per position.

    The outputs of padding repeat the state. The other fields are those of `BaseFrnn`.

    Attributes:
      cell_tpl: Cell.
      reverse: True to run from the last position to the first.
      unroll: Number of steps in an iteration of the compiled loop. More compile longer and run
        faster.
      remat: Name of the rematerialization policy of a step; see `layerkit.ops.remat`. With `full`
        the backward pass keeps the states alone and computes the gates again.
    """

    cell_tpl: Config[BaseRnnCell] = sub_config_field(LstmCell.HParams)
    reverse: bool = False
    unroll: int = 1
    remat: str = "none"

    def setup(self) -> None:
        """Check the fields and create the cell."""
        check_sizes(self, unroll=self.unroll)
        check_remat_policy(self.remat, owner=self.path_name)
        sizes = {"input_dims": self.input_dims, "output_dims": self._output_dims}
        self.create_child("cell", self.cell_tpl, **sizes)

    @property
    def is_causal(self) -> bool:
        """True if no output depends on later tokens."""
        return not self.reverse

    @property
    def _parts(self) -> dict[str, Any]:
        return {"": self.cell}

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
            marks = (segments != 0, state_resets(segments, reverse=self.reverse))

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


class BidirectionalFrnn(BaseFrnn):
    """Two layers in opposite directions, each with half of the outputs.

    The fields are those of `BaseFrnn`.

    Attributes:
      frnn_tpl: Layer of each direction.
    """

    frnn_tpl: Config[Frnn] = sub_config_field(Frnn.HParams)

    def setup(self) -> None:
        """Create both directions."""
        check_divisible(self, by=("directions", 2), output_dims=self._output_dims)
        sizes = {"input_dims": self.input_dims, "output_dims": self._output_dims // 2}
        self.create_child("forward", self.frnn_tpl, **sizes, reverse=False)
        self.create_child("backward", self.frnn_tpl, **sizes, reverse=True)

    @property
    def _parts(self) -> dict[str, Any]:
        return {"forward.": self.forward, "backward.": self.backward}

    def mix(
        self, x: jax.Array, state: State | None = None, *, segments: jax.Array | None = None
    ) -> tuple[jax.Array, State]:
        """Run `[batch, t, input_dims]` in both directions; see `TokenMixer.mix`."""
        outputs, after = {}, {}
        for part, layer in self._parts.items():
            outputs[part], after[part] = layer.mix(x, _part(state, part), segments=segments)
        return jnp.concatenate(list(outputs.values()), axis=-1), _join(after)


class StackedFrnn(BaseFrnn):
    """Recurrent layers in sequence. The other fields are those of `BaseFrnn`.

    Attributes:
      layer_tpl: Layer, such as `Frnn` or `BidirectionalFrnn`.
      num_layers: Number of layers.
      has_residual: True to add the inputs of each layer to its outputs, but for a first layer that
        changes the size.
      dropout_rate: Dropout rate of the inputs of all layers but the first in training.
    """

    layer_tpl: Config[BaseFrnn] = sub_config_field(Frnn.HParams)
    num_layers: int = 1
    has_residual: bool = False
    dropout_rate: float = 0.0

    def setup(self) -> None:
        """Create the layers."""
        check_sizes(self, num_layers=self.num_layers)
        check_rates(self, dropout_rate=self.dropout_rate)
        is_valid = self.num_layers > 1 or not self.dropout_rate
        require(is_valid, self, "dropout_rate", self.dropout_rate, "0.0 for a single layer")
        dims = self._output_dims
        inputs = (self.input_dims, *(dims,) * (self.num_layers - 1))
        self.create_children(
            "layers",
            [derive_fields(self.layer_tpl, self.path_name, input_dims=size) for size in inputs],
            output_dims=dims,
        )
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))

    @property
    def _parts(self) -> dict[str, Any]:
        return {f"{index}.": layer for index, layer in enumerate(self.layers)}

    def mix(
        self, x: jax.Array, state: State | None = None, *, segments: jax.Array | None = None
    ) -> tuple[jax.Array, State]:
        """Run `[batch, t, input_dims]` through all layers; see `TokenMixer.mix`."""
        after: dict[str, State] = {}
        for part, layer in self._parts.items():
            inputs = self.cast(self.dropout(x) if after else x)
            x, after[part] = layer.mix(inputs, _part(state, part), segments=segments)
            if self.has_residual and x.shape == inputs.shape:
                x = x + inputs
        return x, _join(after)


def state_resets(segments: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Return where the state of a packed row starts anew, bool `[batch, length]`.

    That is the first token of each document but the first of the row, which continues the state
    before the row. Praxis' `reset_mask` is the complement, and marks the first document, too.

    Args:
      segments: int32 `[batch, length]`, documents; 0 is padding.
      reverse: True for steps from the last position to the first.
    """

    def newest(before: jax.Array, here: jax.Array) -> jax.Array:
        return jnp.where(here == 0, before, here)

    last = jax.lax.associative_scan(newest, segments, axis=1, reverse=reverse)
    before = last[:, 1:] if reverse else last[:, :-1]
    before = jnp.pad(before, ((0, 0), (0, 1) if reverse else (1, 0)))
    return (before != 0) & (segments != 0) & (before != segments)


def _where(condition: jax.Array, yes: State, no: State) -> State:
    """Return the rows of `yes` where a condition `[batch]` holds, and else those of `no`."""
    return {name: jnp.where(condition[:, None], x, no[name]) for name, x in yes.items()}


def _join(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the entries of all parts, with the prefixes of their names."""
    return {part + name: x for part, entries in parts.items() for name, x in entries.items()}


def _part(state: State | None, prefix: str) -> State | None:
    """Return the entries with a prefix, without it; None without a state."""
    if state is None:
        return None
    return {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}
