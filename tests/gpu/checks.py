"""Checks that fail at the end: what is measured after one has failed is worth having, too."""

from collections.abc import Iterator
from contextlib import contextmanager


class Checks:
    """What was found wrong so far."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def expect(self, holds: bool, otherwise: str) -> None:
        """Remember what is wrong unless it holds."""
        if not holds:
            self.failed.append(otherwise)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Something that may fail without keeping the rest from being tried."""
        try:
            yield
        except Exception as error:
            self.failed.append(f"{what}: {type(error).__name__}: {error}")

    def done(self) -> None:
        """Raise AssertionError with everything that is wrong."""
        if self.failed:
            raise AssertionError("\n".join(self.failed))
