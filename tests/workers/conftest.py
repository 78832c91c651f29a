from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_bench import Bench, save_tokenizer
from tiny_models import save_tiny
from tokenizers import Tokenizer

from orcaserve.workers.grammar import GrammarLimits


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


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file))


@pytest.fixture
def bench(tokenizer_file: Path, tokenizer: Tokenizer) -> Iterator[Bench]:
    bench = Bench(tokenizer_file, tokenizer, GrammarLimits())
    yield bench
    bench.sampler.close()
