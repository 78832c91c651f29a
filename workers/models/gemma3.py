"""Gemma 3, text (2025): norms on both sides of attention and MLP, normalised queries and keys, scaled embeddings.

Most layers look back over a window and rotate with a base frequency of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.decoder_layers import DecoderLayer
from orcaserve.workers.models.decoder import Attention, Block, Decoder, GatedMlp, Setup

NORM_OFFSET = 1.0


class SandwichLayer(Block):
    """norm, attention, norm, add, norm, MLP, norm, add; the last addition is left to the next layer's first norm."""

    def __init__(self, setup: Setup, prefix: str, attention: Attention, mlp: GatedMlp) -> None:
        super().__init__()
        self.before_attention = setup.norm(f"{prefix}.input_layernorm", offset=NORM_OFFSET)
        self.attention = attention
        self.after_attention = setup.norm(f"{prefix}.post_attention_layernorm", offset=NORM_OFFSET)
        self.before_mlp = setup.norm(f"{prefix}.pre_feedforward_layernorm", offset=NORM_OFFSET)
        self.mlp = mlp
        self.after_mlp = setup.norm(f"{prefix}.post_feedforward_layernorm", offset=NORM_OFFSET)

    def forward(
        self, x: Tensor, residual: Tensor | None, kv_cache: Tensor, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            normed, residual = self.before_attention(x), x
        else:
            normed, residual = self.before_attention.add(x, residual)
        attended = self.after_attention(self.attention(normed, kv_cache, batch))
        normed, residual = self.before_mlp.add(attended, residual)
        return self.after_mlp(self.mlp(normed)), residual

    __call__ = forward

    def native(self) -> DecoderLayer:
        return DecoderLayer(
            input_norm=self.before_attention.weight,
            after_attention_norm=self.after_attention.weight,
            mlp_norm=self.before_mlp.weight,
            after_mlp_norm=self.after_mlp.weight,
            **self.attention.native(),
            **self.mlp.native(),
        )


def build(setup: Setup) -> Decoder:
    config, hf = setup.config, setup.config.hf
    tables = {kind: setup.rope_table(hf.rope_parameters[kind]) for kind in sorted(set(hf.layer_types))}

    def layer(index: int) -> SandwichLayer:
        prefix, kind = f"model.layers.{index}", hf.layer_types[index]
        attention = Attention(
            setup,
            f"{prefix}.self_attn",
            tables[kind],
            qkv_bias=hf.attention_bias,
            output_bias=hf.attention_bias,
            head_norm_offset=NORM_OFFSET,
            scale=hf.query_pre_attn_scalar**-0.5,
            window=hf.sliding_window if kind == "sliding_attention" else 0,
        )
        return SandwichLayer(setup, prefix, attention, GatedMlp(setup, f"{prefix}.mlp", hf.hidden_activation))

    # The model was trained with the scale rounded to its dtype.
    scale = torch.tensor(config.hidden_size**0.5, dtype=setup.dtype).item()
    return Decoder(
        setup,
        [layer(index) for index in range(config.num_layers)],
        hf.hidden_activation,
        norm=setup.norm("model.norm", offset=NORM_OFFSET),
        embedding_scale=scale,
        logit_softcap=hf.final_logit_softcapping or 0.0,
    )
