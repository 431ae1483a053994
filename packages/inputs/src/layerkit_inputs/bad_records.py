"""Records that cannot be read: refused by file and number, or skipped and counted.

Data that are silently dropped spoil a run as surely as data that are wrong. So a reader refuses
what it cannot read, and says where it stands; only where the user asked for it does it go on, and
then it counts, and keeps the first few to be shown.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

OnBadRecord = Literal["refuse", "skip"]
"""What a reader does with a record that it cannot read."""

_MOST_KEPT = 8


class BadRecordError(ValueError):
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
                f"{where}: {problem} To go on without such records, set on_bad_record='skip'; "
                "they are then counted."
            )
        self.num_skipped += 1
        if len(self.first) < _MOST_KEPT:
            self.first.append(f"{where}: {problem}")
