"""The guides of JAX: each program runs on eight fake devices, and prints what its page says."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("docs_guides", ROOT / "docs" / "guides.py")
guides = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(guides)

#: Page -> the collectives that must be there: what the page is about.
EMITTED = {
    "jit": {"all-reduce"},
    "explicit": {"all-reduce"},
    "shard_map": {"all-gather", "all-reduce", "reduce-scatter"},
    "collective_matmul": {"all-gather", "permute"},
    "ring_attention": {"permute", "all-gather"},
    "mixtures": {"reduce-scatter"},
    "pipeline": {"permute"},
    "hosts": {"all-reduce"},
}


def test_every_guide_is_listed_and_says_what_it_emits():
    index = (guides.FOLDER / "index.md").read_text(encoding="utf-8")
    assert {page.stem for page in guides.PAGES} == set(EMITTED) == set(re.findall(r"\((\w+)\.md\)", index))
    for page in guides.PAGES:
        said = re.search(r"```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1]
        assert (
            set(re.findall(r"^([a-z-]+) +[XYZa-z,]+ +\d+ +[\d.]+ [KMG]?i?B", said, re.MULTILINE)) == EMITTED[page.stem]
        )
        assert "v5e:2x4" in said
        assert "h100:8" in said


@pytest.mark.jax
@pytest.mark.parametrize("page", guides.PAGES, ids=lambda p: p.stem)
def test_a_guide_prints_what_its_page_says(page):
    assert page.read_text(encoding="utf-8") == guides.generated(page), "stale: run python docs/guides.py"
