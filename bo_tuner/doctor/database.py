"""Whether the studies' database answers; nothing is made or written in it."""

from __future__ import annotations

from bo_tuner.doctor.finding import Finding, fail, ok
from bo_tuner.errors import BoTunerError
from bo_tuner.storage import Location
from bo_tuner.storage.location import storage_answers

__all__ = ["database"]

_CONNECT_TIMEOUT_S = 10
_MEND = "start the database or mend the URL in --storage; without --storage, SQLite in ./bo_tuner_studies is used"


def database(url: str | None) -> Finding:
    """The database of `--storage`, or the default one.

    Args:
        url: As Optuna takes it; None for SQLite in `./bo_tuner_studies`.
    """
    name = "storage"
    try:
        location = Location(url)
        if not location.holds_anything:
            location.check_writable()
            return ok(name, f"{location.shown_url}, not made yet; can be", storage=location.shown_url)
        return ok(name, f"{location.shown_url} answers, {_holds(location, url)}", storage=location.shown_url)
    except BoTunerError as error:
        return fail(name, str(error).partition("; mend it")[0], _MEND)


def _holds(location: Location, url: str | None) -> str:
    """What is in it. Optuna would make its tables in an empty database, so it is asked for them without Optuna."""
    from sqlalchemy import create_engine, inspect, text
    from sqlalchemy.engine import make_url

    parsed = make_url(url or location.shown_url)  # the default one has no password to hide
    is_file = parsed.get_backend_name() == "sqlite"
    timeout = {"timeout": _CONNECT_TIMEOUT_S} if is_file else {"connect_timeout": _CONNECT_TIMEOUT_S}
    with storage_answers(location.shown_url):
        engine = create_engine(parsed, connect_args=timeout)
        try:
            with engine.connect() as connection:
                if not inspect(connection).has_table("studies"):
                    return "no studies yet"
                n_studies = int(connection.execute(text("SELECT COUNT(*) FROM studies")).scalar_one())
                return f"{n_studies} studies" if n_studies != 1 else "1 study"
        finally:
            engine.dispose()
