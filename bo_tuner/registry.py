"""`Registry`: what is found by name: the built-in ones, those of installed packages, and those that a program registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from bo_tuner.errors import ConfigError
from bo_tuner.text import did_you_mean

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Things of one sort by name.

    Installed packages bring more by an entry point in `group`, whose value is the thing itself. They are loaded once a name is asked for
    that is not there, or all names are.
    """

    def __init__(self, what: str, *, group: str, name_of: Callable[[T], str], built_in: tuple[T, ...] = ()) -> None:
        """Begin with the built-in ones.

        Args:
            what: What a name is called in messages, as `pipeline_schedule`.
            group: Of entry points.
            name_of: The name of a thing.
            built_in: In the order in which messages list them.
        """
        self._what = what
        self._group = group
        self._name_of = name_of
        self._found = {name_of(one): one for one in built_in}
        self._is_complete = False

    def register(self, one: T) -> T:
        """Add a thing; also as a decorator of a class.

        Raises:
            ConfigError: Another one has its name.
        """
        name = self._name_of(one)
        if self._found.setdefault(name, one) is not one and not _is_same(self._found[name], one):
            raise ConfigError(f"each {self._what} must have a name of its own; there is a {name} already")
        self._found[name] = one  # the newest, where a module was loaded again
        return one

    def find(self, name: str) -> T:
        """By its name.

        Raises:
            ConfigError: There is none; the message lists those there are.
        """
        if name not in self:
            near = did_you_mean(name, self)
            raise ConfigError(f"{self._what} must be one of {', '.join(self)}; got {name!r}{near}")
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._found:
            self._complete()
        return name in self._found

    def __getitem__(self, name: str) -> T:
        if name not in self._found:
            self._complete()
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        self._complete()
        return iter(tuple(self._found))

    def __len__(self) -> int:
        self._complete()
        return len(self._found)

    def _complete(self) -> None:
        if self._is_complete:
            return
        self._is_complete = True
        from importlib.metadata import entry_points

        for point in entry_points(group=self._group):
            try:
                self.register(point.load())
            except Exception as error:
                self._is_complete = False
                package = point.dist.name if point.dist is not None else point.value
                raise ConfigError(
                    f"{self._group} must load {point.value} of {package}, and it fails ({type(error).__name__}: {error}): "
                    "mend or uninstall that package"
                ) from error


def _is_same(one: Any, other: Any) -> bool:
    """Made by the same code: a module that was loaded twice."""
    where = [(getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)) for thing in (one, other)]
    return None not in where[0] and where[0] == where[1]
