"""Secrets in what is recorded, served, logged and said: this module alone decides what is a secret, and shows ``***`` for it.

- By name: ``--token X``, ``--db-password=X``, ``WANDB_API_KEY=X``, ``auth.secret: X``, keys of a configuration. The name ends in a
  word that says so (``token``, ``password``, ``secret``, ``api_key``, …); ``max_tokens``, ``pad_token`` and ``token_file`` are not secrets.
- In a URL, wherever it is: the password before the host (that of a database may hold anything but blanks), and parameters by name
  (``?sslpassword=…``, ``&X-Amz-Signature=…``).
- By shape: tokens of known services (``hf_…``, ``ghp_…``, ``sk-…``, ``AKIA…``, JSON web tokens), and what follows ``Bearer``.

What is masked is not kept anywhere. Masking what is masked changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TypeVar, overload

__all__ = ["MASK", "arguments", "is_secret", "named", "text"]

MASK = "***"

_Value = TypeVar("_Value")
_Plain = str | int | float | bool | None

_WORDS = frozenset(
    (
        "password",
        "passwd",
        "passphrase",
        "passcode",
        "pwd",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "token",
        "auth",
        "authorization",
        "cookie",
        "apikey",
        "bearer",
    )
)
_ENDINGS = ("password", "passwd", "passphrase", "apikey", "authtoken", "accesstoken", "secretkey", "accesskey")
_KEYS = frozenset(
    ("api", "access", "secret", "private", "encryption", "signing", "account", "storage", "master", "service", "subscription")
)
_OWNERS = frozenset(("db", "user", "smtp", "mysql", "redis", "mail", "proxy", "login"))  # of a ``pass``
_OF_MODELS = frozenset(
    (
        "pad",
        "eos",
        "bos",
        "unk",
        "cls",
        "sep",
        "mask",
        "sos",
        "special",
        "start",
        "end",
        "stop",
        "begin",
        "first",
        "last",
        "next",
        "image",
        "class",
        "per",
        "input",
        "output",
        "vocab",
        "prompt",
    )
)
_PARAMETERS = frozenset(("key", "sig", "signature", "credential", "code"))  # besides those above, in a URL

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_USERINFO = re.compile(r"(?<![\w+.-])([A-Za-z][\w+.-]*://)([^\s/?#'\"@:]*):([^\s/?#'\"]*)@")
_DATABASE = re.compile(r"(?i)(?<![\w+.-])(postgres(?:ql)?(?:\+\w+)?://)([^\s:/]*):([^\s@]*(?:@[^\s/?#'\"@]*)*)@")
"""The user and the password of a database as SQLAlchemy reads them; the first ``@`` of a password need not be its last."""
_PARAMETER = re.compile(r"""([?&;])([\w.%~-]+)=("[^"]*"|'[^']*'|["']?[^\s&;#'"]+)""")
_ASSIGNED = re.compile(r"""(["']?)(?<![\w.-])([\w.-]+)\1\s*[=:]\s*|(?<!\S)--([\w.-]+)\s+(?!-)""")
_QUOTED = r""""[^"]*"|'[^']*'"""
_ASSIGNED_VALUE = re.compile(
    rf"""(?:{_QUOTED})(?:(?!\W*[A-Za-z_][\w.-]*["']?\s*[=:])(?:{_QUOTED}|[^\s,;&}}\])"'])+)?"""
    r"""|["'][^\n]*|(?:(?i:bearer|basic)\s+)?[^\s,;&}\])"'](?:[^\s,;&}\])]*[^\s,;&}\])"'])?"""
)
"""What stands in quotes and what is joined to it, unless that is the next name; after a quote that never ends, the rest of the line; else
all up to a blank or a sign that ends it."""
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|npm_[A-Za-z0-9]{30,}"
    r"|sk-(?=[\w-]*[0-9])(?=[\w-]*[A-Z])[\w-]{20,}|xox[abeprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)(?![A-Za-z0-9])"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)([\w~+/.=-]{8,})")


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a value with this name is a secret."""
    words = [word.lower() for word in _PART.findall(name)]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return before not in _OF_MODELS
    if last in ("key", "keys"):
        return before in _KEYS
    if last == "pass":
        return before in _OWNERS or name.strip("-") == "pass"
    return last in _WORDS or last.endswith(_ENDINGS)


def text(said: str) -> str:
    """The text with the secrets in URLs, and anything that looks like a secret, masked."""
    if "://" in said:
        for pattern in (_DATABASE, _USERINFO):
            said = pattern.sub(rf"\1\2:{MASK}@", said)
    said = _PARAMETER.sub(_parameter, said) if "?" in said else said
    said = _BEARER.sub(rf"\1\2{MASK}", said)
    return _SHAPES.sub(MASK, said)


def arguments(argv: Iterable[str]) -> tuple[str, ...]:
    """The command line with secrets masked: the word after ``--token`` in ``--token X``, and the value in ``NAME=X``, ``name: X`` and
    ``{"name": "X"}``; also in a word that is itself a command line, as of ``sh -c``.
    """
    found: list[str] = []
    is_next = False
    for word in argv:
        found.append(MASK if is_next and not word.startswith("--") else _in_full(word))
        is_next = word.startswith("-") and "=" not in word and word.split() == [word] and is_secret(word)
    return tuple(found)


@overload
def named(values: Mapping[str, _Plain]) -> dict[str, _Plain]: ...
@overload
def named(values: Mapping[str, _Value]) -> dict[str, _Value | str]: ...
def named(values: Mapping[str, _Value]) -> dict[str, _Value | str]:
    """The configuration with secrets masked: texts and numbers whose key says that they are secret, and secrets in other texts."""
    return {key: _value(key, value) for key, value in values.items()}


def _value(key: str, value: _Value) -> _Value | str:
    if isinstance(value, str):
        return MASK if value and is_secret(key) else _in_full(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return MASK if is_number and is_secret(key) and not key.lower().endswith("token") else value


def _in_full(said: str) -> str:
    """The text with all secrets masked. What a name hides may end a parameter of a URL elsewhere, which is looked at again."""
    return text(_without_assigned(text(said)))


def _without_assigned(word: str) -> str:
    """The word with the values in ``NAME=X``, ``name: X``, ``"name": "X"`` and ``--name X`` masked, however deep they are nested."""
    kept, at = [], 0
    for match in _ASSIGNED.finditer(word):
        value = _ASSIGNED_VALUE.match(word, match.end()) if match.start() >= at and is_secret(match[2] or match[3]) else None
        if value is not None and value[0].lower() not in ("true", "false", "none", "null"):
            kept += [word[at : match.end()], _masked(value[0])]
            at = value.end()
    return "".join([*kept, word[at:]])


def _masked(value: str) -> str:
    """The mask, in the quotes that the value has."""
    quote = value[0] if value[0] in "\"'" else ""
    return f"{quote}{MASK}{quote}"


def _parameter(match: re.Match[str]) -> str:
    sign, name, value = match.groups()
    last = [word.lower() for word in _PART.findall(name)][-1:]
    return f"{sign}{name}={_masked(value)}" if is_secret(name) or (last and last[0] in _PARAMETERS) else match[0]
