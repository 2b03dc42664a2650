"""Recognises addresses that only this machine can reach."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether an address, also an IPv4 one in IPv6's form, or ``localhost`` is loopback."""
    address = address_of(host)
    if address is None:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host that is an address; None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
