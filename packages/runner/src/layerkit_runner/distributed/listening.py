"""Sockets that listen at one network interface where that is enough, not at all of them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

_ALL_INTERFACES = "::"


def bind_address(host: str) -> str:
    """Return the address to listen at for those who find this machine as `host`.

    That is the one address behind `host`, so that nothing listens at the other interfaces. It is
    all interfaces where others may reach this machine by another address than it knows itself: a
    name that means several addresses or, as on some distributions a machine's own name does, the
    loopback interface only here; and an address that no interface of this machine has.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 0)}
    except OSError:
        return _ALL_INTERFACES
    if host == "localhost":
        return "127.0.0.1" if "127.0.0.1" in found else found.pop()
    if len(found) != 1:
        return _ALL_INTERFACES
    (address,) = found
    if address != host and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return _ALL_INTERFACES
    try:
        _listen(address, backlog=1).close()
    except OSError:
        return _ALL_INTERFACES
    return address


def listen(host: str, *, backlog: int) -> socket.socket:
    """Return a socket that listens at a free port of `bind_address(host)`."""
    return _listen(bind_address(host), backlog=backlog)


def _listen(address: str, *, backlog: int) -> socket.socket:
    if address == _ALL_INTERFACES:
        with contextlib.suppress(OSError, ValueError):  # where IPv6 is off
            return socket.create_server(
                (address, 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        return socket.create_server(("", 0), backlog=backlog)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)
