"""Init from anywhere: the first values of a run out of checkpoints and Hugging Face folders.

    settings.py             what an experiment says: `InitFrom`, its sources and their rules
    rules.py                one rule: a pattern over names here, a name there
    folders.py              which kind of folder a path names
    stored_checkpoint.py    one of our checkpoints, read by name
    stored_hugging_face.py  a Hugging Face folder, likewise
    origins.py              what is told of stored values, and of those that were found
    matching.py             rules and stored names in, the origin of every value out, or all faults
    first_state.py          the state before the first step, values read to where they belong
    provenance.py           the record of where each value came from

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
