"""Going out on the network: whether it is allowed, to where, and what to say where it fails."""

import ipaddress
import os
from urllib.parse import urlsplit

TIMEOUT = 10.0
"""Seconds without an answer, or without one more byte, after which a server is given up."""


def offline() -> bool:
    """Whether the user forbids the network: HF_HUB_OFFLINE, as huggingface_hub reads it.

    Read at every call, for huggingface_hub reads it only once, when it is imported.
    """
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_address(url: str) -> None:
    """Raises unless `url` is https://, or http:// on this very machine."""
    parts = urlsplit(url)
    if parts.hostname and parts.scheme == "https":
        return
    if parts.hostname and parts.scheme == "http" and _is_loopback(parts.hostname):
        return
    raise ValueError(
        "source must be an https:// address: nothing else protects a download from being altered "
        f"on its way. Received: source={url!r}"
    )


def refusal(source: str, why: str, remedy: str) -> str:
    """The text of every error of a fetch: what was asked, why it failed, what to do."""
    return f"Cannot fetch {source}: {why}. {remedy}"


def unreachable(source: str, why: object, kept: str = "") -> ConnectionError:
    """The error where nobody answers, or stops answering."""
    return ConnectionError(
        refusal(
            source,
            str(why) or type(why).__name__,
            f"{kept}Check the network and the proxy (HTTPS_PROXY), or fetch it on another machine "
            "and pass the path of the file.",
        )
    )


def not_cached(source: str, folder: object) -> FileNotFoundError:
    """The error where the network is forbidden and the cache does not have it."""
    return FileNotFoundError(
        refusal(
            source,
            f"HF_HUB_OFFLINE is set, and the cache {folder} does not have it whole",
            "Unset HF_HUB_OFFLINE, copy a cache that has it there, or pass the path of a file.",
        )
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
