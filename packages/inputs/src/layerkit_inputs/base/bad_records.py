"""Errors about data, and the policy for records that cannot be read.

A record that is silently dropped harms a run as much as wrong data. So by default a reader raises
for a record that it cannot read, and names the file and the record. With `on_bad_record="skip"` it
counts such records instead and keeps the problems of the first ones for reports.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from layerkit.errors import ConfigError, UserError

OnBadRecord = Literal["refuse", "skip"]
"""Policy for records that a reader cannot read: `refuse` raises, `skip` counts."""

_MAX_KEPT = 8
CONVERSATIONS = (
    "Write each conversation as one text first, by the chat template of the model's tokenizer:"
    " apply_chat_template(messages, tokenize=False) in transformers."
)
"""Hint for a field of messages with roles, which readers of text do not read."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that does not exist."""


class BadRecordError(ConfigError):
    """A record that cannot be read. Its owner is the file, with the number of the record."""


@dataclasses.dataclass
class BadRecords:
    """The policy for bad records, and the count of skipped ones.

    Attributes:
      policy: `refuse` or `skip`.
      num_skipped: Number of records that were skipped.
      first: Problems of the first skipped records.
    """

    policy: OnBadRecord = "refuse"
    num_skipped: int = 0
    first: list[str] = dataclasses.field(default_factory=list)

    def report(self, *, file: str, record: int | None, problem: str) -> None:
        """Count a record that cannot be read, or raise.

        Args:
          file: File that holds the record.
          record: Zero-based number of the record in the file, or None if the whole file cannot be
            read.
          problem: Sentence that describes what is wrong with the record.

        Raises:
          BadRecordError: The policy is `refuse`.
        """
        where = file if record is None else f"{file}, record {record}"
        if self.policy == "refuse":
            hint = "Set on_bad_record='skip' to skip and count such records."
            raise BadRecordError(problem, owner=where, hint=hint)
        self.num_skipped += 1
        if len(self.first) < _MAX_KEPT:
            self.first.append(f"{where}: {problem}")
