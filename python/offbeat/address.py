"""Where a server listens, and what to tell those who want to reach it."""

import socket

__all__ = [
    "EVERY_INTERFACE",
    "LARGEST_PORT",
    "THIS_MACHINE",
    "is_address",
    "is_local",
    "reachable",
    "start_line",
]

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
LARGEST_PORT = 65_535
EVERY_INTERFACE = ("0.0.0.0", "[::]")  # noqa: S104  compared with, not bound to


def start_line(address: str, *, token: str | None, in_environment: bool) -> str:
    """Say where the server listens, how a worker joins, and how to let other machines in.

    Args:
        address: The server's, "HOST:PORT".
        token: The server's; it is not shown.
        in_environment: Whether this process's OFFBEAT_TOKEN is the token, so that a shell here knows it, too.
    """
    local = is_local(address)
    where = f"{address} (this machine only)" if local else address
    word = "$OFFBEAT_TOKEN" if in_environment else "<the server's token>"
    secret = f"OFFBEAT_TOKEN={word} " if token else ""
    join = f"{secret}OFFBEAT_SERVER={reachable(address)} python train.py"
    line = f"parameter server on {where}; a worker joins with: {join}"
    if local and token:
        return line + '; for other machines give host="0.0.0.0", or set OFFBEAT_HOST'
    if local:
        return line + "; for other machines set OFFBEAT_TOKEN to the same secret here and there"
    return line


def is_address(text: str) -> bool:
    """Whether a text can be "HOST:PORT"; a client, which looks it up, refuses the same."""
    host, _, port = text.rpartition(":")
    has_host = bool(host) and "/" not in host and not any(c.isspace() for c in host)
    digits = port.lstrip("0")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= len(str(LARGEST_PORT))
    return has_host and is_number and int(digits) <= LARGEST_PORT


def is_local(address: str) -> bool:
    """Whether only this machine can reach "HOST:PORT"; an IPv6 host stands in brackets there."""
    return address.rpartition(":")[0].strip("[]") in THIS_MACHINE


def reachable(address: str) -> str:
    """Put this machine's own address in the place of "every interface"."""
    host, _, port = address.rpartition(":")
    if host not in EVERY_INTERFACE:
        return address
    try:  # a datagram socket is connected without sending anything: the system says which way it would send
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return f"{probe.getsockname()[0]}:{port}"
    except OSError:  # no network
        return f"{THIS_MACHINE[0]}:{port}"
