"""Every view in a real browser: complete without JavaScript, by keyboard, narrow, and for those who do not see it."""

import shutil
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from meshwise.web.views import VIEWS
from tests.web.conftest import BROWSER, LONG

pytestmark = [
    pytest.mark.slow,  # a browser, which opens each view five times
    pytest.mark.skipif(BROWSER is None, reason="needs a browser, chromium or google-chrome"),
]

TRAINED = "/train?model=llama-3-8b&on=h100:16&batch-tokens=512Ki&seq-len=4096&layout=fsdp=16&changes=no"
SERVED = "/serve?model=llama-3-8b&on=h100:8&batch=64&layout=tensor=8&prompt=1024&output=256&changes=no"
PATHS = [
    "/",
    "/compare",
    "/about",
    *(f"/{name}" for name in VIEWS),
    TRAINED,
    SERVED,
    "/shard?b=--on v5e:2x2",
    "/shard?expression=A[I_X, J] * B[J, K_Y] -> C[I_X, K]&mesh=X=4,Y=2&step=1&device=3",
    "/chips?chip=h100",
    "/rule?name=ridge&on=v5e",
    "/book?problem=roofline",
    "/book?problem=roofline.q2.Bcrit",
    "/book?problem=roofline.q2.Bcrit&hint=yes",
    "/book?errata=yes",
    "/train?model=no-such-model",
    "/train?model=llama-3-8b&on=v5e:4x8&batch-tokens=many&seq-len=4096",
    "/train?model=llama-3-70b&on=v5e&batch-tokens=64Ki&seq-len=4096",
    "/trian",
]

#: What can be reached by the key Tab, and is seen.
REACHED = """[...document.querySelectorAll('a[href], button, input, select, summary, textarea')].filter(
    e => e.checkVisibility() && !e.disabled && e.tabIndex >= 0)"""

#: Marks what has the focus; gives it where nothing shows that it has.
FOCUSED = """(() => {
    const e = document.activeElement;
    e.setAttribute('data-reached', '');
    return e === document.body || getComputedStyle(e).outlineStyle !== 'none' ? [] : [e.outerHTML];
})()"""

#: Controls that are too small to be touched.
SMALL = f"""{REACHED}.filter(e => e.matches('button, input, select, summary, nav a, .mesh a'))
    .filter(e => Math.min(e.getBoundingClientRect().height, e.getBoundingClientRect().width) < 24)
    .map(e => e.outerHTML)"""


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
    "path",
    ["/roofline", "/shard", "/book?problem=roofline.q2.Bcrit", "/model", "/rule?name=ridge&on=v5e", TRAINED, SERVED],
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


@pytest.mark.parametrize("width", [320, 1280])
@pytest.mark.parametrize("path", PATHS)
def test_everything_is_reached_by_the_key_tab_and_shows_that_it_is(served, browser, path, width):
    """What has the focus has an outline, and is large enough to be touched: 24 pixels, but for links in sentences."""
    with opened(browser, served + path, viewport={"width": width, "height": 800}) as page:
        number = page.evaluate(f"{REACHED}.length")
        unseen = []
        for _ in range(number + page.locator("[tabindex='0']").count() + 2):
            page.keyboard.press("Tab")
            unseen += page.evaluate(FOCUSED)
        missed = page.evaluate(f"{REACHED}.filter(e => !e.hasAttribute('data-reached')).map(e => e.outerHTML)")
        assert not missed
        assert not unseen
        assert not page.evaluate(SMALL)


def test_escape_closes_the_help_and_a_key_leads_to_the_form(served, browser):
    with opened(browser, served + "/roofline", viewport={"width": 320, "height": 800}) as page:
        page.keyboard.press("?")
        page.locator("#help[open]").wait_for()
        page.keyboard.press("Escape")
        page.locator("#help[open]").wait_for(state="detached")
        assert not page.locator("#f-expression").is_visible()
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "f-expression"


def test_a_search_shows_its_latest_line_and_is_cancelled_by_a_key(served, browser):
    with browser.new_context() as own:
        page = own.new_page()
        page.goto(served + LONG.replace("4096", "8192"), wait_until="commit")
        page.locator(".progress p").nth(1).wait_for(state="attached")
        assert page.locator(".progress p:visible").count() == 1
        page.get_by_role("button", name="Cancel").press("Enter")
        page.locator("#answer h2").wait_for()
        assert page.locator(".searching").is_hidden()


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
