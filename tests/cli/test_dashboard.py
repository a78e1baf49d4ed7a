"""`bo-tuner dashboard`: the Optuna dashboard shows our studies as they are, to this machine only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from playwright.sync_api import Browser, expect


@pytest.fixture(scope="module")
def dashboard(program: str, tuned: CompletedProcess[str], study_folder: Path) -> Iterator[tuple[Popen[str], str]]:
    """A running dashboard, and the URL that it printed."""
    process = subprocess.Popen(
        [program, "dashboard", "shared", "--port", "0", "--json"],
        cwd=study_folder,
        env=os.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    printed = ""
    while not printed.endswith("}\n"):
        line = process.stdout.readline()
        assert line, printed
        printed += line
    try:
        yield process, json.loads(printed)["url"]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def asked(url: str, path: str) -> dict[str, Any]:
    """What the API says."""
    parts = urlsplit(url)
    with urllib.request.urlopen(f"{parts.scheme}://{parts.netloc}{path}", timeout=30) as answer:
        data: dict[str, Any] = json.load(answer)
    return data


@pytest.fixture(scope="module")
def detail(dashboard: tuple[Popen[str], str]) -> dict[str, Any]:
    """Our study as the API gives it."""
    _, url = dashboard
    study_id = urlsplit(url).path.rpartition("/")[2]
    return asked(url, f"/api/studies/{study_id}?after=0")


def test_the_api_lists_our_study(dashboard: tuple[Popen[str], str]) -> None:
    _, url = dashboard
    studies = asked(url, "/api/studies")["study_summaries"]
    assert [study["study_name"] for study in studies] == ["shared"]
    assert str(studies[0]["study_id"]) == urlsplit(url).path.rpartition("/")[2]


def test_the_printed_page_opens(dashboard: tuple[Popen[str], str]) -> None:
    _, url = dashboard
    with urllib.request.urlopen(url, timeout=30) as page:
        assert page.status == 200
        assert b"<html" in page.read().lower()


def test_it_listens_on_localhost_only(dashboard: tuple[Popen[str], str]) -> None:
    process, url = dashboard
    connections = psutil.Process(process.pid).net_connections(kind="inet")
    listening = [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", urlsplit(url).port)]


def test_outcome_and_reason_are_attributes_of_every_trial(detail: dict[str, Any], tuned: CompletedProcess[str]) -> None:
    told = json.loads(tuned.stdout)["trials"]
    assert len(detail["trials"]) == len(told)
    for trial, ours in zip(detail["trials"], told, strict=True):
        attributes = {attribute["key"]: attribute["value"] for attribute in trial["user_attrs"]}
        assert attributes["outcome"] == ours["outcome"]
        assert attributes["reason"] == ours["reason"]


def test_constraints_are_there_and_met_by_what_completed(detail: dict[str, Any], tuned: CompletedProcess[str]) -> None:
    told = json.loads(tuned.stdout)["trials"]
    for trial, ours in zip(detail["trials"], told, strict=True):
        assert len(trial["constraints"]) == 1
        assert (trial["constraints"][0] <= 0) == (ours["outcome"] not in ("oom", "guarded", "host_oom"))


def test_values_are_samples_per_second(detail: dict[str, Any], tuned: CompletedProcess[str]) -> None:
    told = {trial["number"]: trial["samples_per_s"] for trial in json.loads(tuned.stdout)["trials"]}
    values = {trial["number"]: trial["values"][0] for trial in detail["trials"] if trial["state"] == "Complete"}
    assert values == pytest.approx({number: value for number, value in told.items() if value is not None})


FIGURES = {"throughput", "memory", "history-trials", "history-time", "step-time", "importances"}


def test_our_figures_are_there(detail: dict[str, Any]) -> None:
    figures = {graph["id"]: json.loads(graph["graph_object"]) for graph in detail["plotly_graph_objects"]}
    assert set(figures) == FIGURES
    assert any(trace.get("name") == "best so far" for trace in figures["history-trials"]["data"])


def test_our_figures_are_drawn_in_a_browser(dashboard: tuple[Popen[str], str], browser: Browser) -> None:
    _, url = dashboard
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    for name in FIGURES:
        expect(page.locator(f"[id='user-defined-plot:{name}'] .main-svg").first).to_be_visible()
    expect(page.locator("[id='user-defined-plot:history-trials'] .point").first).to_be_visible()
    assert errors == []


def test_the_note_holds_our_best(detail: dict[str, Any], tuned: CompletedProcess[str]) -> None:
    best = json.loads(tuned.stdout)["best"]
    assert f"`{best['name']}` (trial {best['number']})" in detail["note"]["body"]


def test_interrupting_it_ends_it_with_exit_code_0(dashboard: tuple[Popen[str], str]) -> None:
    process, _ = dashboard
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert stdout == ""  # the URL was all
    assert stderr == "Ctrl-C ends it\n"
