"""Running the command line inside the test process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from meshwise.cli.main import main


@dataclass(frozen=True)
class Ran:
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON on stdout; NaN and Infinity are refused."""
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))

    @property
    def first_line(self) -> str:
        return self.out.splitlines()[0]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run `meshwise` with some words."""

    def go(*words: str) -> Ran:
        code = main(words)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return go


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Keep compiled programs apart from the user's; one folder for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
