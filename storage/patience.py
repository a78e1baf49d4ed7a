"""`PatientStorage`: Optuna's storage on a database server that may restart meanwhile."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import optuna
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

__all__ = ["PatientStorage"]

WAITS_S = 300.0
"""For a server that has answered before."""
_TRY_EVERY_S = 0.5
_MOST_TRIES = 5
"""Of a call whose connection breaks in its midst, again and again."""
_CALLS = (
    "create_new_study",
    "create_new_trial",
    "get_all_trials",
    "get_best_trial",
    "get_study_directions",
    "get_study_id_from_name",
    "get_study_name_from_id",
    "get_study_system_attrs",
    "get_study_user_attrs",
    "get_trial",
    "get_trial_id_from_study_id_trial_number",
    "set_study_system_attr",
    "set_study_user_attr",
    "set_trial_state_values",
    "set_trial_system_attr",
    "set_trial_user_attr",
)
"""Of Optuna's storage: all that is called while a study is driven. Repeating one changes nothing more, but for a new trial."""


class PatientStorage(RDBStorage):
    """Once connected it waits for its server where that goes away, says so, and repeats the call whose connection broke."""

    def __init__(self, url: str, *, connect_args: dict[str, Any]) -> None:
        """Connect, without patience: a server that never answered is an error at once."""
        is_server = make_url(url).get_backend_name() != "sqlite"
        super().__init__(url, engine_kwargs={"connect_args": connect_args, "pool_pre_ping": is_server})
        self.is_patient = True
        """Taken back to leave without waiting."""
        self._telling = threading.Lock()
        """Of several threads that wait, as the one that renews the lease, one tells."""
        if is_server:
            event.listen(self.engine, "do_connect", self._connect)

    def repeated(self, call: Callable[[], Any], *, is_done: Callable[[], bool] = lambda: False) -> Any:
        """Make a call, again where its connection breaks.

        Args:
            call: It may be made twice.
            is_done: After a break: the first one was carried out all the same, so that no other is needed.

        Returns:
            What the call returns; None where it was carried out and its answer was lost.
        """
        for n_left in reversed(range(_MOST_TRIES)):
            try:
                return call()
            except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
                if not _is_broken(error) or not n_left or not self.is_patient:
                    raise
                if is_done():
                    return None
        raise AssertionError("the last try returns or raises")

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Any = None) -> bool:
        """As Optuna's; a trial that was told before the connection broke stays as it is."""
        self.repeated(
            lambda: RDBStorage.set_trial_state_values(self, trial_id, state, values),
            is_done=lambda: self.get_trial(trial_id).state == state,
        )
        return True

    def _connect(self, dialect: Any, record: object, arguments: Any, options: Any) -> Any:
        """A new connection, for SQLAlchemy."""
        until = time.monotonic() + WAITS_S
        has_told = False
        try:
            while True:
                try:
                    connection = dialect.connect(*arguments, **options)
                except dialect.loaded_dbapi.OperationalError:
                    if not self.is_patient or time.monotonic() > until:
                        raise
                    if not has_told and self._telling.acquire(blocking=False):
                        has_told = True
                        _say(
                            f"the storage does not answer: waiting for it, up to {WAITS_S / 60:g} min "
                            "(Ctrl-C ends this run; the same command goes on with the study)"
                        )
                    time.sleep(_TRY_EVERY_S)
                else:
                    if has_told:
                        _say("the storage answers again")
                    return connection
        finally:
            if has_told:
                self._telling.release()


def _is_broken(error: BaseException) -> bool:
    """A connection was lost."""
    causes = (error, error.__cause__, error.__context__)
    return any(isinstance(cause, DBAPIError) and cause.connection_invalidated for cause in causes)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _repeating(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: PatientStorage, *arguments: Any, **options: Any) -> Any:
        return self.repeated(lambda: method(self, *arguments, **options))

    return call


for _name in _CALLS:
    if _name not in vars(PatientStorage):
        setattr(PatientStorage, _name, _repeating(getattr(RDBStorage, _name)))
