"""Where data are, as far as a run needs to be told: what is not said is told before it waits.

An experiment names its data and opens none, so that it can be looked at anywhere; what is missing
ends the run when the first batch is read, which may be hours later in a queue.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

# Fields of what is read through SeqIO. Environment variables of the same names are read as well
# where a field is None: how each is given, and what follows where nothing does.
_SEQIO_FIELDS = {
    "VOCAB_PATH": ("--fdl.VOCAB_PATH=…", "without a vocabulary it ends at its first batch"),
    "TFDS_DATA_DIR": ("--tfds_data_dir=…", "the data are looked for in ~/tensorflow_datasets"),
}


def unset_data_fields(experiment: object) -> tuple[str, ...]:
    """The fields of an experiment that say where its data are, and are None."""
    if getattr(experiment, "DATA_FORMAT", None) != "seqio":
        return ()
    return tuple(name for name in _SEQIO_FIELDS if getattr(experiment, name, "") is None)


def unset_data_lines(
    fields: Sequence[str], environment: Collection[str], setup: Sequence[str]
) -> Iterator[str]:
    """A line for each field that the environment of the run does not set either.

    Args:
      fields: From `unset_data_fields`.
      environment: Names of the variables that the run is known to have.
      setup: Lines of shell before it, which may set them.
    """
    for name in fields:
        if name in environment or any(f"{name}=" in line for line in setup):
            continue
        flag, consequence = _SEQIO_FIELDS[name]
        yield f"nothing sets {name} where the run will be, and {consequence}; give {flag}"
