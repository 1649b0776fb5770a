"""The fixture `numerics`: csrc/numerics as functions over arrays."""

import pytest

from support.numerics_library import NumericsLibrary, build


@pytest.fixture(scope="session")
def numerics(tmp_path_factory: pytest.TempPathFactory) -> NumericsLibrary:
    return build(tmp_path_factory.mktemp("numerics"))
