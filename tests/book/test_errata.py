"""The errata's patch on a copy of the book: of words made up here around the fragments that it looks for."""

import json
import shutil
import subprocess

import pytest

from meshwise.book import problems
from meshwise.book.errata import ERRATA, patch
from meshwise.cli.main import main


def text_of(file, *, which=0):
    """A chapter that has the fragments of one version, and lines around them."""
    lines = [f"# Chapter {file}"]
    for erratum in ERRATA:
        if erratum.file == file:
            lines += [f"before {e.options[min(which, len(e.options) - 1)][0]} after\n" for e in erratum.edits]
    return "\n".join([*lines, "last line, without an end"])


FILES = list(dict.fromkeys(e.file for e in ERRATA))
PLACES = sum(len(e.edits) for e in ERRATA)
GIT = shutil.which("git") or "git"


def git(folder, *words):
    subprocess.run([GIT, *words], cwd=folder, check=True)  # noqa: S603 (words of this file)


@pytest.fixture
def clone(tmp_path):
    for file in FILES:
        (tmp_path / file).write_text(text_of(file), encoding="utf-8", newline="")
    return tmp_path


def test_the_patch_applies_to_a_copy_and_leaves_nothing_to_correct(clone, capsys):
    assert main(["book", "--errata", "--patch", str(clone)]) == 0
    said = capsys.readouterr()
    assert f"{PLACES} places corrected, 0 left" in said.err
    assert (clone / "gpus.md").read_text(encoding="utf-8") == text_of("gpus.md")
    (clone / "errata.patch").write_text(said.out, encoding="utf-8")
    git(clone, "init", "-q")
    git(clone, "apply", "--check", "--whitespace=nowarn", "errata.patch")
    git(clone, "apply", "--whitespace=nowarn", "errata.patch")
    after = (clone / "gpus.md").read_text(encoding="utf-8")
    assert "F / 2200 = 28672 / 2200 = 13.03" in after
    assert "1995" not in after
    assert after.endswith("without an end")
    assert main(["book", "--errata", "--patch", str(clone)]) == 3
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("is corrected already") == PLACES


@pytest.mark.parametrize("which", [0, 1])
def test_all_versions_of_the_text_that_are_known(which):
    found = patch({file: text_of(file, which=which) for file in FILES})
    assert sum(number for _, number in found.applied) == PLACES
    assert not found.missed


def test_what_is_not_there_or_there_twice_is_said_in_words(clone, capsys):
    (clone / "training.md").unlink()
    (clone / "gpus.md").write_text("9TB/s on B200, and again 9TB/s on B200", encoding="utf-8")
    assert main(["book", "--errata", "--patch", str(clone), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    words = "\n".join(found["missed"])
    assert "training.md, across pods, summary: the file is not there" in words
    assert "gpus.md, HBM of a B200, in prose: '9TB/s on B200' is there 2 times, expected once" in words
    assert "'F / 1995 = 28672 / 1995 = 14.372' is not there; the text is another" in words
    assert "+++ b/inference.md" in found["patch"]
    assert "gpus.md" not in found["patch"]


def test_a_line_keeps_its_end():
    """As they are in a copy made on Windows."""
    text = "a\r\nand nearly four years\r\nb\r\n"
    assert "\n+and nearly five years\r\n" in patch({"applied-training.md": text}).diff


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--patch", "."], "--patch is of --errata"),
        (["--errata", "--patch", "{}/nowhere"], "git clone https://github.com/jax-ml/scaling-book makes one"),
        (["roofline.q2", "--errata"], "--errata stands alone"),
    ],
)
def test_mistakes_are_answered_in_words(tmp_path, capsys, words, said):
    assert main(["book", *(word.format(tmp_path) for word in words)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_no_text(tmp_path, capsys):
    (tmp_path / "gpus.md").write_bytes(b"\xff\xfe\x00")
    assert main(["book", "--errata", "--patch", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_each_erratum_has_a_problem_and_other_words_than_before(capsys):
    for erratum in ERRATA:
        assert erratum.problem in problems()
        assert all(old != new for edit in erratum.edits for old, new in edit.options)
        assert all(len(old) < 40 for edit in erratum.edits for old, _ in edit.options)  # fragments, no sentences
    assert main(["book", "--errata", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["errata"]) == len(ERRATA)
