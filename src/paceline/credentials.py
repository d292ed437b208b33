"""Which environment variables hold credentials, and how to remove credentials from a text."""

from __future__ import annotations

import os
import re

_SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|CONNECTION_STRING|"
    r"(?:ACCESS|ACCOUNT|SHARED|PRIVATE)_?KEY|"
    # Only at the end: MAX_TOKENS, TOKENIZERS_PARALLELISM, KEY_FRAMES and PWD are settings.
    r"(?:^|_)(?:KEY|TOKEN|PASS|PAT|DSN|AUTH|SAS|JWT|SIGNATURE)$|_PWD$|WEBHOOK",
    re.I,
)
# These hold a path or an address of the credentials, and not the credentials.
_PLACE = re.compile(r"_(?:FILE|PATH|DIR|URI)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.I)
_MIN_LENGTH = 6  # a shorter value is a part of other words
_HIDDEN = "***"
_WORD = (
    r"secret|password|passwd|passphrase|signature|credential|connection_string|api_?key|"
    r"(?:access|account|shared|private)_?key"
)
_QUOTED = r"""(?:"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?)"""
# "token" is a common word of models: a number or a short word after it is not a credential.
_TOKEN_VALUE = r"""(?:"[^"]{8,}"?|'[^']{8,}'?|(?=[\w.~+/-]*\d)(?=[\w.~+/-]*[a-z])[\w.~+/=-]{8,})"""
_PATTERNS = tuple(
    (re.compile(pattern, re.I | re.S), replacement)
    for pattern, replacement in (
        (r"-----BEGIN [^-]*PRIVATE KEY-----.*?(?:-----END [^-]*-----|$)", _HIDDEN),
        (r"(://)[^/\s@]*:[^\s@]*@", rf"\1{_HIDDEN}@"),
        (r"(\w+://[^\s?\"'<>]+)\?[^\s\"'<>]+", rf"\1?{_HIDDEN}"),
        (
            rf"(\b[\w-]*(?:{_WORD}|\bsig\b|\bsas\b)[\w-]*(?: ?= ?|[\"']?: ?))"
            rf"(?:{_QUOTED}|[^\s&,;\"']+)",
            rf"\1{_HIDDEN}",
        ),
        (rf"(\b(?:[\w-]*[_-])?token(?: ?= ?|[\"']?: ?)){_TOKEN_VALUE}", rf"\1{_HIDDEN}"),
        (r"\b((?:bearer|sharedkey|basic) )[\w.~+/=:-]+", rf"\1{_HIDDEN}"),
        (r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}", _HIDDEN),
        # Hugging Face, GitHub, GitLab, OpenAI, Slack
        (r"\b(?:hf_|gh[opsur]_|github_pat_|glpat-|sk-|xox[abp]-)[\w-]{16,}", _HIDDEN),
    )
)


def is_secret_name(name: str) -> bool:
    """Whether an environment variable holds a credential, by its name."""
    return bool(_SECRET_NAME.search(name)) and not _PLACE.search(name)


def public_variables(prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables of the environment with these prefixes, without credentials."""
    return {
        name: redact(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes) and not is_secret_name(name)
    }


def redact(text: str) -> str:
    """Replace what looks like a credential, and the values of variables that hold credentials.

    Every text of an exception that leaves the process, other than to the terminal, goes through it.
    """
    values = [v for name, v in os.environ.items() if is_secret_name(name) and len(v) >= _MIN_LENGTH]
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, _HIDDEN)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
