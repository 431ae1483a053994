"""The envelope around a reader's state, as it stands in a checkpoint.

A reader knows only its own position. The envelope says whose position it is: which class wrote it,
and whether it is that of the whole global stream (scope `global`; any number of hosts may go on
from it) or that of one host's share (scope `host`; only the same host of as many hosts may).
Everything in it is plain JSON.

A subclass counts as another reader, since its batches may be others; a reader around another one,
such as Prefetch, hands on the envelope of the inner one and is not named in it.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

Scope = Literal["global", "host"]


def pack_state(
    position: dict[str, Any],
    *,
    reader: str,
    scope: Scope,
    host_index: int,
    num_hosts: int,
) -> dict[str, Any]:
    """Wraps a reader's position.

    Args:
      position: What the reader needs to go on, as JSON values; it is copied.
      reader: Class name of the reader.
      scope: `global` when the position is the same on every host and fits any number of them.
      host_index: Which host this is.
      num_hosts: Among how many.
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
    envelope: dict[str, Any],
    *,
    reader: str,
    scope: Scope,
    host_index: int,
    num_hosts: int,
) -> dict[str, Any]:
    """The position inside `envelope`, if it fits this reader on this host.

    Raises:
      ValueError: not an envelope, of another reader, with another scope, or of another host.
    """
    expected = ["reader", "scope", "position", *(["host"] if scope == "host" else [])]
    if not isinstance(envelope, dict) or not {"reader", "scope", "position"} <= envelope.keys():
        raise _not_an_envelope(envelope, reader, expected)
    if envelope["reader"] != reader:
        raise ValueError(
            f"the state was written by {envelope['reader']} and does not fit {reader}; use the "
            "reader that wrote it, or start a new run from the weights alone."
        )
    if envelope["scope"] != scope:
        raise ValueError(
            f"the state was written by {reader} with scope {envelope['scope']!r}, but it keeps "
            f"states of scope {scope!r} now; use the version of it that wrote the state."
        )
    if not set(expected) <= envelope.keys():
        raise _not_an_envelope(envelope, reader, expected)
    if scope == "host" and list(envelope["host"]) != [host_index, num_hosts]:
        index, count = envelope["host"]
        raise ValueError(
            f"the state belongs to host {index} of {count}, but {reader} is host {host_index} of "
            f"{num_hosts}; a state of scope 'host' fits only the same host of as many hosts."
        )
    return copy.deepcopy(envelope["position"])


def why_data_differ(then: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Why a state of the data `then` does not fit the data `now`; None where it does.

    Args:
      then: What decided which rows there were, name -> JSON value, as the state holds it.
      now: The same of the reader that is to go on.
    """
    differing = [
        f"{name} was {then.get(name)!r} and is {now.get(name)!r}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    if not differing:
        return None
    return (
        f"the state does not fit this data: {'; '.join(differing)}. Restore with the data and "
        "fields it was written with, or start a new run from the weights alone."
    )


def _not_an_envelope(envelope: Any, reader: str, expected: list[str]) -> ValueError:
    return ValueError(
        f"{reader}.set_state() needs what get_state() returned, a dict with {expected}; got "
        f"{envelope!r}."
    )
