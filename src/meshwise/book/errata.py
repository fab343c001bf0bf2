"""Places of the book whose own numbers say something else, and a patch that corrects them in a reader's own copy.

The book's text is not here: an edit is the wrong number with as much beside it as tells its place. Not here: words and
files (`report.errata`, `commands.book`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """One place: fragments as versions of the text have them, each with what it should say; one is there at most."""

    options: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Erratum:
    """A mistake.

    Args:
        file: of the book's repository.
        where: in words.
        prints: what the text says.
        right: what its numbers give.
        problem: ours, with the working.
        edits: its places.
    """

    file: str
    where: str
    prints: str
    right: str
    problem: str
    edits: tuple[Edit, ...]


def _edits(*options: tuple[tuple[str, str], ...]) -> tuple[Edit, ...]:
    return tuple(Edit(each) for each in options)


ERRATA: Sequence[Erratum] = (
    Erratum(
        "gpus.md", "networking, bandwidth of the leaf switches", "32 x 400 / 8 = 12.8 TB/s",
        "1.6 TB/s a switch; times 8 switches 12.8", "gpus.f1.leaf_expr",
        _edits((
            ("`32 * 400 / 8 = 12.8TB/s`", "`8 * 32 * 400 / 8 = 12.8TB/s`"),
            ("`32*400/8 = 12.8TB/s`", "`8*32*400/8 = 12.8TB/s`"),
        )),
    ),
    Erratum(
        "gpus.md", "HBM of a B200, in prose", "9 TB/s", "8 TB/s, as its table and its calculations have",
        "gpus.chip.b200_hbm", _edits((("9TB/s on B200", "8TB/s on B200"),)),
    ),
    Erratum(
        "gpus.md", 'batch of DeepSeek-V3 "in practice"', "4M tokens",
        "15,360 x 4,096 = 62.9M by its own example; the comparison turns round", "gpus.dp.dsv3_used",
        _edits((("in practice, they used 4M", "in practice, they used 62.9M"),)),
    ),
    Erratum(
        "gpus.md", "tensor parallelism in a node", "F / 1995", "F / 2200: 13.0 ways of F = 28,672", "gpus.r2.tp_limit",
        _edits((("F / 1995 = 28672 / 1995 = 14.372", "F / 2200 = 28672 / 2200 = 13.03"),)),
    ),
    Erratum(
        "training.md", "across pods, summary", "71,000 (before: 75,000)", "4.59e14 / 6.25e9 = 73,440",
        "training.dcn.alpha",
        _edits(
            (
                ("DCN this is about 71,000", "DCN this is about 73,440"),
                ("DCN this is 75,000", "DCN this is 73,440"),
            ),
            (("pod of roughly 71,000", "pod of roughly 73,440"), ("pod of roughly 75,000", "pod of roughly 73,440")),
        ),
    ),
    Erratum(
        "applied-training.md", "time on the fewest chips", "1,752 days, nearly four years", "4.8 years",
        "applied_training.mem.min_chips_years", _edits((("nearly four years", "nearly five years"),)),
    ),
    Erratum(
        "applied-inference.md", "smallest slice, int4", "2.81 chips for 35 GB", "35e9 / 16e9 = 2.19",
        "applied_inference.minslice.int4_min", _edits((("|     2.81     |", "|     2.19     |"),)),
    ),
    Erratum(
        "transformers.md", "table of the vocabulary", "12 BTDV", "6 BTDV: a lookup has no FLOPs",
        "transformers.acct.vocab_table",
        _edits((("& 12BTDV", "& 6BTDV"),), (("| 12BTDV ", "| 6BTDV  "),)),
    ),
    Erratum(
        "inference.md", "state of a 13B model", "around 100 GB", "10 bytes x 13e9 = 130 GB",
        "inference.m13.train_state",
        _edits((("around 100GB", "around 130GB"),)),
    ),
    Erratum(
        "inference.md", "critical batch of an H100", "about 280", "9.89e14 / 3.35e12 = 295",
        "inference.linear.Bcrit_h100", _edits((("about 280", "about 295"),)),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Patched:
    """What became of the edits.

    Args:
        diff: unified, as `git apply` takes it; "" if nothing changes.
        applied: (erratum, how many of its places).
        missed: in words, an edit each that was not made, and why.
    """

    diff: str
    applied: tuple[tuple[Erratum, int], ...]
    missed: tuple[str, ...]

    @property
    def places(self) -> int:
        """How many edits were made."""
        return sum(number for _, number in self.applied)


def patch(texts: Mapping[str, str]) -> Patched:
    """Correct the errata in texts of the book.

    Args:
        texts: name of a file -> what it says; files that are not there are told.
    """
    changed, applied, missed = dict(texts), [], []
    for erratum in ERRATA:
        made = 0
        for edit in erratum.edits:
            if erratum.file not in changed:
                missed.append(f"{erratum.file}, {erratum.where}: the file is not there")
                continue
            found = _edited(changed[erratum.file], edit)
            if isinstance(found, Missed):
                missed.append(f"{erratum.file}, {erratum.where}: {found}")
            else:
                changed[erratum.file], made = found, made + 1
        if made:
            applied.append((erratum, made))
    diffs = "".join(line for name in texts for line in _diff(name, texts[name], changed[name]))
    return Patched(diffs, tuple(applied), tuple(missed))


class Missed(str):
    """Why an edit was not made."""

    __slots__ = ()


_OTHER = "the text is another than the one known here"


def _edited(text: str, edit: Edit) -> str:
    """A text with one edit, or why not."""
    for old, new in edit.options:
        number = text.count(old)
        if number == 1:
            return text.replace(old, new)
        if number > 1:
            return Missed(f"{old!r} is there {number} times, expected once; {_OTHER}")
    if any(new in text for _, new in edit.options):
        return Missed("is corrected already")
    wanted = " or ".join(repr(old) for old, _ in edit.options)
    return Missed(f"{wanted} is not there; {_OTHER}")


def _diff(name: str, before: str, after: str) -> Iterator[str]:
    for line in difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    """Lines as git counts them: they end with a line feed only."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
