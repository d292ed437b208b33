"""Which environment variables hold credentials, and how to remove credentials from a text."""

from __future__ import annotations

import os
import re

_SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|CONNECTION_STRING|"
    r"(?:ACCESS|ACCOUNT|SHARED|PRIVATE)_?KEY|"
    # Only at the end: MAX_TOKENS, TOKENIZERS_PARALLELISM, KEY_FRAMES and PWD are settings.
    r"(?:^|_)(?:KEY|TOKEN|PASS|AUTH|SAS|JWT|SIGNATURE)$|_PWD$",
    re.I,
)
# These hold a path or an address of the credentials, and not the credentials.
_PLACE = re.compile(r"_(?:FILE|PATH|DIR|URI)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.I)
_MIN_LENGTH = 6  # a shorter value is a part of other words
_HIDDEN = "***"
_WORD = (
    r"secret|token|password|passwd|signature|credential|sas|connection_string|"
    r"(?:access|account|shared|private)_?key"
)
_VALUE = r"""(?:"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|[^\s&,;"']+)"""
_PATTERNS = (
    (re.compile(r"-----BEGIN [^-]*PRIVATE KEY-----.*?(?:-----END [^-]*-----|$)", re.S), _HIDDEN),
    (re.compile(r"(://)[^/\s@]*:[^\s@]*@"), rf"\1{_HIDDEN}@"),
    (re.compile(r"(\w+://[^\s?\"'<>]+)\?[^\s\"'<>]+"), rf"\1?{_HIDDEN}"),
    (
        re.compile(rf"(\b[\w-]*(?:{_WORD}|\bsig)[\w-]*(?: ?= ?|[\"']?: ?)){_VALUE}", re.I),
        rf"\1{_HIDDEN}",
    ),
    (re.compile(r"(?i)\b((?:bearer|sharedkey|basic) )[\w.~+/=:-]+"), rf"\1{_HIDDEN}"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), _HIDDEN),
)


def is_secret_name(name: str) -> bool:
    """Whether an environment variable holds a credential, by its name."""
    return bool(_SECRET_NAME.search(name)) and not _PLACE.search(name)


def redact(text: str) -> str:
    """Replace what looks like a credential, and the values of variables that hold credentials."""
    values = [v for name, v in os.environ.items() if is_secret_name(name) and len(v) >= _MIN_LENGTH]
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, _HIDDEN)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
