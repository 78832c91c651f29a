"""A conversation becomes a prompt: the model's own Jinja chat template, in a sandbox, with the names that
transformers gives to templates. transformers itself is not imported: it costs a second and 60 MB per router.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orcaserve.cluster.model_info import BadModel
from orcaserve.cluster.protocol_chat import Message
from orcaserve.engine.errors import InvalidParameter

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_END_MARK = "\ue000END OF THE CONTINUED TURN\ue000"
_MAX_REASON_CHARS = 200
# What a template, which is a program, may raise on a conversation that it does not like.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words for training; here it only shows them."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own interface)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """Renders conversations. Raises BadModel for a template that is none."""

    def __init__(self, template: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateError as error:
            raise BadModel(f"the model's chat template cannot be used: {error}") from None
        self._special_tokens = special_tokens
        self._knows_developer = "developer" in template

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
    ) -> str:
        """The prompt's text. Raises InvalidParameter naming the message at fault where it can be known."""
        self._check(messages, continue_final_message, template_kwargs)
        turns = [self._turn(message) for message in messages]
        if continue_final_message:
            turns[-1]["content"] += _END_MARK
        try:
            text = self._template.render(
                messages=turns,
                add_generation_prompt=add_generation_prompt,
                **(self._special_tokens | template_kwargs),
            )
        except _TEMPLATE_ERRORS as error:
            reason = str(error)[:_MAX_REASON_CHARS] or type(error).__name__
            raise InvalidParameter(
                f"The chat template does not accept this conversation: {reason}", "messages"
            ) from None
        return _cut_at_mark(text, len(messages) - 1) if continue_final_message else text

    def _check(self, messages: list[Message], continue_final: bool, template_kwargs: dict[str, Any]) -> None:
        for i, message in enumerate(messages):
            if message.content is None and message.role != "assistant":
                where = f"messages[{i}].content"
                raise InvalidParameter(f"{where}: required for the role '{message.role}'.", where)
        if continue_final and messages[-1].role != "assistant":
            where = f"messages[{len(messages) - 1}].role"
            raise InvalidParameter(f"{where}: continue_final_message continues an assistant's turn.", where)
        for name in _RESERVED:
            if name in template_kwargs:
                raise InvalidParameter(
                    f"chat_template_kwargs: '{name}' is not for the caller to set.", "chat_template_kwargs"
                )

    def _turn(self, message: Message) -> dict[str, str]:
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        turn = {"role": role, "content": message.text}
        return turn if message.name is None else turn | {"name": message.name}


def _cut_at_mark(text: str, last: int) -> str:
    mark = text.rfind(_END_MARK)
    if mark < 0:
        where = f"messages[{last}].content"
        raise InvalidParameter(f"{where}: the chat template drops this turn's text, so it cannot be continued.", where)
    return text[:mark]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
