"""Every choice of an operator on one page: from the command line, a YAML file or Serve's application arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from orcaserve.cluster.app_config import AppConfig
from orcaserve.engine.config import SchedulingPolicy

Device = Literal["cpu", "cuda"]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}


class ConfigError(ValueError):
    """One line for the operator: which option is wrong and what it may be."""


def parse_bytes(value: Any) -> Any:
    """`"4GiB"`, `"500MB"`, `"2g"` or a plain number of bytes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?)b?\s*", value.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is no amount of memory; write for example 4GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class ServeConfig(AppConfig):
    """What `orcaserve serve` is told. Names and meanings are vLLM's where vLLM has the flag."""

    model: str = Field("smollm2-135m", description="a local directory, a .gguf file, a hub id, or smollm2-135m")
    served_model_name: Strings = Field((), description="names that clients may use (default: the model's)")
    host: str = Field(
        "127.0.0.1", min_length=1, description="IPv4 address to listen on; anything but loopback wants --api-key"
    )
    port: int = Field(8000, ge=1, le=65535)
    name: str = Field("orcaserve", pattern=r"^[a-z][a-z0-9-]*$", description="of the application on the Ray cluster")
    ray_address: str | None = Field(None, description="a running Ray cluster to join; default: start one here")

    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensor_parallel_size: int = Field(1, ge=1, description="ranks of one group")
    gpus_per_group: int = Field(0, ge=0, description="GPUs of one group; 0: one per rank on cuda")
    accelerator_type: str | None = Field(None, description="Ray's name of the GPU a group must run on, such as H100")
    groups: int = Field(1, ge=1, description="tensor-parallel groups at the start, each a whole copy of the model")
    min_groups: int | None = Field(None, ge=0, description="scale down to this many when idle; default: --groups")
    max_groups: int | None = Field(None, ge=1, description="scale up to this many under load; default: --groups")
    ttft_target_s: float = Field(2.0, gt=0, description="scaling keeps the wait for the first token below this")
    upscale_delay_s: float = Field(2.0, ge=0, description="more groups must have been needed for this long")
    downscale_delay_s: float = Field(120.0, ge=0, description="fewer groups must have been enough for this long")
    downscale_to_zero_delay_s: float = Field(300.0, ge=0, description="nothing must have come for this long")
    routers: int = Field(1, ge=1, description="HTTP router replicas")

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="auto: the checkpoint's")
    max_model_len: int | None = Field(None, ge=1, description="tokens of prompt and output; default: the model's")
    block_size: int = Field(16, ge=1, description="tokens of one KV block")
    kv_cache_memory: Bytes = Field(0, description="KV cache of one CPU rank, as 4GiB; 0: a share of free memory")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    attention_backend: Literal["auto", "triton", "xformers", "flashinfer", "cpu", "reference"] = "auto"
    enforce_eager: bool = Field(False, description="no CUDA graphs")
    torch_compile: bool = Field(False, description="steps of decodes alone by torch.compile; on GPUs, one rank a group")
    num_threads: int = Field(0, ge=0, description="CPU threads of one rank; 0: the cores divided by the ranks")
    kernel_cache_dir: Path | None = Field(
        None, description="where compiled CPU kernels are kept; default: ~/.cache/orcaserve/kernels"
    )
    grammar_compile_timeout_s: float = Field(
        10.0, gt=0, description="a request whose grammar its group has not compiled by then ends with an error"
    )
    max_grammar_memory: Bytes = Field(64 * 2**20, description="of one compiled grammar in a group, as 64MiB")
    grammar_cache_memory: Bytes = Field(512 * 2**20, description="of compiled grammars that a group keeps")

    max_num_seqs: int = Field(64, ge=1, description="requests that one group runs at a time")
    max_num_batched_tokens: int = Field(512, ge=1, description="tokens that one step of one group computes at most")
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = Field(0, ge=0, description="most tokens of one prompt in a step; 0: no limit")
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_queued_requests: int = Field(1024, ge=1)
    max_queued_tokens: int = Field(4_000_000, ge=1)
    queue_timeout_s: float = Field(0.0, ge=0, description="longest wait for the first token; 0: no limit")
    num_speculative_tokens: int = Field(0, ge=0, description="drafts a step may verify, from the text so far")
    max_steps_in_flight: int = Field(2, ge=1, description="plans sent before the first of their results is back")

    step_timeout_s: float = Field(60.0, gt=0, description="a group whose step takes longer is dead")
    start_timeout_s: float = Field(1800.0, gt=0, description="a group that is not ready by then is started again")
    drain_timeout_s: float = Field(5.0, ge=0, description="running streams get this long to finish on a stop")
    orphan_timeout_s: float = Field(
        30.0, gt=0, description="groups without a router end after this long, if the application was deleted"
    )
    max_group_losses: int = Field(2, ge=1, description="a request that has killed this many groups is ended")

    @model_validator(mode="after")
    def _consistent(self) -> ServeConfig:
        if self.gpus_per_group and self.gpus_per_group < self.tensor_parallel_size:
            raise ValueError(
                f"gpus_per_group: {self.gpus_per_group} GPUs do not give each of {self.tensor_parallel_size} ranks one"
            )
        if self.torch_compile and (self.tensor_parallel_size > 1 or self.device == "cpu"):
            raise ValueError("torch_compile: only on GPUs, with one rank a group")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is less than max_num_seqs ({self.max_num_seqs})"
            )
        return self

    @model_validator(mode="after")
    def _scalable(self) -> ServeConfig:
        low, high = self.group_range
        if not low <= self.groups <= high:
            raise ValueError(f"groups: {self.groups} is not between min_groups ({low}) and max_groups ({high})")
        return self

    @property
    def group_range(self) -> tuple[int, int]:
        """Fewest and most groups; the same twice where nothing is scaled."""
        return (
            self.groups if self.min_groups is None else self.min_groups,
            self.groups if self.max_groups is None else self.max_groups,
        )

    @property
    def on_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "localhost")

    @classmethod
    def load(cls, options: dict[str, Any], file: Path | None = None) -> ServeConfig:
        """Options given one by one win over those of the YAML file. Raises ConfigError with one line."""
        values = {} if file is None else _read_yaml(file)
        values |= options
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_one_line(dict(e)) for e in error.errors())) from None


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file}: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {file}: expected `option: value` lines, got a {type(values).__name__}")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _one_line(error: dict[str, Any]) -> str:
    option = "--" + str(error["loc"][0]).replace("_", "-") + ": " if error["loc"] else ""
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{option}no such option"
    shows_value = error["loc"] and error["loc"][0] != "api_key" and "got" not in message
    return f"{option}{message}" + (f", got {error['input']!r}" if shows_value else "")
