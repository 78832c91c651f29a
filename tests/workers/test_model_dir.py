"""What an operator may name as the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from orcaserve.workers.demo import pull
from orcaserve.workers.errors import ModelFetchError
from orcaserve.workers.model_dir import find_model


def test_directories_and_packaged_models(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path
    assert find_model("smollm2-135m") == pull("smollm2-135m")


@pytest.mark.parametrize("model", ["smollm3", "./not/there", "/not/there", "~/not/there", "no-such-file.gguf", ""])
def test_names_that_can_be_nothing(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFetchError, match="no model directory") as error:
        find_model(model)
    assert "smollm2-135m" in str(error.value)
