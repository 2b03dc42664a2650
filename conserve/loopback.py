"""Recognises addresses that only this machine can reach."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether an address, also an IPv4 one in IPv6's form, or ``localhost`` is loopback."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
