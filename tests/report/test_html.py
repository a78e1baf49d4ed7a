"""The report in a real browser: everything drawn, nothing fetched, readable on a phone, light and dark.

Screenshots go to the folder that BO_TUNER_SCREENSHOTS names, by default build/screenshots.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from bo_tuner.budget import Spent
from bo_tuner.config import TrainConfig
from bo_tuner.errors import StoreError
from bo_tuner.objectives.training import deepspeed_config
from bo_tuner.report import ReportedStudy, report_html, write_report
from bo_tuner.trial import best_of
from tests.report.studies import (
    GIB,
    HOSTILE,
    N_RANKS,
    edge_studies,
    measured,
    numbered,
    reported_manifest,
    rich_trials,
    stored,
)

SCREENSHOTS = Path(os.environ.get("BO_TUNER_SCREENSHOTS") or Path(__file__).parents[2] / "build" / "screenshots")
Scheme = Literal["light", "dark"]
EDGES = edge_studies()

TICK = "#throughput .xtick text"

FIGURES = """() => [...document.querySelectorAll('.plot')].map(plot => {
    const box = plot.querySelector('.main-svg').getBoundingClientRect();
    const marks = [...plot.querySelectorAll('.trace path, .boxlayer path')];
    return {
        id: plot.id, width: box.width, height: box.height, room: plot.clientWidth,
        n_marks: marks.filter(mark => { const box = mark.getBoundingClientRect(); return box.width + box.height > 0; }).length,
        broken: marks.filter(mark => /NaN|Infinity|undefined/.test(mark.outerHTML)).length,
        notes: [...plot.querySelectorAll('.annotation-text')].map(note => note.textContent),
    };
})"""

CONTRASTS = """() => {
    const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
    const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = node => {
        for (; node; node = node.parentElement) {
            const colour = parse(getComputedStyle(node).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const found = [];
    for (const node of document.querySelectorAll('h1, h2, h3, p, dt, dd, td, th, summary, button, .badge, pre, code, .plot text')) {
        if (!node.textContent.trim() || !node.getClientRects().length) continue;
        const style = getComputedStyle(node);
        const isDrawn = node instanceof SVGElement;
        if (isDrawn && node.closest('.bars')) continue;  // on the bar, not on the page
        const [a, b] = [luminance(parse(isDrawn ? style.fill : style.color)), luminance(behind(isDrawn ? node.closest('.plot') : node))];
        found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.className.toString() || node.tagName, node.textContent.slice(0, 40)]);
    }
    return found.sort((x, y) => x[0] - y[0]);
}"""


@dataclass
class Visit:
    """An open page, and all that it complained about or asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextlib.contextmanager
def visited(
    browser: Browser, file: Path, *, width: int = 1280, scheme: Scheme = "light", **options: Any
) -> Generator[Visit]:
    """Open a report and wait until its figures are drawn."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
    page = context.new_page()
    visit = Visit(page)
    page.on("console", lambda message: visit.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    page.on("dialog", lambda dialog: visit.complaints.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: visit.requests.append(request.url))
    try:
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-drawn='6']", state="attached", timeout=60_000)
        yield visit
    finally:
        context.close()


def reported(name: str, records: list[Any], **told: Any) -> ReportedStudy:
    return ReportedStudy(
        name=name, records=records, manifest=reported_manifest(), spent=Spent(trials=len(records)), **told
    )


@pytest.fixture(scope="module")
def rich_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes for a rich study in a real database."""
    folder = tmp_path_factory.mktemp("rich")
    stored(folder, "rich", rich_trials()).location.open().engine.dispose()
    command = [sys.executable, "-m", "bo_tuner", "report", "rich"]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=400, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rich.html\n", "")
    return folder / "rich.html"


@pytest.fixture(scope="module")
def files(rich_file: Path) -> dict[str, Path]:
    """The rich report, and those of studies that have little to show."""
    found = {"rich": rich_file}
    for name, records in EDGES.items():
        found[name] = write_report(reported(name, records), rich_file.with_name(f"{name}.html"))
    return found


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        *(("rich", width, scheme) for width in (390, 1280) for scheme in ("light", "dark")),
        *((name, width, scheme) for name in EDGES for width, scheme in ((390, "dark"), (1280, "light"))),
    ],
)
def test_every_figure_is_drawn_without_an_error_a_request_or_a_horizontal_scroll(
    browser: Browser, files: dict[str, Path], name: str, width: int, scheme: Scheme
) -> None:
    with visited(browser, files[name], width=width, scheme=scheme) as visit:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        visit.page.screenshot(path=SCREENSHOTS / f"{name}-{width}-{scheme}.png", full_page=True)
        for figure in visit.page.evaluate(FIGURES):
            assert figure["broken"] == 0, figure
            assert figure["n_marks"] > 0 or len(figure["notes"]) == 1, figure
            assert figure["height"] > 100 and 0 < figure["width"] <= figure["room"], figure
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
        assert visit.complaints == []
        assert [url for url in visit.requests if not url.startswith(("data:", "blob:"))] == [files[name].as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_asks_for(browser: Browser, rich_file: Path, scheme: Scheme) -> None:
    with visited(browser, rich_file, scheme=scheme) as visit:
        lowest = visit.page.evaluate(CONTRASTS)
        assert len(lowest) > 200
        assert lowest[0][0] >= 4.5, lowest[:5]


def looks(page: Page) -> dict[str, str]:
    """Colours of the page, of a figure's text and of its grid."""
    found: dict[str, str] = page.evaluate(
        """() => ({
            page: getComputedStyle(document.body).backgroundColor,
            text: getComputedStyle(document.querySelector('#throughput .xtick text')).fill,
            grid: getComputedStyle(document.querySelector('#throughput .xgrid')).stroke,
        })"""
    )
    return found


def test_page_and_figures_follow_the_colour_scheme_while_open(browser: Browser, rich_file: Path) -> None:
    with visited(browser, rich_file, scheme="light") as visit:
        light = looks(visit.page)
        visit.page.emulate_media(color_scheme="dark")
        expect(visit.page.locator(TICK).first).not_to_have_css("fill", light["text"])
        dark = looks(visit.page)
        assert all(light[part] != dark[part] for part in light)
    with visited(browser, rich_file, scheme="dark") as visit:
        assert looks(visit.page) == dark


def test_it_prints_on_white_whatever_the_screen_shows(browser: Browser, rich_file: Path) -> None:
    with visited(browser, rich_file, scheme="dark") as visit:
        dark = looks(visit.page)
        visit.page.emulate_media(media="print")
        expect(visit.page.locator(TICK).first).not_to_have_css("fill", dark["text"])
        assert looks(visit.page)["page"] == "rgb(255, 255, 255)"
        assert visit.page.evaluate(CONTRASTS)[0][0] >= 4.5


def test_figures_take_the_width_of_a_window_that_is_resized(browser: Browser, rich_file: Path) -> None:
    with visited(browser, rich_file, width=1280) as visit:
        visit.page.set_viewport_size({"width": 390, "height": 900})
        for plot in visit.page.locator(".plot").all():
            room = plot.evaluate("plot => plot.clientWidth")
            assert room < 390
            expect(plot.locator(".main-svg").first).to_have_css("width", f"{room}px")
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_copy_button_puts_the_launch_command_on_the_clipboard(browser: Browser, rich_file: Path) -> None:
    with visited(browser, rich_file, permissions=["clipboard-read", "clipboard-write"]) as visit:
        button = visit.page.locator("button.copy").first
        button.click()
        expect(button).to_have_text("Copied")
        assert visit.page.evaluate("navigator.clipboard.readText()") == (
            "bo-tuner export rich --out job && job/launch.sh"
        )
        expect(button).to_have_text("Copy")


def test_without_a_clipboard_the_button_selects_the_command(browser: Browser, rich_file: Path) -> None:
    with visited(browser, rich_file) as visit:
        visit.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        visit.page.evaluate("document.execCommand = () => false")
        button = visit.page.locator("button.copy").first
        button.click()
        expect(button).to_have_text("Selected")
        assert (
            visit.page.evaluate("getSelection().toString().trim()") == "bo-tuner export rich --out job && job/launch.sh"
        )


def test_the_expander_shows_the_deepspeed_config_of_the_best(browser: Browser, rich_file: Path) -> None:
    best, manifest = best_of(rich_trials()), reported_manifest()
    assert best is not None
    with visited(browser, rich_file) as visit:
        config = visit.page.locator("#deepspeed")
        assert not config.is_visible()
        visit.page.locator("summary", has_text="DeepSpeed config").click()
        assert config.is_visible()
        assert json.loads(config.inner_text()) == deepspeed_config(
            best.config, manifest.workload, n_ranks=N_RANKS, device=manifest.cluster.device
        )


def test_a_click_on_a_heading_sorts_the_trials(browser: Browser, rich_file: Path) -> None:
    with visited(browser, rich_file) as visit:
        heading = visit.page.locator(".sortable th", has_text="samples/s")
        cells = ".sortable tbody tr td:nth-child(5)"
        keys = f"[...document.querySelectorAll('{cells}')].map(cell => Number(cell.dataset.key))"
        heading.locator("button").click()
        rising = visit.page.evaluate(keys)
        heading.locator("button").click()
        falling = visit.page.evaluate(keys)
        assert rising == sorted(rising) and falling == rising[::-1] and len(rising) == len(rich_trials())
        assert heading.get_attribute("aria-sort") == "descending"


def test_markup_in_a_reason_is_shown_as_it_is(browser: Browser, rich_file: Path) -> None:
    with visited(browser, rich_file) as visit:
        row = visit.page.locator(".sortable tr", has_text="failed")
        assert HOSTILE in row.inner_text()
        assert visit.page.locator(".reason b").count() == 0
        assert visit.complaints == []


def test_the_page_has_a_language_one_first_heading_and_names_for_all_figures(browser: Browser, rich_file: Path) -> None:
    with visited(browser, rich_file) as visit:
        assert visit.page.evaluate("document.documentElement.lang") == "en"
        assert visit.page.locator("h1").count() == 1
        levels = visit.page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))")
        assert levels[0] == 1 and all(after - before <= 1 for before, after in itertools.pairwise(levels))
        for plot in visit.page.locator(".plot").all():
            assert len(plot.get_attribute("aria-label") or "") > 20


def texts(study: ReportedStudy) -> str:
    """What stands on the page, without scripts and marks."""
    page = report_html(study, now=datetime(2026, 3, 1, 12, 0))
    page = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_the_top_has_the_best_its_rate_its_margin_and_the_command() -> None:
    page = texts(reported("two words", EDGES["default-unfit"], storage_url="postgresql://me:***@host/db"))
    assert "z1_gas1_mbs16" in page
    assert "the default config (z0_gas1_mbs1) did not fit in 73.60 GiB a rank" in page
    assert "the first that fitted, z3_gas1_mbs1, with" in page
    assert "71.60 GiB (97 %)" in page
    assert "bo-tuner export &#39;two words&#39; --storage &#39;postgresql://me:***@host/db&#39; --out job" in page
    assert "password in the place of ***" in page


def test_the_page_names_hardware_versions_budget_and_dates() -> None:
    told = {"budget": "60 trials, 1h", "stop_reason": "the budget is used up", "started": datetime(2026, 2, 28, 9, 30)}
    page = texts(reported("facts", EDGES["one"], **told))
    for fact in (
        "NVIDIA H100 80GB HBM3", "gpu-node-3", "deepspeed 0.19.8", "torch 2.13.0", "seed 7", "336,226,108", "2026-02-28 09:30",
        "2026-03-01 12:00", "stopped: the budget is used up (60 trials, 1h)",
    ):  # fmt: skip
        assert fact in page


def test_a_study_that_runs_or_was_killed_says_so() -> None:
    assert "still running, or stopped before its end" in texts(reported("running", EDGES["running"]))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "No trial has ended yet."),
        ("none-fits", "Nothing fitted in 73.60 GiB a rank: 3 trials ran out of memory. Raise --memory-limit"),
        (
            "all-failed",
            "No trial of 2 completed, 0 for want of memory; the last of the others ended as failed: &lt;/script",
        ),
    ],
)
def test_without_a_best_the_page_says_why(name: str, why: str) -> None:
    page = texts(reported(name, EDGES[name]))
    assert why in page
    assert "Train with it" not in page


def test_no_text_of_a_figure_can_end_its_script_element() -> None:
    config = TrainConfig(extra=(("note", HOSTILE),))
    page = report_html(reported("extra", numbered((config, measured(config, step_s=0.2, peak_bytes=GIB)))))
    blocks = re.findall(r'<script type="application/json" data-figure="[a-z-]+">(.*?)</script>', page, flags=re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        assert "<" not in block
        assert json.loads(block)["data"] is not None


def test_a_report_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(
        StoreError, match=r"^the report needs a file that can be written, and .*folder\.html cannot \(it is a folder\)"
    ):
        write_report(reported("one", EDGES["one"]), tmp_path / "folder.html")
    with pytest.raises(StoreError, match=r"No such file or directory"):
        write_report(reported("one", EDGES["one"]), tmp_path / "missing" / "one.html")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_the_page_of_a_study_with_a_very_long_name_lies_under_as_much_of_it_as_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "a" + "ß/" * 150
    file = write_report(reported(name, EDGES["one"]))
    assert file.exists() and file.name == "a" + "ß_" * 66 + ".html"


def test_power_and_clocks_that_were_held_down_are_told_where_the_devices_tell() -> None:
    (record,) = EDGES["one"]
    assert record.result is not None and record.result.measurement is not None
    assert " W over all devices" not in report_html(reported("one", [record]))
    measurement = replace(record.result.measurement, power_w=900.0, energy_j=1.0, throttling=("power brake",))
    page = report_html(reported("one", [replace(record, result=replace(record.result, measurement=measurement))]))
    j_per_sample = 900 / measurement.samples_per_s
    assert f"; 900 W over all devices, {j_per_sample:.3g} J a sample" in page
    assert "Clocks were held down (power brake) while this trial was measured" in page
