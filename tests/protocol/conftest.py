"""The package on virtual ranks, and the kernels that a module's `SCRIPT` compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from virtual_machine import PackageCopy


@pytest.fixture(scope="module")
def package() -> PackageCopy:
    from virtual_machine import PackageCopy

    return PackageCopy()


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory) -> dict[str, dict]:
    from compiled_apart import compiled_by

    return compiled_by(request.module.SCRIPT, tmp_path_factory.mktemp("ptx"))
