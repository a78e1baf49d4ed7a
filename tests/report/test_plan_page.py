"""The page of a plan in a real browser, and what its figures hold."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from bo_tuner.errors import StoreError
from bo_tuner.models.cost import TIME_PARTS
from bo_tuner.models.memory import MEMORY_PARTS
from bo_tuner.models.planner import Plan, plan, timeline_of
from bo_tuner.report.figures.plan import memory_parts_figure, time_parts_figure, timeline_figure
from bo_tuner.report.plan_page import plan_html, write_plan
from bo_tuner.schedules import Backward, Forward
from tests.models.gpt import problem
from tests.report.test_html import CONTRASTS, FIGURES, SCREENSHOTS, Scheme

GIB = 2**30
GIVEN = problem(n_ranks=16)


@pytest.fixture(scope="module")
def found() -> Plan:
    """Some fit, some do not."""
    made = plan(GIVEN, global_batch=64, limit_bytes=4 * GIB, schedules=("1f1b", "2bw"))
    assert 10 < made.n_fitting < len(made) and made.families
    return made


@contextlib.contextmanager
def opened(
    browser: Browser, text: str, folder: Path, *, width: int = 1280, scheme: Scheme = "light"
) -> Generator[Page]:
    """The page with its figures drawn, which complains about nothing."""
    file = folder / "plan.html"
    file.write_text(text, encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if "file:" not in request.url else None)
    try:
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-drawn='3']", state="attached", timeout=60_000)
        yield page
        assert [text for text in complaints if not text.startswith(("data:", "blob:"))] == []
    finally:
        context.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_every_figure_is_drawn_and_every_text_can_be_read(
    browser: Browser, found: Plan, tmp_path: Path, width: int, scheme: Scheme
) -> None:
    with opened(browser, plan_html(found), tmp_path, width=width, scheme=scheme) as page:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"plan-{width}-{scheme}.png", full_page=True)
        figures = page.evaluate(FIGURES)
        assert [figure["id"] for figure in figures] == ["memory", "time", "timeline"]
        for figure in figures:
            assert figure["broken"] == 0 and figure["n_marks"] >= 8 and 0 < figure["width"] <= figure["room"], figure
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(CONTRASTS)[0][0] >= 4.5
        assert page.locator("h1").inner_text() == found.best(1)[0].config.name


def test_a_plan_of_which_nothing_fits_says_so_and_draws_no_timeline(browser: Browser, tmp_path: Path) -> None:
    text = plan_html(plan(GIVEN, global_batch=64, limit_bytes=GIB // 4))
    with opened(browser, text, tmp_path) as page:
        assert page.locator("h1").inner_text() == "Nothing fits in 256 MiB a device"
        assert page.locator("#timeline .annotation-text").text_content() == "No pipeline fits."
        assert page.locator(".badge.memory").count() == 10 and page.locator(".badge.good").count() == 0


def test_the_bars_are_the_parts_and_the_line_is_the_limit(found: Plan) -> None:
    shown = found.best(5)
    memory: Any = memory_parts_figure(shown, limit_bytes=found.limit_bytes)
    assert [bar.name for bar in memory.data] == list(MEMORY_PARTS)
    for place, planned in enumerate(shown):
        assert sum(bar.x[place] for bar in memory.data) == pytest.approx(planned.total_bytes / GIB)
    assert [line.x0 for line in memory.layout.shapes] == [4.0]
    times: Any = time_parts_figure(shown)
    assert [bar.name for bar in times.data] == list(TIME_PARTS)
    for place, planned in enumerate(shown):
        assert sum(bar.x[place] for bar in times.data) == pytest.approx(planned.step_time_s)


def test_the_timeline_has_every_pass_in_the_lane_of_its_stage(found: Plan) -> None:
    config = found.find("z0_pp4_gas8_mbs2").config
    timeline = timeline_of(GIVEN, config)
    figure: Any = timeline_figure(timeline)
    forward, backward = figure.data
    for bars, kind in ((forward, Forward), (backward, Backward)):
        drawn = sorted(zip(bars.y, bars.base, bars.x, strict=True))
        expected = sorted(
            (stage, start, end - start)
            for stage, order in enumerate(timeline.orders)
            for action, start, end in zip(order, timeline.start_s[stage], timeline.end_s[stage], strict=True)
            if isinstance(action, kind)
        )
        assert drawn == expected and len(drawn) == 4 * 8
    assert forward.text[0].startswith("forward pass of micro-batch 0, stage 0<br>0 ms to ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("z0_pp4_gas8_mbs2", "One step of z0_pp4_gas8_mbs2: a lane a stage, and what is left open is idle."),
        ("z0_pp2_gas8_mbs1", None),
        ("z0_pp4_gas16_mbs1", "Drawn with 8 micro-batches; the step has 16, and those in the middle go on in the same way."),
        ("z0_pp4_2bw_gas8_mbs2", "It is the first of a training: 2bw does not drain, and later steps begin while this one ends."),
    ],
)  # fmt: skip
def test_the_caption_says_what_is_drawn(found: Plan, name: str, words: str | None) -> None:
    page = re.sub(r"<script.*?</script>", "", plan_html(found, timeline=name), flags=re.DOTALL)
    assert f"One step of {name}: " in page
    assert (words or "what is left open is idle.</p>") in page


def test_a_page_that_cannot_be_written_is_refused(found: Plan, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"choose another with --out"):
        write_plan(found, tmp_path)
    assert list(tmp_path.iterdir()) == []
