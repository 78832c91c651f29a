"""One rank of a tensor-parallel group: the model's shard, its KV shard and the slot table. No ray in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from orcaserve.engine.messages import Chunk, NewSlot, PoolFile, SlotKv, StepPlan, StepResult
from orcaserve.engine.sampling import SamplingParams
from orcaserve.kernels import cpu
from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.dispatch import BackendUnavailable
from orcaserve.kernels.paged_attention import operation as attention
from orcaserve.workers import kv_shard
from orcaserve.workers.compiled import CompiledDecode
from orcaserve.workers.config import WorkerConfig
from orcaserve.workers.errors import BackendUnusable, CannotCompile, ModelLoadError
from orcaserve.workers.grammar import GrammarCompiler, GrammarLimits
from orcaserve.workers.graphs import DecodeGraphs
from orcaserve.workers.kv_pool import SharedKvPool
from orcaserve.workers.models.config import ModelConfig, read_config
from orcaserve.workers.models.decoder import Decoder, Setup
from orcaserve.workers.models.registry import load_model, model_dtype, refuse_unknown, shards_of
from orcaserve.workers.runner import ModelRunner
from orcaserve.workers.sampler import Sampler
from orcaserve.workers.slots import SlotTable
from orcaserve.workers.speculation import PromptLookup
from orcaserve.workers.tp import TpGroup, join

TOKENIZER = "tokenizer.json"


class Worker:
    """Calls come in this order: load, num_kv_blocks, allocate, warm_up, then step and reset.

    All ranks of a group get the same calls, and all but `reset`, `hold` and `drop` meet inside: none returns before all
    have been made.
    """

    model_config: ModelConfig
    tp: TpGroup
    model: Decoder
    kv_shape: kv_shard.KvShape
    kv_pool: SharedKvPool | None = None  # where neighbours may read it
    runner: ModelRunner
    sampler: Sampler | None = None  # of rank 0

    def __init__(self, config: WorkerConfig, rank: int, init_method: str) -> None:
        self.config = config
        self.rank = rank
        self.init_method = init_method
        self.device = torch.device("cpu" if config.device == "cpu" else f"cuda:{torch.cuda.current_device()}")

    def load(self) -> None:
        """Meet the other ranks, read the weights. Raises a WorkerError; what can be refused early, is."""
        self._set_threads()
        self._check_backend()
        self._check_compile()
        model_dir = Path(self.config.model_dir)
        self.model_config = read_config(model_dir)
        refuse_unknown(self.model_config, model_dir)
        shard = shards_of(self.model_config, self.config.tensor_parallel_size)[self.rank]
        dtype = model_dtype(self.model_config, self.config.dtype)
        self.kv_shape = kv_shard.KvShape(self.model_config, shard, self.config.block_size, dtype)
        self.tp = join(
            self.init_method,
            self.rank,
            self.config.tensor_parallel_size,
            self.config.device,
            self.config.rendezvous_timeout_s,
        )
        setup = Setup(
            config=self.model_config,
            shard=shard,
            tp=self.tp,
            dtype=dtype,
            device=self.device,
            max_model_len=self.config.max_model_len,
            attention_backend=self.config.attention_backend,
        )
        try:
            self.model = load_model(setup, model_dir)
            self.num_token_ids = num_token_ids(model_dir, self.model_config.vocab_size)
        except ModelLoadError:
            self.tp.close()
            raise

    def num_kv_blocks(self) -> int:
        """What this rank could hold; the group takes the least over its ranks. Raises NotEnoughMemory."""
        if self.config.device == "cpu":
            return kv_shard.num_cpu_blocks(self.config, self.kv_shape)
        return kv_shard.num_gpu_blocks(self.config, self.kv_shape, self.device, self._profile)

    def allocate(self, num_blocks: int) -> None:
        if self.config.share_kv and self.config.device == "cpu":
            self.kv_pool = SharedKvPool(self.kv_shape, num_blocks)
            self.model.attach(self.kv_pool.layers)
        else:
            self.model.attach(self.kv_shape.allocate(num_blocks, self.device))
        self.num_blocks = num_blocks
        self.compiled = self._compile()
        self.graphs = self._capture_graphs()
        self.reset()

    def warm_up(self) -> None:
        """A prefill and a decode step of one request, so that the first real one is not the slow one."""
        room = min(self.config.max_model_len, self.num_blocks * self.config.block_size)
        prompt = min(self.config.max_num_batched_tokens, room - 1, 64)
        num_blocks = -(-(prompt + 1) // self.config.block_size)
        sampling = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
        new = NewSlot(0, np.zeros(prompt, np.int32).tobytes(), prompt, sampling)
        blocks = np.arange(num_blocks, dtype=np.int32)
        table = (np.zeros_like(blocks).tobytes(), blocks.tobytes())
        self.step(StepPlan(0, [], [new], *table, [], [Chunk(0, 0, prompt, True)], b""))
        self.step(StepPlan(1, [], [], b"", b"", [], [], np.zeros(1, np.int32).tobytes()))
        self.tp.set_timeout(self.config.step_timeout_s)
        self.reset()

    @property
    def pool_file(self) -> PoolFile | None:
        """Where neighbours find the KV pool of this rank, once it is allocated, if they may read it."""
        return None if self.kv_pool is None else self.kv_pool.file

    def hold(self, group_id: int, file: PoolFile) -> None:
        """Keep the pool of a neighbour, so that plans can import its blocks. Raises PoolUnreadable."""
        assert self.kv_pool is not None
        self.kv_pool.hold(group_id, file)

    def drop(self, group_id: int) -> None:
        assert self.kv_pool is not None
        self.kv_pool.drop(group_id)

    def step(self, plan: StepPlan) -> StepResult | None:
        """One model step; the result comes from rank 0, the others return None."""
        with torch.inference_mode():
            return self.runner.run(plan)

    def kept_kv(self) -> list[SlotKv]:
        """What is computed of the requests that run here, to be told to the scheduler that takes this worker over."""
        return self.runner.slots.kept()

    def reset(self) -> None:
        """Forget all slots and the pools of neighbours: a new scheduler adopts this worker."""
        config = self.config
        self._close_sampler()
        if self.kv_pool is not None:
            self.kv_pool.drop_all()
        slots = SlotTable(config.max_num_seqs, config.max_model_len, config.block_size)
        if self.rank == 0:
            self.sampler = self._make_sampler(slots)
        self.runner = ModelRunner(
            self.model,
            self.tp,
            slots,
            self.sampler,
            device=self.device,
            kv_pool=self.kv_pool,
            drafter=PromptLookup() if config.num_speculative_tokens else None,
            graphs=self.graphs,
            compiled=self.compiled,
        )

    def close(self) -> None:
        self._close_sampler()
        if self.kv_pool is not None:
            self.kv_pool.close()
        self.tp.close()

    def _make_sampler(self, slots: SlotTable) -> Sampler:
        """Without a tokenizer there are no grammars."""
        file, eos_token_ids = Path(self.config.model_dir) / TOKENIZER, self.model_config.eos_token_ids
        limits = GrammarLimits(
            compile_timeout_s=self.config.grammar_compile_timeout_s,
            max_compiled_bytes=self.config.max_grammar_bytes,
            max_cached_bytes=self.config.grammar_cache_bytes,
        )
        grammars = GrammarCompiler(file, self.num_token_ids, eos_token_ids, limits) if file.is_file() else None
        return Sampler(slots, self.num_token_ids, eos_token_ids, self.device, grammars)

    def _close_sampler(self) -> None:
        if self.sampler is not None:
            self.sampler.close()

    def _set_threads(self) -> None:
        """The ranks of a group share the cores of a CPU host."""
        cores = len(os.sched_getaffinity(0))
        num_threads = self.config.num_threads or max(1, cores // self.config.tensor_parallel_size)
        torch.set_num_threads(num_threads)
        cache_dir = Path(self.config.cache_dir) if self.config.cache_dir else None
        if self.config.device == "cpu" and cpu.available(cache_dir):
            cpu.set_num_threads(num_threads)

    def _check_backend(self) -> None:
        """Before the weights are read, and not at the first request."""
        try:
            attention.implementation(self.device.type, self.config.attention_backend)
        except BackendUnavailable as error:
            raise BackendUnusable(str(error)) from error

    def _check_compile(self) -> None:
        if self.config.torch_compile and self.config.tensor_parallel_size > 1:
            raise CannotCompile("torch_compile: a group of several ranks is not compiled")
        if self.config.torch_compile and self.config.device == "cpu" and cpu.available():
            raise CannotCompile(
                "torch_compile: on a CPU all layers are one native call, and nothing is left to compile"
            )

    def _compile(self) -> CompiledDecode | None:
        if not self.config.torch_compile:
            return None
        compiled = CompiledDecode(self.model)
        with torch.inference_mode():
            compiled.warm_up(
                self.config.max_num_seqs, -(-self.config.max_model_len // self.config.block_size), self.device
            )
        return compiled

    def _capture_graphs(self) -> DecodeGraphs | None:
        if self.config.device == "cpu" or self.config.enforce_eager:
            return None
        config = self.config
        graphs = DecodeGraphs(self.model, config.max_num_seqs, config.max_model_len, self.device, self.compiled)
        with torch.inference_mode():
            graphs.capture()
        return graphs

    def _profile(self) -> None:
        """A step of the largest size, with no key to read and none written."""
        num_tokens = self.config.max_num_batched_tokens
        self.model.attach(self.kv_shape.allocate(1, self.device))

        def full(value: int, count: int, dtype: torch.dtype) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=self.device)

        batch = AttentionBatch(
            query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=self.device),
            context_lens=full(0, 1, torch.int32),
            block_tables=full(0, 1, torch.int32).unsqueeze(0),
            slot_mapping=full(-1, num_tokens, torch.int64),
            positions=full(0, num_tokens, torch.int64),
            max_query_len=num_tokens,
            max_context_len=1,
        )
        with torch.inference_mode():
            hidden = self.model(full(0, num_tokens, torch.int64), batch, None)
            self.model.logits(hidden[: self.config.max_num_seqs])


def num_token_ids(model_dir: Path, vocab_size: int) -> int:
    """How many ids the tokenizer knows; the rows of the embedding beyond are padding. All, if it comes without one."""
    file = model_dir / TOKENIZER
    if not file.is_file():
        return vocab_size
    try:
        content = json.loads(file.read_text())
        added = [token["id"] for token in content["added_tokens"]]
        vocab = content["model"]["vocab"]  # {token: id}, or in a unigram model the list of [token, score] in order
        last = max(vocab.values()) if isinstance(vocab, dict) else len(vocab) - 1
        return min(vocab_size, max([last, *added]) + 1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(str(file), "", f"not a readable tokenizer: {type(error).__name__}: {error}") from error
