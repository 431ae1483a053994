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

from layerkit.config.checks import require

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
    matching = [
        kind
        for kind in choices
        if reset_for_eval in (None, PASSES[kind][0]) and repeat in (None, PASSES[kind][1])
    ]
    expected = "[True, False] for one epoch, or [False, True] for an endless stream"
    chosen = [reset_for_eval, repeat]
    require(matching, owner, "reset_for_eval and repeat", chosen, expected)
    kind = matching[0]
    is_bounded = kind == "epoch" or is_training or num_batches is not None
    expected = "a positive integer with repeat=True, since an evaluation would never end"
    require(is_bounded, owner, "eval_loop_num_batches", None, expected)
    return kind
