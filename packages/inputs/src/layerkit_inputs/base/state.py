"""The state of an input in a checkpoint: the position of a reader in an envelope.

The envelope names the class that wrote the position, and its scope. A position of the scope
`global` describes the whole global stream, and any number of hosts can resume from it. A position
of the scope `host` describes the share of one host, and only the same host of as many hosts can
resume from it. The envelope holds JSON values only.

A subclass is a different reader, since its batches may differ. A reader around another one, such as
Prefetch, returns the envelope of the inner reader.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

from layerkit.errors import ConfigError

Scope = Literal["global", "host"]


def pack_state(
    position: dict[str, Any], *, reader: str, scope: Scope, host_index: int, num_hosts: int
) -> dict[str, Any]:
    """Return the envelope of a reader's position.

    Args:
      position: Data that the reader needs to resume, as JSON values. It is copied.
      reader: Class name of the reader.
      scope: `global` if the position is the same on every host and fits any number of hosts.
      host_index: Index of this host.
      num_hosts: Number of hosts.
    """
    envelope: dict[str, Any] = {
        "reader": reader,
        "scope": scope,
        "position": copy.deepcopy(position),
    }
    if scope == "host":
        envelope["host"] = [host_index, num_hosts]
    return envelope


def unpack_state(
    envelope: dict[str, Any], *, reader: str, scope: Scope, host_index: int, num_hosts: int
) -> dict[str, Any]:
    """Return the position in an envelope; see `pack_state` for the arguments.

    Raises:
      ConfigError: The envelope belongs to another reader, scope or host.
    """
    expected = pack_state(
        {}, reader=reader, scope=scope, host_index=host_index, num_hosts=num_hosts
    )
    check_same_data(None, {**envelope, "position": {}}, expected, field="state")
    return copy.deepcopy(envelope["position"])


def check_same_data(
    owner: str | None, then: dict[str, Any], now: dict[str, Any], *, field: str = "state.data"
) -> None:
    """Raise `ConfigError` unless a state was written by a reader of the same data.

    Args:
      owner: Name of the reader, or None to add it later.
      then: JSON values that identify the data of the state, by name.
      now: JSON values that identify the data of the reader, by name.
      field: Name of these values in the message.

    Raises:
      ConfigError: Data differ. `value` holds those of the state that differ.
    """
    differing = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    if differing:
        raise ConfigError(
            "cannot restore",
            owner=owner,
            field=field,
            value={name: then.get(name) for name in differing},
            expected=str({name: now.get(name) for name in differing}),
            hint="Use the same data, fields, hosts and version, or only the weights.",
        )
