"""Qwen3: Llama whose heads' queries and keys are normalised before they are rotated."""

from __future__ import annotations

from orcaserve.workers.models.decoder import Attention, Decoder, GatedMlp, PreNormLayer, Setup


def build(setup: Setup) -> Decoder:
    hf = setup.config.hf
    cos_sin = setup.rope_table(hf.rope_parameters)

    def layer(index: int) -> PreNormLayer:
        prefix = f"model.layers.{index}"
        attention = Attention(
            setup,
            f"{prefix}.self_attn",
            cos_sin,
            qkv_bias=hf.attention_bias,
            output_bias=hf.attention_bias,
            head_norm_offset=0.0,
            window=hf.sliding_window if hf.layer_types[index] == "sliding_attention" else 0,
        )
        return PreNormLayer(setup, prefix, attention, GatedMlp(setup, f"{prefix}.mlp", hf.hidden_act))

    return Decoder(setup, [layer(index) for index in range(setup.config.num_layers)], hf.hidden_act)
