"""`bo-tuner dashboard`: the Optuna dashboard on our studies, for this machine only."""

from __future__ import annotations

import contextlib
import sys
from socketserver import ThreadingMixIn
from typing import Annotated
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import typer

from bo_tuner.cli.options import AsJson, Debug, Storage, print_json
from bo_tuner.errors import ConfigError, StoreError
from bo_tuner.report import dashboard_figures
from bo_tuner.storage import Location, StudyStore

__all__ = ["dashboard"]

_HOST = "127.0.0.1"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # the base class calls it so
        """Say nothing for every request."""


def dashboard(
    study: Annotated[str | None, typer.Argument(metavar="STUDY", help="Study to open at.", show_default="all")] = None,
    port: Annotated[int, typer.Option(help="Port on localhost; 0 takes a free one.")] = 8080,
    storage: Storage = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Serve the Optuna dashboard on localhost until Ctrl-C."""
    location = Location(storage)
    path = ""
    if study is not None:
        store = StudyStore.existing(location, study)
        store.write_note()
        manifest = store.manifest()
        if manifest is not None:
            store.write_figures(dashboard_figures(store.records(), n_ranks=manifest.cluster.n_ranks))
        path = f"/dashboard/studies/{store.id}"
    elif not location.holds_anything:
        raise StoreError(f"no studies in {location.shown_url}; bo-tuner tune MODEL starts one")
    import optuna_dashboard

    try:
        application = optuna_dashboard.wsgi(location.open())
        server = make_server(_HOST, port, application, server_class=_Server, handler_class=_Quiet)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port must be free on {_HOST}, and {port} is not ({error}); use --port 0 for any"
        ) from error
    url = f"http://{_HOST}:{server.server_port}{path}"
    with server:
        if as_json:
            print_json({"url": url})
        else:
            print(url)
        sys.stdout.flush()
        print("Ctrl-C ends it", file=sys.stderr)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
