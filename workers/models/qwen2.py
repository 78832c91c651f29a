"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and a window on some layers of some models."""

from __future__ import annotations

from orcaserve.workers.models.decoder import Attention, Decoder, GatedMlp, PreNormLayer, Setup


def build(setup: Setup) -> Decoder:
    hf = setup.config.hf
    cos_sin = setup.rope_table(hf.rope_parameters)

    def layer(index: int) -> PreNormLayer:
        prefix = f"model.layers.{index}"
        window = hf.sliding_window if hf.layer_types[index] == "sliding_attention" else 0
        attention = Attention(setup, f"{prefix}.self_attn", cos_sin, qkv_bias=True, window=window)
        return PreNormLayer(setup, prefix, attention, GatedMlp(setup, f"{prefix}.mlp", hf.hidden_act))

    return Decoder(setup, [layer(index) for index in range(setup.config.num_layers)], hf.hidden_act)
