"""One warm process for all tests of this folder: they fork engines from it."""

from collections.abc import Iterator

import pytest
from support.warm_parent import WarmParent, warm_parent


@pytest.fixture(scope="session")
def parent() -> Iterator[WarmParent]:
    with warm_parent() as started:
        yield started
