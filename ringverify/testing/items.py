"""What `pytest --ringverify TARGET` collects: a collector for each target, a test for each property.

Ids are `ringverify::TARGET::PROPERTY`, with the target as it was typed. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from ringverify.check.outcome import LOADS
from ringverify.errors import Inconclusive
from ringverify.words import legible

if TYPE_CHECKING:
    from ringverify.properties.property import Property
    from ringverify.testing.checks import PlannedChecks
    from ringverify.testing.results import PropertyResult

ROOM = "ringverify"
"""First part of the ids of these tests."""

Try = Callable[[pytest.Item, "PlannedChecks", "Property"], "PropertyResult"]


@dataclasses.dataclass(frozen=True)
class RequestedTarget:
    """A target that was asked for.

    Attributes:
        target: the target as it was typed.
        checked: the planned checks of its implementation, or why it cannot be checked here.
        properties: the properties to try.
    """

    target: str
    checked: PlannedChecks | Inconclusive
    properties: list[Property]


class Implementations(pytest.Collector):
    """Collector of all targets."""

    @classmethod
    def under(cls, session: pytest.Session, prepared: list[RequestedTarget], attempt: Try) -> Implementations:
        """Make the collector, which belongs to no file."""
        collector: Implementations = cls.from_parent(session, name=ROOM, nodeid=ROOM)
        collector.prepared, collector.attempt = prepared, attempt
        return collector

    prepared: list[RequestedTarget]
    attempt: Try

    def collect(self) -> Iterator[ImplementationUnderTest]:
        """Yield a collector for each target."""
        for one in self.prepared:
            node: ImplementationUnderTest = ImplementationUnderTest.from_parent(self, name=legible(one.target))
            node.prepared, node.attempt = one, self.attempt
            yield node


class ImplementationUnderTest(pytest.Collector):
    """Collector of one target."""

    prepared: RequestedTarget
    attempt: Try

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test for each property, or one test that says why the target cannot be checked."""
        checked = self.prepared.checked
        if isinstance(checked, Inconclusive):
            cannot: CannotBeChecked = CannotBeChecked.from_parent(self, name=LOADS)
            cannot.target, cannot.reason = self.prepared.target, checked
            yield cannot
            return
        for property in self.prepared.properties:
            item: PropertyItem = PropertyItem.from_parent(self, name=property.id)
            item.checked, item.property, item.attempt = checked, property, self.attempt
            yield item


class PropertyItem(pytest.Item):
    """Test of one property of one target."""

    checked: PlannedChecks
    property: Property
    attempt: Try

    def runtest(self) -> None:
        """Try the property."""
        self.attempt(self, self.checked, self.property)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Return where the implementation is written, and what is tried."""
        implementation = self.checked.plan.implementation
        from ringverify.describing import place_of

        file, line = place_of(implementation)
        said = legible(f"{implementation.name}: {self.property.id}")
        return self.path if file is None else file, (line or 1) - 1, said


class CannotBeChecked(pytest.Item):
    """The one test of a target that cannot be checked here, named `LOADS`."""

    target: str
    reason: Inconclusive

    def runtest(self) -> None:
        """Raise the reason."""
        raise self.reason

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Return a title; there is no line in a file to point to."""
        return self.path, 0, f"{self.parent.name if self.parent else ''}: {self.name}"
