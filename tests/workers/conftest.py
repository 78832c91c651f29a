from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """tiny(family, **config fields) -> (folder, transformers' model), made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(family: str, **changes: Any) -> tuple[Path, Any]:
        key = repr((family, sorted(changes.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = (folder, save_tiny(folder, family, **changes))
        return made[key]

    return make
