"""What one evaluation of an input reads, by the two fields of Pax and the number of batches.

| evaluates | reset_for_eval | repeat | an evaluation reads |
|---|---|---|---|
| epoch | True | False | one epoch, or its first `eval_loop_num_batches` batches if set |
| next | False | True | the next `eval_loop_num_batches` batches of an endless stream |

If both are unset, it is `next` with `eval_loop_num_batches`, else `epoch`. A training input is
endless and never reset, as with `next`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from layerkit.errors import ConfigError

Evaluation = Literal["epoch", "next"]

PASSES: Mapping[Evaluation, tuple[bool, bool]] = {"epoch": (True, False), "next": (False, True)}
"""Values of `reset_for_eval` and `repeat`."""


def choose_evaluation(
    *,
    reset_for_eval: bool | None,
    repeat: bool | None,
    is_training: bool,
    num_batches: int | None,
    owner: str,
) -> Evaluation:
    """Return the row of the table that the fields of an input select.

    Args:
      reset_for_eval: Field of the input; None if it is unset.
      repeat: Field of the input; None if it is unset.
      is_training: Field of the input.
      num_batches: The field `eval_loop_num_batches`.
      owner: Label of the input, for errors.

    Raises:
      ConfigError: No row has these values, or an endless evaluation has no number of batches.
    """
    if is_training:
        choices: tuple[Evaluation, ...] = ("next",)
    else:
        choices = ("epoch", "next") if num_batches is None else ("next", "epoch")
    for kind in choices:
        reset, is_endless = PASSES[kind]
        if reset_for_eval in (None, reset) and repeat in (None, is_endless):
            break
    else:
        raise ConfigError(
            owner=owner,
            field="reset_for_eval and repeat",
            value=[reset_for_eval, repeat],
            expected="[True, False] for one epoch, or [False, True] for an endless stream"
            + (", as while training" if is_training else ""),
        )
    if kind == "next" and num_batches is None and not is_training:
        expected = "a positive integer with repeat=True, since an evaluation would never end"
        raise ConfigError(owner=owner, field="eval_loop_num_batches", value=None, expected=expected)
    return kind
