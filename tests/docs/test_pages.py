"""The documents are true: outputs are the commands', examples run, links lead somewhere, names have lines."""

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

from meshwise.hardware import chips, machines, networks
from meshwise.models import model_names
from tests.each import each

ROOT = Path(__file__).parents[2]


def load(name: str):
    """Load a script of docs/, which belongs to no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load("generate")
reference = generate.script("reference")  # the same, so that a command runs once for both
PROSE = [p for p in generate.PAGES if p.name not in ("reference.md", "__init__.pyi", "llms.txt")]
ALL = sorted({*generate.PAGES, *(ROOT / "docs").rglob("*.md"), ROOT / "CHANGELOG.md"})


#: Slow because they search thousands of chips, plan several times, or simulate plans; they prove that no number on them
#: is out of date.
SLOW = ("planning.md", "serving.md", "worked-plans.md", "train.md", "own-cluster.md", "six-steps.md")


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] if p.name in SLOW else [], id=p.name) for p in generate.PAGES],
)
def test_a_page_shows_what_the_commands_print(page):
    text = page.read_text(encoding="utf-8")
    assert generate.stable(text) == generate.stable(generate.generated(page)), "stale: run python docs/generate.py"


@each("page", PROSE)
def test_pages_have_examples(page):
    assert "```console\n$ meshwise " in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PROSE, ids=lambda p: p.name)
def test_python_examples_run(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks:
        assert block.startswith(">>> "), "examples are written as a session, so that they can be run"
        assert block.endswith("\n\n"), "a blank line ends the last output"
    result = doctest.testfile(str(page), module_relative=False, encoding="utf-8", optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert bool(blocks) == bool(result.attempted)
    assert result.attempted or page.name != "README.md"


def test_commands_of_the_readme_are_those_that_ci_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    promised = [lines[i + 1] for i, line in enumerate(lines) if line == "# README:"]
    assert len(promised) == 2
    for command in promised:
        assert f"```sh\n{command}\n```" in readme


def test_every_command_is_in_the_reference():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    names = [name for name, _ in reference.commands()]
    assert len(names) >= 9
    for name in names:
        assert f"\n### meshwise {name}\n" in page


def test_every_command_is_named_in_the_readme_and_shown_by_example():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.encode()) < 13_000
    for name, _ in reference.commands():
        assert f"`meshwise {name}" in readme, name
        assert re.search(rf"^(\$ )?meshwise {name}\b", page, re.MULTILINE), name  # what a machine measures is not run


@pytest.mark.parametrize("kind", [chips, networks, machines])
def test_every_chip_network_and_machine_has_a_line(kind):
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for row in kind().values():
        assert f"\n| `{row.name}`" in page


def test_every_model_has_a_line():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for name in model_names():
        assert f"\n| `{name}` |" in page


@pytest.mark.parametrize("verb", reference.FIELDS)
def test_every_json_field_has_a_meaning(verb):
    rows = reference.json_rows(verb)  # asserts it
    assert len(rows) > 10


def test_a_field_without_a_meaning_is_noticed(monkeypatch):
    words, meanings = reference.FIELDS["model"]
    fewer = {k: v for k, v in meanings.items() if k != "flops.training_per_token"}
    monkeypatch.setitem(reference.FIELDS, "model", (words, fewer))
    with pytest.raises(AssertionError, match="without a meaning"):
        reference.json_rows("model")
    monkeypatch.setitem(reference.FIELDS, "model", (words, {**meanings, "flops.gone": "nothing"}))
    with pytest.raises(AssertionError, match="not there"):
        reference.json_rows("model")


@each("page", ALL)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, target


GUIDES = ("CONTRIBUTING.md", "docs/design.md", "docs/extending.md", "docs/life-of-a-number.md", "docs/networks.md")


@pytest.mark.parametrize("page", GUIDES)
def test_guides_name_files_that_there_are(page):
    """Paths of the repository, or below src/meshwise; a file that a reader is to write is named newcommand.py."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/.-]+/[\w.-]+\.py\b", text))
    missing = [n for n in named if not ((ROOT / n).exists() or (ROOT / "src/meshwise" / n).exists())]
    assert [n for n in missing if not n.endswith("/newcommand.py")] == []


def test_trimming_keeps_the_named_paragraphs():
    text = "answer\n\nfirst\nline\n\nWhy:\n  - so\n\nlast\n"
    assert generate.trimmed(text, "1, Why") == "answer\n\n...\n\nWhy:\n  - so\n\n...\n"
    with pytest.raises(AssertionError, match="no paragraph"):
        generate.trimmed(text, "Because")
