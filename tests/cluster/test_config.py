"""Options: one meaning from the command line, a YAML file and Serve's arguments; faults in one line."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orcaserve.cluster.config import ConfigError, ServeConfig
from orcaserve.cluster.model_info import BadModel, read_model_info
from orcaserve.cluster.ray_address import NoRay, join_ray
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


def test_ray_is_not_imported_before_its_environment_is_set() -> None:
    code = "import sys; from orcaserve import cli; from orcaserve.cluster import serve; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"config\.json"):
        read_model_info(tmp_path)
    with pytest.raises(ValueError, match="--max-model-len: 99999"):
        read_model_info(demo.pull("smollm2-135m"), max_model_len=99_999)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The demo model's directory, to be broken."""
    for file in demo.pull("smollm2-135m").iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def put(file: Path, text: str) -> None:
    file.unlink(missing_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("config.json", "[]", r"/config\.json: Expected `object`"),
        ("config.json", "{", r"/config\.json: Expecting property name"),
        ("config.json", "{}", r"/config\.json: .*`vocab_size`"),
        ("config.json", '{"vocab_size": "many"}', r"/config\.json: .*\$\.vocab_size"),
        ("generation_config.json", '{"eos_token_id": "x"}', r"/generation_config\.json: .*\$\.eos_token_id"),
        ("tokenizer_config.json", '{"chat_template": 5}', r"/tokenizer_config\.json: .*\$\.chat_template"),
    ],
)
def test_a_broken_model_is_one_line(copy: Path, name: str, text: str, reason: str) -> None:
    put(copy / name, text)
    with pytest.raises(BadModel, match=reason) as caught:
        read_model_info(copy)
    assert "\n" not in str(caught.value)


def test_what_a_model_may_leave_out(copy: Path) -> None:
    for name in ("generation_config.json", "tokenizer_config.json"):
        (copy / name).unlink()
    put(copy / "config.json", '{"vocab_size": 300, "eos_token_id": 7, "max_position_embeddings": 99, "dtype": [1]}')
    info = read_model_info(copy)
    assert (info.vocab_size, info.eos_token_ids, info.max_model_len) == (300, (7,), 99)
    assert (info.chat_template, info.special_tokens, info.generation_defaults) == (None, {}, {})

    put(copy / "generation_config.json", '{"eos_token_id": [1, 2], "temperature": 1, "top_k": null, "use_cache": true}')
    templates = '[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]'
    special = '"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null'
    put(copy / "tokenizer_config.json", f'{{"chat_template": {templates}, {special}}}')
    info = read_model_info(copy)
    assert (info.eos_token_ids, info.generation_defaults, info.chat_template) == ((1, 2), {"temperature": 1.0}, "D")
    assert info.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def fails_at_once(*arguments: str) -> str:
    """What the command says of its arguments."""
    return says_in_one_line(2, *arguments)


def says_in_one_line(code: int, *arguments: str) -> str:
    command = [sys.executable, "-m", "orcaserve.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("orcaserve: ")
    return done.stderr


@pytest.mark.parametrize("arguments", [["serve", "--port", "x"], ["serv"], ["serve", "--nonsense"], ["pull", "nope"]])
def test_bad_usage_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    fails_at_once(*arguments)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tokenizer.json", '{"model": {"type": "none"}}', "/tokenizer.json: data did not match"),
        ("chat_template.jinja", "{% if %}", "chat template cannot be used: Expected an expression"),
    ],
)
def test_what_routers_could_not_read_is_refused_before_they_start(
    copy: Path, name: str, text: str, reason: str
) -> None:
    put(copy / name, text)
    assert reason in fails_at_once("serve", str(copy))


def test_addresses_that_cannot_be_listened_on() -> None:
    assert "--host: nosuch.invalid is" in fails_at_once("serve", "--host", "nosuch.invalid")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"--port: cannot listen on 127.0.0.1:{port}" in fails_at_once("serve", "--port", str(port))


@pytest.mark.parametrize("option", ["--config", "--tenants-file", "--api-key-file"])
def test_a_file_that_cannot_be_read(option: str, tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'}: " in fails_at_once("serve", option, str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert f"{tmp_path / 'binary'}: " in fails_at_once("serve", option, str(tmp_path / "binary"))


@pytest.mark.parametrize(
    "arguments",
    [("serve", "--otlp-endpoint", "host:4318"), ("serve", "--drain-timeout-s", "inf"), ("drain", "--timeout", "nan")],
)
def test_values_that_cannot_be_used(arguments: tuple[str, ...]) -> None:
    assert arguments[1] in fails_at_once(*arguments)


@pytest.mark.parametrize("command", ["serve", "drain"])
def test_a_ray_that_is_not_there_is_told_at_once(command: str) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        assert f"no Ray at {address}: " in says_in_one_line(1, command, "--ray-address", address)


@pytest.mark.parametrize("address", ["nonsense", "nosuch.invalid:6379", "127.0.0.1:x", "127.0.0.1:1", "local"])
def test_an_address_that_cannot_be_rays(address: str) -> None:
    with pytest.raises(NoRay, match=r"^no Ray "):
        join_ray(address)
