"""Chat templates: what transformers renders is what we render, for the demo model's template and for odder ones."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from orcaserve.cluster.chat import ChatTemplate
from orcaserve.cluster.model_info import ModelInfo
from orcaserve.cluster.protocol_chat import Message
from orcaserve.engine.errors import InvalidParameter

ODD = """{{ bos_token }}{% for m in messages %}
{%- if loop.index0 > 5 %}{% break %}{% endif %}
    {%- if m.role == 'assistant' %}
{% generation %}[A]{{ m.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- else %}
[{{ m.role | upper }}{{ ' ' ~ m.name if m.name is defined }}]{{ m['content'] }}
    {%- endif %}
{% endfor %}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}
{{ ns.n }} {{ {'a': 'é<'} | tojson }} {{ mode | default('plain') }}{% if add_generation_prompt %}[A]{% endif %}"""

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 🧪\n"}],
    [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": " B "},
        {"role": "user", "content": "<|im_end|>C"},
    ],
    [{"role": "user", "content": "A"}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": str(i)} for i in range(8)],
]


@pytest.fixture(scope="module")
def theirs(model: ModelInfo) -> Any:
    return AutoTokenizer.from_pretrained(model.model_dir)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", [None, ODD])
@pytest.mark.parametrize("prompt", [True, False])
def test_as_transformers_renders(
    model: ModelInfo, theirs: Any, conversation: list[dict[str, Any]], template: str | None, prompt: bool
) -> None:
    text = template or model.chat_template
    assert text is not None
    want = theirs.apply_chat_template(
        conversation, chat_template=text, tokenize=False, add_generation_prompt=prompt, mode="x"
    )
    got = ChatTemplate(text, model.special_tokens).render(
        [Message.model_validate(turn) for turn in conversation],
        add_generation_prompt=prompt,
        continue_final_message=False,
        template_kwargs={"mode": "x"},
    )
    assert got == want


def test_a_continued_turn_as_transformers_renders_it(model: ModelInfo, theirs: Any) -> None:
    assert model.chat_template is not None
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two "}]
    want = theirs.apply_chat_template(turns, tokenize=False, continue_final_message=True)
    got = render(model.chat_template, turns, continue_final_message=True)
    assert got == want
    assert got.endswith("One, two ")


def render(template: str, turns: list[dict[str, Any]], **options: Any) -> str:
    defaults: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": False, "template_kwargs": {}}
    return ChatTemplate(template, {}).render([Message.model_validate(t) for t in turns], **(defaults | options))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[99].content }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ undefined_name.attribute }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_raises_is_a_refusal(template: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        render(template, [{"role": "user", "content": "Hi"}])
    assert refused.value.param == "messages"
    assert len(refused.value.message) < 400


def test_developer_is_system_where_the_template_knows_no_developer() -> None:
    turns = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", turns) == "system"
    assert render("{% if messages[0].role == 'developer' %}dev{% endif %}", turns) == "dev"


def test_a_turn_that_the_template_drops_cannot_be_continued() -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(InvalidParameter) as refused:
        render("{{ messages[0].content }}", turns, continue_final_message=True)
    assert refused.value.param == "messages[1].content"
