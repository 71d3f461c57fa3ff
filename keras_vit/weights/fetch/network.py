"""Network rules that the Hub and URLs share: offline mode, allowed addresses, error texts."""

import ipaddress
import os
from urllib.parse import urlsplit

TIMEOUT = 10.0
"""Seconds to wait for an answer, or for the next byte."""


def offline() -> bool:
    """Whether HF_HUB_OFFLINE is set. huggingface_hub reads it only once, when it is imported."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_address(url: str) -> None:
    """Raises unless `url` is https://, or http:// on this machine."""
    parts = urlsplit(url)
    if parts.hostname and parts.scheme == "https":
        return
    if parts.hostname and parts.scheme == "http" and _is_loopback(parts.hostname):
        return
    raise ValueError(
        "source must be an https:// URL, which protects a download from being modified in transit. "
        f"Received: source={url!r}"
    )


def cannot_fetch(source: str, why: str, remedy: str) -> str:
    """The text of every error: what was requested, why it failed, what to do."""
    return f"Cannot fetch {source}: {why}. {remedy}"


def unreachable(source: str, why: object, kept: str = "") -> ConnectionError:
    """The error for a server that does not answer, or stops answering."""
    return ConnectionError(
        cannot_fetch(
            source,
            str(why) or type(why).__name__,
            f"{kept}Check the network and the proxy (HTTPS_PROXY), or download it on another "
            "machine and pass the path of the file.",
        )
    )


def not_cached(source: str, folder: object) -> FileNotFoundError:
    """The error for a source that is not in the cache in offline mode."""
    return FileNotFoundError(
        cannot_fetch(
            source,
            f"HF_HUB_OFFLINE is set, and it is not completely in the cache {folder}",
            "Unset HF_HUB_OFFLINE, copy a cache that has it, or pass the path of a file.",
        )
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
