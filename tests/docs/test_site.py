"""The documentation site: built with strict links, whole, and without anything from elsewhere."""

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from docutils.nodes import make_id
from playwright.sync_api import sync_playwright

import meshwise
from meshwise.book import CHAPTERS, problems, solve
from meshwise.core.errors import MeshwiseError
from tests.web.conftest import BROWSER

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow  # twenty seconds of Sphinx; proves that no link of the site is broken and no page missing


@cache
def recorded(site, chapter):
    text = (site / "_static" / "recorded" / f"{chapter}.js").read_text(encoding="utf-8")
    found = json.loads(re.fullmatch(r"recorded\((.*)\);\n", text, re.DOTALL)[1])
    for varied in (number for problem in found["problems"].values() for number in problem["inputs"].values()):
        varied["values"] = found["lists"][varied["values"]]
    return found["problems"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-d",
        str(folder / "trees"),
        str(ROOT / "docs"),
        str(folder / "html"),
    ]
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "html"


def test_every_page_of_the_repository_is_one_of_the_site(site):
    pages = {p.relative_to(ROOT / "docs").with_suffix(".html") for p in (ROOT / "docs").rglob("*.md")}
    assert pages <= {p.relative_to(site) for p in site.rglob("*.html")}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_problem_is_in_its_chapter_and_in_the_index_of_words(site, chapter):
    page = (site / "book" / f"{chapter}.html").read_text(encoding="utf-8")
    above = page.partition("<h2>")[0]
    for problem in problems().values():
        if problem.chapter == chapter:
            assert f"meshwise book {problem.id}" in page
            assert f">{problem.heading}</a>" in above
            assert f'href="#{make_id(problem.short)}"><span class="xref myst">{problem.short}</span></a>' in above
    assert f'"book/{chapter}"' in (site / "searchindex.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_sliders_of_a_chapter_have_the_answers_of_book(site, chapter):
    """Of every number the question's own value, the first and the last; what has no answer says why."""
    page = (site / "book" / f"{chapter}.html").read_text(encoding="utf-8")
    found = recorded(site, chapter)
    assert found
    for name, problem in found.items():
        assert f'<div class="vary" data-problem="{name}">' in page
        assert f'<div class="check" data-problem="{name}">' in page
        own = solve(problems()[name]).value
        assert problem["answer"] == (own if isinstance(own, str) else pytest.approx(own, rel=1e-5))
        for number, varied in problem["inputs"].items():
            assert varied["values"] == sorted(set(varied["values"]))
            assert varied["values"][varied["own"]] == problems()[name].values[number]
            for place in {varied["own"], 0, len(varied["values"]) - 1}:
                answer, changes = varied["answers"][place], {number: repr(varied["values"][place])}
                if isinstance(answer, dict):
                    with pytest.raises(MeshwiseError, match=re.escape(answer["no"])):
                        solve(problems()[name], changes)
                else:
                    value = solve(problems()[name], changes).value
                    assert answer == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5))


def test_every_number_of_a_question_has_a_slider(site):
    for problem in problems().values():
        numbers = {
            name for name, value in problem.values.items()
            if name in problem.variable and isinstance(value, int | float) and value
        }  # fmt: skip
        assert numbers == set(recorded(site, problem.chapter)[problem.id]["inputs"])


def test_every_public_name_is_on_the_page_of_python(site):
    page = (site / "api.html").read_text(encoding="utf-8")
    assert [name for name in meshwise.__all__ if f'id="{name.lower().replace("_", "-")}"' not in page] == [
        "__version__"
    ]


def test_nothing_comes_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"([^\"]+)\"|<link[^>]*\shref=\"([^\"]+)\"", text)
        assert not [one for pair in loaded for one in pair if one.startswith(("http:", "https:", "//"))], page


def test_the_list_for_programs_links_to_pages_that_are_there(site):
    links = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    assert len(links) > 60
    assert [link for link in links if not (site / link).is_file()] == []


def test_pages_for_users_stand_before_those_for_contributors(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    places = [
        text.index(f'class="caption-text">{caption}') for caption in ("Learn", "The book", "Use", "For contributors")
    ]
    assert places == sorted(places)


def test_search_finds_a_rule_without_a_server(site):
    """The index of words is a script, which a page from a file can load."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    found = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)", index, re.DOTALL)[1])
    pages = {found["docnames"][n] for n in found["terms"]["ridg"]} if "ridg" in found["terms"] else set()
    assert {"rules", "book/roofline"} <= pages


@pytest.fixture(scope="module")
def browser():
    """A browser, which opens the site from its files alone."""
    if BROWSER is None:
        pytest.skip("needs a browser, chromium or google-chrome")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which(BROWSER), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", [*(f"book/{chapter}" for chapter in CHAPTERS), "index", "book", "search"])
def test_a_page_is_whole_for_everybody_at_320_pixels(site, browser, page, scheme):
    """Folded answers and sliders, too."""
    with browser.new_context(color_scheme=scheme, viewport={"width": 320, "height": 640}) as own:
        shown = own.new_page()
        shown.goto((site / f"{page}.html").as_uri())
        shown.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert shown.evaluate("document.scrollingElement.scrollWidth") <= 320
        found = Axe().run(shown)
        assert found.violations_count == 0, found.generate_report()


def test_a_readers_own_answer_is_judged_and_what_is_solved_is_marked(site, browser):
    page = browser.new_page()
    page.goto((site / "book" / "roofline.html").as_uri())
    place = page.locator('div.check[data-problem="roofline.bcrit.bf16_v5e"]')
    for text, said in {
        "80": "Not so: 0.333 times as much (mixed up: forward and backward pass, or the axes of a torus?). "
        "The unit is tokens.",
        "100": "Not so: 0.416 times as much. The unit is tokens.",
        "many": "A number of tokens, please.",
        "240 ms": "Not so: ms is no unit of this answer, which is in tokens.",
        "0.24 ktokens": "Right.",
    }.items():
        place.locator("input").fill(text)
        place.locator("button").click()
        assert place.locator("output").inner_text() == said
    page.reload()
    assert page.locator("h3.solved").all_inner_texts() == ["bcrit.bf16_v5e"]
    page.close()
