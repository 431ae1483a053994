"""Which interface a socket listens at, by the name under which others find this machine."""

from __future__ import annotations

import pytest

from layerkit_runner.distributed.cluster import bind_address, listen


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_host_is_bound_alone(host: str):
    assert bind_address(host) == "127.0.0.1"
    with listen(host, backlog=1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_host_that_is_not_an_address_of_this_machine_listens_everywhere(host: str):
    assert bind_address(host) == "::"


def test_name_that_means_loopback_only_here_listens_everywhere(monkeypatch: pytest.MonkeyPatch):
    """Debian has `127.0.1.1 NAME` in /etc/hosts, where other machines know the real address."""
    entry = (2, 1, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [entry])
    assert bind_address("node1") == "::"
