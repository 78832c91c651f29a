"""The parts that the families put together: attention, the gated MLP, two orders of norms, and the whole decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.decoder_layers import DecoderLayer, DecoderShape, NativeDecoder, can_run
from orcaserve.kernels.paged_attention import paged_attention
from orcaserve.kernels.rope import UnsupportedRope, cos_sin_table, rope_kv_write
from orcaserve.kernels.silu_mul import gelu_tanh_mul, silu_mul
from orcaserve.workers.errors import ModelLoadError, PeerLost
from orcaserve.workers.layers import ColumnLinear, Embedding, LmHead, Output, RMSNorm, RowLinear
from orcaserve.workers.models.config import ModelConfig
from orcaserve.workers.sharding import RankShard
from orcaserve.workers.shared_memory import SharedMemoryGroup
from orcaserve.workers.tp import SoloGroup, TpGroup

ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
}


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a family needs to build one rank's part of a model."""

    config: ModelConfig
    shard: RankShard
    tp: TpGroup
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    attention_backend: str = "auto"

    def norm(self, name: str, size: int | None = None, offset: float = 0.0) -> RMSNorm:
        width = self.config.hidden_size if size is None else size
        return RMSNorm(name, width, self.config.rms_norm_eps, self.dtype, offset)

    def rope_table(self, parameters: Mapping[str, Any]) -> Tensor:
        """cos_sin for `rope_kv_write`; layers of the same parameters share one."""
        config = self.config
        try:
            table = cos_sin_table(config.head_dim, self.max_model_len, parameters, config.max_position_embeddings)
        except UnsupportedRope as error:
            raise ModelLoadError("config.json", "rope_parameters", str(error)) from error
        return table.to(self.device)


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache, for this rank's heads."""

    def __init__(
        self,
        setup: Setup,
        prefix: str,
        cos_sin: Tensor,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        head_norm_offset: float | None = None,  # None: queries and keys are not normalised
        scale: float | None = None,
        window: int = 0,
    ) -> None:
        super().__init__()
        config, shard = setup.config, setup.shard
        head_dim, hidden = config.head_dim, config.hidden_size
        self.cos_sin = cos_sin
        self.head_dim = head_dim
        self.num_heads = len(shard.heads)
        self.num_kv_heads = len(shard.kv_heads)
        self.widths = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.backend = setup.attention_backend
        heads, kv_heads = shard.heads.scaled(head_dim), shard.kv_heads.scaled(head_dim)
        outputs = [
            Output(f"{prefix}.q_proj", config.num_heads * head_dim, heads),
            Output(f"{prefix}.k_proj", config.num_kv_heads * head_dim, kv_heads),
            Output(f"{prefix}.v_proj", config.num_kv_heads * head_dim, kv_heads),
        ]
        self.qkv = ColumnLinear(hidden, outputs, qkv_bias, setup.dtype)
        self.normalises = head_norm_offset is not None
        if head_norm_offset is not None:
            self.q_norm = setup.norm(f"{prefix}.q_norm", head_dim, head_norm_offset)
            self.k_norm = setup.norm(f"{prefix}.k_norm", head_dim, head_norm_offset)
        name, width = f"{prefix}.o_proj", config.num_heads * head_dim
        self.output = RowLinear(name, width, heads, hidden, output_bias, setup.tp, setup.dtype)

    def forward(self, x: Tensor, kv_cache: Tensor, batch: AttentionBatch) -> Tensor:
        num_tokens = x.shape[0]
        q, k, v = self.qkv(x).view(num_tokens, -1, self.head_dim).split(self.widths, dim=1)
        if self.normalises:
            q = self.q_norm(q.reshape(-1, self.head_dim)).view(q.shape)
            k = self.k_norm(k.reshape(-1, self.head_dim)).view(k.shape)
        q = rope_kv_write(q, k, v, self.cos_sin, kv_cache, batch)
        attended = paged_attention(q, kv_cache, batch, self.scale, self.window, backend=self.backend)
        return self.output(attended.view(num_tokens, -1))

    __call__ = forward

    def native(self) -> dict[str, Any]:
        """The fields of DecoderLayer that are attention's."""
        return {
            "qkv": self.qkv.packed,
            "qkv_bias": self.qkv.bias,
            "output": self.output.packed,
            "output_bias": self.output.bias,
            "q_norm": self.q_norm.weight if self.normalises else None,
            "k_norm": self.k_norm.weight if self.normalises else None,
            "cos_sin": self.cos_sin,
            "scale": self.scale,
            "window": self.window,
        }


class GatedMlp(nn.Module):
    def __init__(self, setup: Setup, prefix: str, activation: str, bias: bool = False) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            reason = f"activation {activation!r} is not among {', '.join(ACTIVATIONS)}"
            raise ModelLoadError("config.json", "hidden_act", reason)
        self.activation = ACTIVATIONS[activation]
        hidden, total, span = setup.config.hidden_size, setup.config.intermediate_size, setup.shard.mlp
        columns = slice(span.start, span.stop)
        self.width = len(span)
        outputs = [Output(f"{prefix}.gate_proj", total, columns), Output(f"{prefix}.up_proj", total, columns)]
        self.gate_up = ColumnLinear(hidden, outputs, bias, setup.dtype)
        self.down = RowLinear(f"{prefix}.down_proj", total, columns, hidden, bias, setup.tp, setup.dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).split(self.width, dim=1)
        return self.down(self.activation(gate, up))

    __call__ = forward

    def native(self) -> dict[str, Any]:
        """The fields of DecoderLayer that are the MLP's."""
        return {
            "gate_up": self.gate_up.packed,
            "gate_up_bias": self.gate_up.bias,
            "down": self.down.packed,
            "down_bias": self.down.bias,
        }


class Block(nn.Module):
    """A layer of a decoder. `native` is what `forward` does, put so that all layers can run in one native call."""

    def forward(
        self, x: Tensor, residual: Tensor | None, kv_cache: Tensor, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """(what is still to be added, the sum so far)."""
        raise NotImplementedError

    def native(self) -> DecoderLayer:
        raise NotImplementedError


class PreNormLayer(Block):
    """norm, attention, add, norm, MLP, add. The last addition is left to the next norm, which does it on the way."""

    def __init__(self, setup: Setup, prefix: str, attention: Attention, mlp: GatedMlp) -> None:
        super().__init__()
        self.input_norm = setup.norm(f"{prefix}.input_layernorm")
        self.attention = attention
        self.mlp_norm = setup.norm(f"{prefix}.post_attention_layernorm")
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, kv_cache: Tensor, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            normed, residual = self.input_norm(x), x
        else:
            normed, residual = self.input_norm.add(x, residual)
        normed, residual = self.mlp_norm.add(self.attention(normed, kv_cache, batch), residual)
        return self.mlp(normed), residual

    __call__ = forward

    def native(self) -> DecoderLayer:
        return DecoderLayer(
            input_norm=self.input_norm.weight,
            mlp_norm=self.mlp_norm.weight,
            **self.attention.native(),
            **self.mlp.native(),
        )


class Decoder(nn.Module):
    """A causal language model: embedding, layers, final norm, head. `attach` a KV pool before the first step."""

    kv_caches: Sequence[Tensor]

    def __init__(
        self,
        setup: Setup,
        layers: Sequence[Block],
        activation: str,
        *,
        norm: RMSNorm | None = None,
        embedding_scale: float = 1.0,
        logit_softcap: float = 0.0,
    ) -> None:
        super().__init__()
        config = setup.config
        size, width, span = config.vocab_size, config.hidden_size, setup.shard.vocab
        self.setup = setup
        self.embedding = Embedding("model.embed_tokens", size, width, span, setup.tp, setup.dtype)
        self.layers = nn.ModuleList(layers)
        self.blocks = list(layers)  # the same: torch's list is slow to walk
        self.activation = activation
        self.norm = setup.norm("model.norm") if norm is None else norm
        self.head = LmHead("lm_head", self.embedding, config.tie_word_embeddings)
        self.embedding_scale = embedding_scale
        self.logit_softcap = logit_softcap
        self.native: NativeDecoder | None = None

    def attach(self, kv_caches: Sequence[Tensor]) -> None:
        """The KV pool to run over, a tensor a layer. Where they can, all layers then run as one native call."""
        self.kv_caches = kv_caches
        self.native = self._native(kv_caches)

    def forward(self, ids: Tensor, batch: AttentionBatch, rows: Tensor | None) -> Tensor:
        """The normalised hidden states of these tokens of the flat batch (None: of all)."""
        x = self.embedding(ids)
        if self.embedding_scale != 1.0:
            x *= self.embedding_scale
        x, residual = self._run_layers(x, batch)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        return self.norm.add(x, residual)[0]

    __call__ = forward

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Over the whole vocabulary, float32, on rank 0; None on the others."""
        logits = self.head(hidden)
        if logits is None or not self.logit_softcap:
            return logits
        return torch.tanh(logits / self.logit_softcap) * self.logit_softcap

    def _run_layers(self, x: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """(what is still to be added, the sum so far)."""
        if self.native is not None:
            try:
                return self.native(x, batch)
            except TimeoutError as error:
                raise PeerLost(f"rank {self.setup.tp.rank}: {error}") from error
        residual = None
        for layer, kv_cache in zip(self.blocks, self.kv_caches, strict=True):
            x, residual = layer(x, residual, kv_cache, batch)
        assert residual is not None, "a decoder has layers"
        return x, residual

    def _native(self, kv_caches: Sequence[Tensor]) -> NativeDecoder | None:
        """None on a GPU, across hosts, for a dtype without native kernels, and where another backend is asked for."""
        setup, tp = self.setup, self.setup.tp
        if setup.attention_backend not in ("auto", "cpu") or not isinstance(tp, SoloGroup | SharedMemoryGroup):
            return None
        layers = [block.native() for block in self.blocks]
        if not can_run(layers):
            return None
        shape = DecoderShape(
            num_heads=len(setup.shard.heads),
            num_kv_heads=len(setup.shard.kv_heads),
            head_dim=setup.config.head_dim,
            eps=setup.config.rms_norm_eps,
            activation="silu" if self.activation == "silu" else "gelu_tanh",
        )
        return NativeDecoder(layers, shape, kv_caches, tp.native if isinstance(tp, SharedMemoryGroup) else None)
