"""Files are read without trust and never torn."""

import errno
import os
import subprocess
import sys

import pytest

from meshwise.core.errors import ConfigError, MeshwiseError, NotationError, quoted
from meshwise.core.files import parse_json, parse_toml, read_whole, write_whole


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON: .* line 1, column 2"),
        ('{"a": 1, "a": 2}', "key 'a' appears twice"),
        ("[" * 200 + "]" * 200, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "thousands of digits"),
        ('{"a": [1, ' + "9" * 50 + "]}", r"a\.1: expected a number of at most 40 digits"),
        ('{"a": {"b": NaN}}', r"a\.b: expected a finite number, found nan"),
        ('{"a": 1e999}', "a: expected a finite number, found inf"),
    ],
)
def test_bad_json_is_refused_in_words(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_json(text, "mine.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a =", "mine.toml is not TOML"),
        ("a = 1\na = 2", "is not TOML"),
        ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a = " + "9" * 5000, "a value that cannot be"),
        ("a = inf", "a: expected a finite number"),
    ],
)
def test_bad_toml_is_refused_in_words(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_toml(text, "mine.toml")


def test_no_file_has_a_zero_byte_in_its_name():
    with pytest.raises(OSError, match="zero byte"):
        read_whole("a\0b")


def test_a_file_is_replaced_and_keeps_its_mode_and_links(tmp_path):
    file, link = tmp_path / "a", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, "new")
    assert file.read_text() == "new"
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "link"]
    with pytest.raises(FileExistsError):
        write_whole(file, "newer", new=True)
    write_whole(tmp_path / "b", "first", new=True)
    assert (tmp_path / "b").read_text() == "first"


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_on_a_full_disk_the_old_file_stays(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "plan.json"
    file.write_text("old")
    monkeypatch.setattr(os, "fsync" if call == "fsync" else "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_where_files_may_not_grow_the_saved_plan_stays(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text("old")
    words = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512)); from meshwise.cli.main import main; sys.exit(main())"
    )
    asked = "estimate train gpt2 --on h100:8 --batch-tokens 64Ki --seq-len 1024 --layout data=8 --no-changes --save"
    command = [sys.executable, "-c", words, *asked.split(), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own words
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_device_is_written_to_as_it_is():
    with pytest.raises(OSError, match="No space left"):
        write_whole(__import__("pathlib").Path("/dev/full"), "x")


def test_messages_quote_at_most_200_characters():
    assert quoted([1] * 1000).endswith("...]")
    assert len(str(MeshwiseError(f"expected a chip, found {'x' * 5000!r}; write h100"))) < 300
    assert str(MeshwiseError(f"the model's {'word ' * 100}the users'")).count("word") == 100
    shown = str(NotationError("unknown axis", "A" * 5000 + "!" + "B" * 5000, 5000)).splitlines()
    assert len(shown[1]) <= 210
    assert shown[1][shown[2].index("^")] == "!"
