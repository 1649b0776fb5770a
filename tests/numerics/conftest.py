"""The fixture `numerics`: csrc/numerics as functions over arrays."""

import pytest

from support.numerics_library import NumericsLibrary, library


@pytest.fixture(scope="session")
def numerics() -> NumericsLibrary:
    return library()
