"""Which addresses nobody but this machine can reach."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address, or ``localhost``, is this machine's own; other names are taken not to be.

    An IPv4 address may be written as IPv6, as a socket that serves both has it.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
