"""Errors of storage behind fsspec: the operation, the object, the cause and the fix, without credentials."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from paceline.credentials import redact
from paceline.errors import ConfigError

# The extra that brings the file system of a scheme. All of these are object stores.
EXTRAS = {
    **dict.fromkeys(["s3", "s3a"], "s3"),
    **dict.fromkeys(["gs", "gcs"], "gcs"),
    **dict.fromkeys(["abfs", "abfss", "az"], "azure"),
}
_LONGEST_TEXT = 300  # characters of an error; Azure's list all ways to log in
# The number of an error, and not a part of a name such as "step-404".
_CODE = r"(?<![-\w/]){}\b(?![-/])"
_FIXES = (
    (
        r"credentials|access key id|signature|ClientAuthentication|ExpiredToken|token.*expired|"
        rf"connection_string or account_name|Unauthorized|{_CODE.format(401)}",
        "give credentials to all ranks: {credentials}.",
    ),
    (
        r"NoSuchBucket|bucket (?:does not|doesn't) exist|ContainerNotFound|FileNotFoundError|"
        + _CODE.format(404),
        "create the {bucket}, or correct its name, region and endpoint.",
    ),
    (
        rf"SlowDown|request rate|TooManyRequests|ServerBusy|{_CODE.format('(?:429|503)')}",
        "the storage limits the rate of requests: save less often, or ask for a higher limit.",
    ),
    (
        rf"PermissionError|AccessDenied|Forbidden|{_CODE.format(403)}",
        "permit these credentials to list, read, write and delete objects in the {bucket}.",
    ),
    (
        r"Connect|Timeout|timed out|gaierror|Name or service",
        "check the network, the endpoint and the region.",
    ),
)
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of the machine",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or a service account "
    "of the machine",
    "azure": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or "
    "AZURE_STORAGE_CONNECTION_STRING",
}


class StorageError(OSError):
    """An operation on remote storage failed (`fix`: one action)."""

    def __init__(self, text: str, fix: str = "") -> None:
        super().__init__(text)
        self.fix = fix


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
    told = " ".join(f"{type(e).__name__}: {e}" for e in _chain(error))
    extra = EXTRAS.get(address.partition("://")[0], "")
    fix = next((text for pattern, text in _FIXES if re.search(pattern, told, re.I)), "")
    fix = fix.format(
        credentials=_CREDENTIALS.get(extra, "see the file system's documentation"),
        bucket="container" if extra == "azure" else "bucket",
    )
    kind = ObjectMissing if isinstance(error, FileNotFoundError) else StorageError
    text = textwrap.shorten(redact(str(error)).rstrip("."), _LONGEST_TEXT) or "no message"
    return kind(f"cannot {operation} {address}: {type(error).__name__}: {text}", fix)


def _chain(error: BaseException) -> Iterator[BaseException]:
    next_error: BaseException | None = error
    while next_error is not None:
        yield next_error
        next_error = next_error.__cause__ or next_error.__context__
