"""Writes expected.json: what transformers answers greedily, in float32, to the prompts below.

    python tests/golden/make_expected.py

The margin is the least distance between the best and the second logit over all tokens of an answer: a prompt whose
margin is within rounding would compare luck, so the script refuses it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from orcaserve.workers.demo import pull

NUM_TOKENS = 16
MIN_MARGIN = 0.005  # a forward pass in float32 is good to about 0.0002
TARGET = Path(__file__).with_name("expected.json")

QUESTIONS = [
    "What is the capital of Germany?",
    "Name three primary colours.",
    "How many legs does a spider have?",
    "What is the largest ocean?",
    "What is the opposite of hot?",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Is 17 a prime number?",
    "What does the word 'ubiquitous' mean?",
    "Explain gravity to a child.",
]
TEXTS = [
    "Once upon a time, in a small village by the river,",
    "class Stack:\n    def push(self, item):\n",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "1, 2, 3, 4, 5, 6, 7,",
    "SELECT name, age FROM users WHERE",
    "Der Himmel ist blau und",
    "import numpy as np\n\nx = np.zeros((3, 3))\nprint(",
    "In 1969, the first human being set foot on the",
    "A",
    " ".join(f"item {i} costs {i * 7 % 13} coins;" for i in range(40)) + " In total",
]


def main() -> None:
    model_dir = pull("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    prompts += [tokenizer.encode(text) for text in TEXTS]
    answers = [answer(model, ids) for ids in prompts]
    TARGET.write_text(json.dumps(answers, separators=(",", ":")).replace('},{"prompt', '},\n{"prompt') + "\n")


@torch.inference_mode()
def answer(model: torch.nn.Module, prompt: list[int]) -> dict[str, object]:
    """Every token counts, eos included, so that all answers are of one length."""
    ids = list(prompt)
    margins = []
    for _ in range(NUM_TOKENS):
        best = model(torch.tensor([ids])).logits[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    if min(margins) < MIN_MARGIN:
        raise SystemExit(f"a near tie ({min(margins):.4f}) after {prompt[:20]}: choose another prompt")
    return {"prompt": prompt, "output": ids[len(prompt) :], "margin": round(min(margins), 4)}


if __name__ == "__main__":
    main()
