"""Records that cannot be read: refused by file and number, or skipped and counted.

Data that are silently dropped spoil a run as surely as data that are wrong. So a reader refuses
what it cannot read, and says where it stands; only where the user asked for it does it go on, and
then it counts, and keeps the first few to be shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from layerkit.errors import ConfigError

OnBadRecord = Literal["refuse", "skip"]
"""What a reader does with a record that it cannot read."""

_MOST_KEPT = 8


class UnfitFieldError(ConfigError):
    """A field of a reader that does not fit the data.

    Attributes:
      remedies: Fields of the reader, each with a value that would let the data be read. Programs
        that know how fields are set, such as the runner, add the flags to the message.
    """

    def __init__(
        self, problem: str = "", *, remedies: Mapping[str, Any] | None = None, **data: Any
    ):
        super().__init__(problem, **data)
        self.remedies: Mapping[str, Any] = {} if remedies is None else dict(remedies)


class BadRecordError(UnfitFieldError):
    """A record cannot be read; the message names the file, the record and what is wrong."""


@dataclasses.dataclass
class BadRecords:
    """Refuses bad records, or counts those that are left out.

    Attributes:
      policy: `refuse` or `skip`.
      num_skipped: How many were left out.
      first: What was wrong with the first few of them.
    """

    policy: OnBadRecord = "refuse"
    num_skipped: int = 0
    first: list[str] = dataclasses.field(default_factory=list)

    def report(self, *, file: str, record: int | None, problem: str) -> None:
        """Takes note of a record that was left out.

        Args:
          file: Where it stands.
          record: Its number in the file, from 0; None where the whole file cannot be read.
          problem: What is wrong with it.

        Raises:
          BadRecordError: unless the policy is to skip.
        """
        where = file if record is None else f"{file}, record {record}"
        if self.policy == "refuse":
            raise BadRecordError(
                f"{where}: {problem} Set on_bad_record='skip' to leave such records out and count "
                "them.",
                remedies={"on_bad_record": "skip"},
            )
        self.num_skipped += 1
        if len(self.first) < _MOST_KEPT:
            self.first.append(f"{where}: {problem}")
