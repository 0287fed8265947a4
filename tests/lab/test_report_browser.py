"""The page in a real Chromium: silent, without a request, readable in light and dark, wide and narrow."""

import json
import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from report_folders import make_recovery, make_run, make_study
from report_pages import ARMS, HOSTILE, hostile_study, lines_of

from prunus.lab.report.page import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'prunus[test]'")
RECIPE = "lr 2e-3 to 0 warmup 200 every 5 beta2 0.99 cubic"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as driver:
        own = driver.chromium.executable_path
        found = [path for name in NAMES if (path := shutil.which(name))] + [own] * Path(own).is_file()
        if not found:
            pytest.skip("needs a Chromium: apt-get install chromium, or playwright install chromium")
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # which root cannot use
        opened = driver.chromium.launch(executable_path=found[0], args=sandbox)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    """Opens a page from disk; at the end nothing was said on the console and nothing was asked of any network."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda one: asked.append(one.url))

    def go(path: Path, draw: bool = True, width: int = 1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(path.as_uri())
        if draw:
            show_all(page)
        return page

    yield go
    assert said == []
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []
    assert len({url for url in asked if url.startswith("file://")}) == 1
    context.close()


def show_all(page) -> None:
    """Every chart drawn, as for printing."""
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    until(page, "[...document.querySelectorAll('.chart')].every((one) => one.querySelector('.main-svg'))")


def until(page, condition: str) -> None:
    """Wait for a condition; playwright's own waiting evaluates text in the page, which the page's policy forbids."""
    for _ in range(400):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {condition}")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("browser") / "run")


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    return make_study(tmp_path_factory.mktemp("browser") / "study", ARMS)


@pytest.mark.slow
def test_the_charts_of_a_run_show_its_metrics_and_say_them_on_hover(run, visit):
    page = visit(write_report(run))
    lines = lines_of(run)
    drawn = page.evaluate("[...document.querySelectorAll('.chart')].map((one) => one.data.map((t) => t.z || t.y))")
    assert drawn[0][0] == [line["loss"] for line in lines if "loss" in line]
    assert drawn[1][0] == [line["eval"]["perplexity"] for line in lines if "eval" in line]
    assert [row[-1] for row in drawn[3][0]] == [zero / 4096 for zero in lines[-1]["zeros"]]
    values = page.evaluate("[...document.querySelectorAll('#training details data')].map((one) => Number(one.value))")
    assert {line["loss"] for line in lines if "loss" in line} <= set(values)

    chart = page.locator(".chart").nth(1)
    chart.scroll_into_view_if_needed()
    last = chart.evaluate("(one) => one.querySelectorAll('.point')[9].getBoundingClientRect().toJSON()")
    page.mouse.move(last["x"] + 3, last["y"] + 3)
    page.wait_for_selector(".hoverlayer text")
    assert f"{lines[-1]['eval']['perplexity']:.5g}" in chart.locator(".hoverlayer").text_content()
    assert_fits(page, 360)


@pytest.mark.slow
def test_the_curve_of_a_recovery_is_drawn_with_the_lines_of_its_teacher_and_of_the_model_before(tmp_path, visit):
    page = visit(write_report(make_recovery(tmp_path / "recovered", notes=[HOSTILE], settings={HOSTILE: HOSTILE})))
    assert page.locator("#recovery .chart").count() == 2 and page.locator("img").count() == 0
    chart = page.locator(".chart").first
    chart.scroll_into_view_if_needed()
    assert chart.locator(".js-line").count() == 3
    point = chart.evaluate("(one) => one.querySelectorAll('.point')[5].getBoundingClientRect().toJSON()")
    page.mouse.move(point["x"] + 2, point["y"] + 2)
    page.wait_for_selector(".hoverlayer text")
    hovered = chart.locator(".hoverlayer").text_content()
    assert all(words in hovered for words in ("184,320 tokens", "before recovery : 61.25", "teacher : 55"))
    assert_fits(page, 400)


@pytest.mark.slow
def test_nothing_overflows_on_a_narrow_screen_and_colours_follow_the_scheme(study, visit):
    page = visit(write_report(study))
    look = "[getComputedStyle(document.body).backgroundColor, document.querySelector('.chart').layout.font.color]"
    light = page.evaluate(look)
    page.emulate_media(color_scheme="dark")
    until(page, f"{look}[1] !== {json.dumps(light[1])}")
    assert page.evaluate(look)[0] != light[0]
    for width in (360, 800):
        assert_fits(page, width)


@pytest.mark.slow
def test_what_a_table_is_of_is_read_whole_on_a_narrow_screen(study, visit):
    page = visit(write_report(study), width=320)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    captions = page.locator("caption").all()
    assert captions and all(box["x"] + box["width"] <= 320 for one in captions if (box := one.bounding_box()))


def assert_fits(page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    until(page, f"[...document.querySelectorAll('.chart .main-svg')].every((one) => one.clientWidth <= {width})")
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.fixture
def long_names(tmp_path) -> Path:
    """A study with an arm that is named after its recipe."""
    folder = make_study(tmp_path / "study", ARMS)
    for path in [folder / "study_result.json", *folder.glob("runs/*/cell.json")]:
        path.write_text(path.read_text().replace('"bitter7"', f'"bitter7 {RECIPE}"'))
    return folder


def assert_labels_are_apart(chart, slack: float = 0.0) -> None:
    """Names of rows lie within the chart, and none on another."""
    labels = """(one) => [...one.querySelectorAll('.ytick text')].map((label) => label.getBoundingClientRect())
        .map((box) => [box.left - one.getBoundingClientRect().left, box.top, box.bottom])"""
    boxes = sorted(chart.evaluate(labels), key=lambda box: box[1])
    assert len(boxes) > 1 and all(left >= 0 for left, _, _ in boxes)
    assert all(above[2] <= below[1] + slack for above, below in pairwise(boxes))


SHARE = "(one) => one.querySelector('.nsewdrag').getBoundingClientRect().width / one.clientWidth"


@pytest.mark.slow
def test_long_names_of_arms_are_read_whole_on_a_narrow_screen(long_names, visit):
    chart = visit(write_report(long_names), width=360).locator("#verdicts .chart").first
    assert "warmup 200" in chart.text_content()
    assert chart.evaluate(SHARE) > 0.4
    assert_labels_are_apart(chart)


@pytest.mark.slow
def test_a_window_that_is_made_narrow_or_wide_shows_what_it_shows_when_opened_so(long_names, visit):
    page, shown = visit(write_report(long_names)), {}
    look = "[...document.querySelectorAll('.chart')].map((one) => [one.style.height, one.layout.yaxis.ticktext || []])"
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.reload()
        show_all(page)
        shown[width] = page.evaluate(look)
    assert shown[1280] != shown[390]
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        until(page, f"JSON.stringify({look}) === JSON.stringify({json.dumps(shown[width])})")
        page.wait_for_timeout(300)  # the chart library follows the window too
        assert page.evaluate(look) == shown[width]
    chart = page.locator("#verdicts .chart").first
    assert chart.evaluate(SHARE) > 0.4
    assert_labels_are_apart(chart)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 800, 390])
def test_rows_of_a_heat_map_are_apart_below_long_names_of_columns(width, long_names, visit):
    charts = visit(write_report(long_names), width=width).locator("#layers .chart")
    assert charts.count() == 2
    for i in range(2):
        assert_labels_are_apart(charts.nth(i), slack=3.0)  # boxes of text have air above and below


@pytest.mark.slow
def test_the_words_of_a_hostile_folder_stay_words(tmp_path, visit):
    page = visit(write_report(hostile_study(tmp_path / "study")))
    assert page.locator("img").count() == 0
    assert HOSTILE in page.locator(".notes").text_content()
    shown = page.evaluate("[...document.querySelectorAll('.chart text')].map((one) => one.textContent)")
    assert any("<img src=x" in text for text in shown)


@pytest.mark.slow
def test_a_screen_reader_finds_names_and_tables(study, visit):
    page = visit(write_report(study), draw=False)
    unnamed = "[...document.querySelectorAll('[role=img], [role=region], nav')].filter((one) => !one.ariaLabel).length"
    assert page.evaluate(unnamed) == 0
    assert page.locator("h1").count() == 1
    assert page.locator("section h2").count() == page.locator("nav a").count() == 8
    assert page.locator("figure details table").count() == page.locator(".chart").count()
    assert page.locator("table:not(:has(caption))").count() == 0
