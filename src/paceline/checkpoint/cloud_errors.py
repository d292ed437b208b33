"""Errors of storage behind fsspec: the operation, the object and the cause, without credentials."""

from __future__ import annotations

import re
import textwrap

from paceline.credentials import redact
from paceline.errors import ConfigError

# The extra that brings the file system of a scheme. All of these are object stores.
EXTRAS = {
    **dict.fromkeys(["s3", "s3a"], "s3"),
    **dict.fromkeys(["gs", "gcs"], "gcs"),
    **dict.fromkeys(["abfs", "abfss", "az"], "azure"),
}
_LONGEST_TEXT = 300  # characters of an error; Azure's list all ways to log in
FIX = (
    "check the bucket and the network, the credentials of all ranks, and their permission to list, read, "
    "write and delete there."
)


class StorageError(OSError):
    """An operation on remote storage failed."""


class ObjectMissing(StorageError, FileNotFoundError):
    """An object or its bucket does not exist."""


def check_address(url: str) -> None:
    """Refuse an address that holds credentials, or whose package is not installed.

    Raises:
        ConfigError: see above; the text does not repeat the credentials.
    """
    scheme, _, rest = url.partition("://")
    if re.match(r"[^/@]*:[^@]*@", rest) or "?" in rest:
        raise ConfigError(
            f"the address {redact(url)} holds credentials or a query.",
            why="logs and errors name the address.",
            fix="give credentials by the environment or a profile, and remove them from the address.",
        )
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        raise ConfigError(
            f"{scheme}:// needs a package that is not installed: {error}.",
            fix=f"pip install 'paceline[{extra}]' on all hosts." if extra else "install it.",
        ) from None
    except ValueError:
        raise ConfigError(
            f"fsspec does not know {scheme}://.", fix="use a path, s3://, gs:// or abfs://."
        ) from None


def as_storage_error(error: Exception, operation: str, address: str) -> StorageError:
    """The error to raise for an exception of a file system.

    Args:
        operation: A verb: "write".
        address: The object, with scheme and bucket.
    """
    kind = ObjectMissing if isinstance(error, FileNotFoundError) else StorageError
    text = textwrap.shorten(redact(str(error)).rstrip("."), _LONGEST_TEXT) or "no message"
    return kind(f"cannot {operation} {address}: {type(error).__name__}: {text}")
