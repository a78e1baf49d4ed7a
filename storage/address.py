"""`Address`: a database's URL, which may hold a password: what people may see of it, and what it is known by."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bo_tuner.errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

__all__ = ["Address"]

_SECRET = re.compile(r"pass|pwd|secret|token|credential", re.IGNORECASE)
"""Names of parameters after `?` whose values nobody is to see."""
_HIDDEN = "***"
_PLAIN = re.compile(r"[\w.\\/ -]*")
"""Text with no place for a password: a name or a path."""


@dataclass(frozen=True, slots=True)
class Address:
    """A URL of a database, taken apart."""

    given: str
    """As it came, password and all."""
    url: URL

    @classmethod
    def of(cls, given: str) -> Address:
        """Take a URL apart.

        Raises:
            ConfigError: It cannot be read, or needs an unknown database. Nothing is shown of what may hold a password and was not understood.
        """
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError  # an unknown database is one too (NoSuchModuleError)

        must = '--storage must be a database URL, as in "sqlite:///studies.db" or "postgresql://user@host/name"'
        try:
            url = make_url(given)
        except (ArgumentError, ValueError):
            url = None
        if url is None or _is_doubtful(url):
            came = f"got {given!r}" if _PLAIN.fullmatch(given) else "what came is not shown, as it may hold a password"
            raise ConfigError(f"{must}, with %40 for @ and %3A for : in a password; {came}") from None
        address = cls(given, url)
        try:
            url.get_dialect()
        except (ArgumentError, ImportError, ValueError) as error:
            raise ConfigError(f"{must}; got {address.shown!r}: {str(error).splitlines()[0]}") from error
        return address

    @property
    def shown(self) -> str:
        """For people: passwords are hidden."""
        url = self.url
        query = {name: _HIDDEN if _SECRET.search(name) and value else value for name, value in self.url.query.items()}
        return url.set(query=query).render_as_string(hide_password=True).replace("%2A%2A%2A", _HIDDEN)

    @property
    def identity(self) -> str:
        """What the database is known by: the URL as it came, or without its passwords where it has some, which may change."""
        secrets = [name for name in self.url.query if _SECRET.search(name)]
        if self.url.password is None and not secrets:
            return self.given
        bare = self.url.difference_update_query(secrets)
        return bare._replace(password=None).render_as_string(hide_password=False)


def _is_doubtful(url: URL) -> bool:
    """An @ stands where none belongs, as after a password with an @ in it: its rest would be taken for the host."""
    if url.get_backend_name() == "sqlite":
        return False
    return any("@" in part for part in (url.host or "", url.database or "", url.username or ""))
