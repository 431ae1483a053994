"""Init from anywhere: the first values of a run out of checkpoints and Hugging Face folders.

    settings.py     what an experiment sets: `InitFrom`, its sources and their rules
    rules.py        one rule: a pattern over names of this run, and a name in the source
    sources.py      folders: recognised, opened, and read by name
    matching.py     rules and stored names in; the origin of every value out, or all faults at once
    first_state.py  the state before the first step, each value read into its sharding
    provenance.py   the record of the origin of each value

It takes effect on a fresh start alone: a run that resumes reads its own checkpoints instead. The
names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.lazy_names import lazy_names

if TYPE_CHECKING:
    from layerkit_runner.init_from.first_state import plan_first_state as plan_first_state
    from layerkit_runner.init_from.provenance import FirstState as FirstState
    from layerkit_runner.init_from.settings import InitFrom as InitFrom
    from layerkit_runner.init_from.settings import Source as Source

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "first_state": "plan_first_state",
        "provenance": "FirstState",
        "settings": "InitFrom Source",
    },
)
