"""A checkpoint's config.json is completed by transformers once, and remembered as long as it stays the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from orcaserve.workers.models.config import read_config
from tests.workers.tiny_models import FAMILIES, TINY


@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_reading_asks_nobody_and_says_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.AutoConfig.for_model(family, **TINY | FAMILIES[family])
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    first = read_config(tmp_path, tmp_path / "cache")
    for name in ("hidden_size", "rope_parameters", "num_key_value_heads", "head_dim"):
        assert getattr(first.hf, name) == getattr(config, name)

    def nobody(folder: Path) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", nobody)
    assert read_config(tmp_path, tmp_path / "cache") == first
    changed = (tmp_path / "config.json").read_text().replace('"vocab_size": 199', '"vocab_size": 200')
    (tmp_path / "config.json").write_text(changed)
    with pytest.raises(AssertionError, match="asked again"):
        read_config(tmp_path, tmp_path / "cache")


def test_what_is_remembered_may_be_lost_or_broken(tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("llama", **TINY, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    first = read_config(tmp_path, tmp_path / "cache")
    [kept] = (tmp_path / "cache").iterdir()
    kept.write_text('{"vocab')
    assert read_config(tmp_path, tmp_path / "cache") == first
    (tmp_path / "file").write_text("")
    assert read_config(tmp_path, tmp_path / "file" / "cache") == first
