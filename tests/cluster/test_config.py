"""Options: one meaning from the command line, a YAML file and Serve's arguments; faults in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orcaserve.cluster.config import ConfigError, ServeConfig
from orcaserve.cluster.model_info import ModelNotFound, read_model_info
from orcaserve.cluster.service import scheduler_config
from orcaserve.workers import demo


def test_defaults_are_loopback_and_one_of_each() -> None:
    config = ServeConfig()
    assert (config.host, config.port, config.groups, config.routers, config.tensor_parallel_size) == (
        *("127.0.0.1", 8000),
        *(1, 1, 1),
    )
    assert config.on_loopback


def test_options_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 8\nkv_cache_memory: 2GiB\napi-key: [a, b]\nport: 9000\n")
    config = ServeConfig.load({"port": 9001}, file)
    assert (config.max_num_seqs, config.kv_cache_memory, config.port) == (8, 2 * 2**30, 9001)
    assert [key.partition(":")[0] for key in config.api_key] == ["sha256", "sha256"]  # kept as hashes alone


def test_arguments_survive_json() -> None:
    config = ServeConfig(api_key="secret", kv_cache_memory="1.5GB", max_model_len=100, scheduling_policy="fair")
    assert ServeConfig.load(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(("text", "num_bytes"), [("4GiB", 4 * 2**30), ("500MB", 5 * 10**8), ("7", 7), ("1k", 1000)])
def test_amounts_of_memory(text: str, num_bytes: int) -> None:
    assert ServeConfig(kv_cache_memory=text).kv_cache_memory == num_bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": 70_000}, "--port"),
        ({"kv_cache_memory": "lots"}, "lots"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size"),
        ({"tensor_parallel_size": 2, "torch_compile": True}, "torch_compile: only on GPUs, with one rank"),
        ({"device": "cpu", "torch_compile": True}, "torch_compile: only on GPUs"),
        ({"tensor_parallel_size": 4, "gpus_per_group": 2}, "2 GPUs do not give each of 4 ranks one"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "32 is less than max_num_seqs (64)"),
        ({"colour": "red"}, "--colour: no such option"),
    ],
)
def test_faults_are_one_line_with_the_option(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as fault:
        ServeConfig.load(options)
    assert said in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "{", "port: [1"])
def test_a_file_that_is_no_options_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        ServeConfig.load({}, tmp_path / "serve.yaml")


def test_keys_are_not_shown() -> None:
    assert "hunter2" not in repr(ServeConfig(api_key="hunter2"))


def test_the_engine_gets_every_option_it_has_a_field_for(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants:\n  - name: big\n    keys: [k]\n    weight: 3\n")
    info = read_model_info(demo.pull("smollm2-135m"), max_model_len=500)
    config = scheduler_config(ServeConfig(max_num_seqs=7, queue_timeout_s=3, tenants_file=tenants), info)
    assert (config.max_num_seqs, config.queue_timeout_s, config.max_model_len) == (7, 3, 500)
    assert config.eos_token_ids == info.eos_token_ids
    assert config.tenant_weights == {"big": 3}


def test_model_facts_without_torch() -> None:
    folder = demo.pull("smollm2-135m")
    info = read_model_info(folder, ("smol",))
    assert (info.name, info.vocab_size, info.max_model_len) == ("smol", 49_152, info.max_position_embeddings)
    assert info.eos_token_ids
    assert info.chat_template is not None
    code = (
        "import sys; from orcaserve.cluster import scheduler_actor, serve, router, model_info;"
        f"model_info.read_model_info({str(folder)!r});"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_model_info(tmp_path)
    with pytest.raises(ValueError, match="--max-model-len: 99999"):
        read_model_info(demo.pull("smollm2-135m"), max_model_len=99_999)


@pytest.mark.parametrize("arguments", [["serve", "--port", "x"], ["serv"], ["serve", "--nonsense"], ["pull", "nope"]])
def test_bad_usage_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "orcaserve.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("orcaserve: ")
