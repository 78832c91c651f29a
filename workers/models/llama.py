"""Llama 2 and 3.x (Touvron et al., 2023): pre-norm, rotary positions, grouped queries, SwiGLU."""

from __future__ import annotations

from orcaserve.workers.models.decoder import Attention, Decoder, GatedMlp, PreNormLayer, Setup


def build(setup: Setup) -> Decoder:
    hf = setup.config.hf
    cos_sin = setup.rope_table(hf.rope_parameters)

    def layer(index: int) -> PreNormLayer:
        prefix = f"model.layers.{index}"
        bias = hf.attention_bias
        attention = Attention(setup, f"{prefix}.self_attn", cos_sin, qkv_bias=bias, output_bias=bias)
        return PreNormLayer(setup, prefix, attention, GatedMlp(setup, f"{prefix}.mlp", hf.hidden_act, hf.mlp_bias))

    return Decoder(setup, [layer(index) for index in range(setup.config.num_layers)], hf.hidden_act)
