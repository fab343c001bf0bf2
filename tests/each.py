"""Many small cases in one test: as a test of its own each costs five milliseconds, more than most of them take."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, in one test, which goes through all cases and says which of them fail."""
    split, every = [n.strip() for n in names.split(",")], list(cases)
    assert every, "no case"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def of_all(**others: Any) -> None:
            failed = []
            for case in every:
                given = dict(zip(split, case if len(split) > 1 else (case,), strict=True))
                try:
                    test(**given, **others)
                except Exception as error:  # noqa: BLE001 -- whatever it is, it is raised with the others
                    error.add_note(f"for {given}")
                    failed.append(error)
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(every)} cases fail", failed)

        signature = inspect.signature(test)
        left = [p for n, p in signature.parameters.items() if n not in split]
        assert len(left) == len(signature.parameters) - len(split), f"{test.__name__} does not take {names}"
        of_all.__signature__ = signature.replace(parameters=left)
        return of_all

    return decorate
