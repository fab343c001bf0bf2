"""Every view in a real browser: complete without JavaScript, by keyboard, narrow, and for those who do not see it."""

import shutil
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from meshwise.web.views import VIEWS
from tests.web.conftest import BROWSER

pytestmark = [
    pytest.mark.slow,  # a browser, which opens each view five times
    pytest.mark.skipif(BROWSER is None, reason="needs a browser, chromium or google-chrome"),
]

PATHS = [
    "/",
    "/compare",
    "/about",
    *(f"/{name}" for name in VIEWS),
    "/shard?b=--on v5e:2x2",
    "/train?model=no-such-model",
]

#: What can be reached by the key Tab, and is seen.
REACHED = """[...document.querySelectorAll('a[href], button, input, select, summary, textarea')].filter(
    e => e.checkVisibility() && !e.disabled && e.tabIndex >= 0)"""


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=shutil.which(BROWSER), args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


@contextmanager
def opened(browser, address, **context):
    """A page, which must load without an error and ask nobody but the server."""
    with browser.new_context(**context) as own:
        page, asked, failed = own.new_page(), [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto(address)
        page.wait_for_load_state()
        yield page
        assert {urlsplit(url).hostname for url in asked} == {"127.0.0.1"}
        assert not failed


def verdict(page):
    page.wait_for_function("!document.querySelector('h2')?.textContent.startsWith('Searching')")
    return page.locator("h2").first.inner_text()


@pytest.mark.parametrize("path", PATHS)
def test_a_view_is_whole_for_everybody(served, browser, path):
    with opened(browser, served + path, java_script_enabled=False) as page:
        plain = page.locator("h1, h2").last.inner_text()
    sizes = []
    for scheme in ("light", "dark"):
        with opened(browser, served + path, color_scheme=scheme) as page:
            page.on("requestfinished", lambda request: sizes.append(request.sizes()["responseBodySize"]))
            page.reload()
            page.wait_for_load_state()
            assert page.locator("h1, h2").last.inner_text() == plain
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
        assert 0 < sum(sizes) < 500_000
        sizes.clear()
    with opened(browser, served + path, viewport={"width": 320, "height": 640}) as page:
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 320


@pytest.mark.parametrize(
    "path", ["/roofline", "/shard", "/book?problem=roofline.q2.Bcrit", "/model", "/rule?name=ridge&on=v5e"]
)
def test_a_slider_moves_by_keys_and_back_undoes_the_move(served, browser, path):
    with opened(browser, served + path) as page:
        before, begun = verdict(page), page.url
        slider = page.locator(".stop input[type=range]").first
        slider.focus()
        moved = slider.input_value()
        key = "ArrowLeft" if moved == slider.get_attribute("max") else "ArrowRight"
        page.keyboard.press(key)
        page.wait_for_url(lambda url: url != begun)
        there = page.url
        page.wait_for_function("document.activeElement.type === 'range'")
        after, command = verdict(page), page.locator("#command").inner_text()
        page.reload()
        assert (verdict(page), page.locator("#command").inner_text()) == (after, command)
        page.go_back()
        page.wait_for_function("before => document.querySelector('h2').textContent === before", arg=before)
        assert page.url in (begun, begun.partition("?")[0]) or verdict(page) == before
        page.goto(there)
        assert verdict(page) == after


@pytest.mark.parametrize("path", ["/", "/roofline", "/train?model=llama-3-8b&on=h100:16&layout=fsdp=16"])
def test_everything_is_reached_by_the_key_tab(served, browser, path):
    with opened(browser, served + path) as page:
        number = page.evaluate(f"{REACHED}.length")
        for _ in range(number + 5):
            page.keyboard.press("Tab")
            page.evaluate("document.activeElement.setAttribute('data-reached', '')")
        missed = page.evaluate(f"{REACHED}.filter(e => !e.hasAttribute('data-reached')).map(e => e.outerHTML)")
        assert not missed


def test_the_front_is_dragged_by_the_pointer_and_moved_by_keys(served, browser):
    """From the first point to the last but one; Back undoes the whole move; keys move over the same links."""
    with opened(browser, served + "/serve?model=llama-3-8b&on=h100:8&prompt=1024&output=256") as page:
        page.locator("svg.front").wait_for()
        begun, dots = page.url, page.locator("svg.front a circle")
        last = dots.count() - 1
        start, end = dots.first.bounding_box(), dots.nth(last - 1).bounding_box()
        page.mouse.move(start["x"] + 4, start["y"] + 4)
        page.mouse.down()
        page.locator("#shown b").wait_for()
        page.mouse.move(end["x"] + 4, end["y"] + 4, steps=8)
        page.mouse.up()
        page.wait_for_url(f"**at={last - 1}")
        page.locator("input[type=range]:focus").wait_for()
        page.keyboard.press("ArrowRight")
        page.wait_for_url(f"**at={last}")
        page.locator("input[type=range]:focus").wait_for()
        page.go_back()
        page.wait_for_url(f"**at={last - 1}")
        page.go_back()
        page.wait_for_url(begun)
        assert Axe().run(page).violations_count == 0
