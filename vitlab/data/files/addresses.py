"""Addresses of files, on disk or anywhere that fsspec supports: what they open, and what goes wrong there."""

import contextlib
from collections.abc import Iterator
from typing import Any

from vitlab.errors import one_line


class Unusable(ValueError):
    """The content of a file cannot be used, as its message says.

    >>> issubclass(Unusable, ValueError)
    True
    """


def is_remote(address: str) -> bool:
    """Return whether an address is more than a path.

    >>> is_remote("s3://bucket/train-000.tar"), is_remote("shards/train-000.tar")
    (True, False)
    """
    return "://" in address or "::" in address


def opened(address: str, once: bool = False) -> tuple[Any, str]:
    """Return the file system of an address and the path there.

    Args:
        address: The address.
        once: Whether requests are made once, as the caller repeats them. Clients of S3 would repeat them silently, up
            to 25 times, unless `config_kwargs` for s3 in the configuration of fsspec says how often.
    """
    import fsspec

    if "reference:" in address.replace("::", ":"):
        raise ValueError(f"{address}: references are not supported, because their templates can run code")
    if not once or not address.startswith(("s3://", "s3a://")):
        return fsspec.core.url_to_fs(address)
    given = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    fs, path = fsspec.core.url_to_fs(address, config_kwargs={"retries": {"total_max_attempts": 1}, **given})
    fs.retries = 1
    return fs, path


@contextlib.contextmanager
def told(address: str) -> Iterator[None]:
    """Turn whatever goes wrong at an address into a ValueError of one line that names it.

    >>> with told("s3://bucket/0.tar"):
    ...     raise ConnectionError("no route")
    Traceback (most recent call last):
        ...
    ValueError: s3://bucket/0.tar cannot be read: no route
    """
    try:
        yield
    except Unusable:
        raise
    except FileNotFoundError as error:  # fsspec also says so where a server refuses, or cannot be reached
        answer = getattr(cause := error.__cause__, "response", None) or {}  # of S3
        status = getattr(cause, "status", None) or answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if cause is None or status in (404, 410):
            raise ValueError(f"there is no {address}") from None
        said = f"the server answers {status} {getattr(cause, 'message', '')}" if status else one_line(cause)
        raise ValueError(f"{address} cannot be read: {said.strip()}") from None
    except Exception as error:  # networks and protocols fail in many ways
        raise ValueError(f"{address} cannot be read: {one_line(error)}") from None
