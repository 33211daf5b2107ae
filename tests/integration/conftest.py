"""One packed model for all tests of the whole engine on the simulated board."""

from pathlib import Path

import pytest
from support.asking import pack_with_end_tokens


@pytest.fixture(scope="session")
def calbin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the packed model; nobody changes it."""
    return pack_with_end_tokens(tmp_path_factory.mktemp("integration"))
