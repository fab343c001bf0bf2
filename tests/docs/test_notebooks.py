"""The notebooks of `examples/` run, cell by cell, and hold what they assert."""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def test_there_are_notebooks_and_each_shows_its_results():
    nbformat = pytest.importorskip("nbformat")
    assert {file.stem for file in NOTEBOOKS} >= {"plan", "serving_front", "diagnosis"}
    for file in NOTEBOOKS:
        cells = [c for c in nbformat.read(file, 4).cells if c.cell_type == "code"]
        assert any(c.outputs for c in cells), file.stem


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(file, 4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
