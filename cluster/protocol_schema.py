"""Output grammars in requests: response_format and structured_outputs become one `Grammar`, or a refusal by name."""

from __future__ import annotations

import json
from typing import Any

from orcaserve.cluster.app_config import ApiLimits
from orcaserve.cluster.protocol import GenerationRequest, ResponseFormat, StructuredOutputs
from orcaserve.engine.errors import InvalidParameter
from orcaserve.engine.sampling import Grammar

# xgrammar passes over these without a word, so the output could break them.
_UNSUPPORTED_KEYWORDS = frozenset(
    {
        *("not", "if", "then", "else", "multipleOf", "uniqueItems", "contains", "minContains", "maxContains"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_NAMES_TO_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA = frozenset({"enum", "const", "default", "examples", "example"})


def grammar_of(request: GenerationRequest, limits: ApiLimits) -> tuple[Grammar, str] | None:
    """The grammar and the field it came from; None when the output is free. Raises InvalidParameter."""
    if request.response_format is not None:
        param = "response_format"
        grammar = _from_response_format(request.response_format, param, limits)
    elif request.structured_outputs is not None:
        param = "structured_outputs"
        grammar = _from_structured_outputs(request.structured_outputs, param, limits)
    else:
        return None
    if grammar is None:
        return None
    size = len(grammar.spec.encode())
    if size > limits.max_schema_bytes:
        raise InvalidParameter(f"{param}: {size} bytes, but this server allows {limits.max_schema_bytes}.", param)
    return grammar, param


def _from_response_format(wanted: ResponseFormat, param: str, limits: ApiLimits) -> Grammar | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar("json_object")
    if wanted.json_schema is None:
        raise InvalidParameter(f"{param}: type 'json_schema' needs 'json_schema'.", param)
    return _schema(wanted.json_schema.json_schema, param, limits)


def _from_structured_outputs(wanted: StructuredOutputs, param: str, limits: ApiLimits) -> Grammar:
    given = [name for name in type(wanted).model_fields if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise InvalidParameter(f"{param}: exactly one of json, json_object, regex, choice, grammar.", param)
    if wanted.json_object:
        return Grammar("json_object")
    if wanted.regex is not None:
        return Grammar("regex", wanted.regex)
    if wanted.choice is not None:
        return Grammar("choice", json.dumps(wanted.choice, ensure_ascii=False))
    if wanted.grammar is not None:
        return Grammar("ebnf", wanted.grammar)
    schema = wanted.json_schema
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidParameter(f"{param}: 'json' is neither an object nor JSON text.", param) from None
    if not isinstance(schema, dict):
        raise InvalidParameter(f"{param}: a JSON schema is an object.", param)
    return _schema(schema, param, limits)


def _schema(schema: dict[str, Any], param: str, limits: ApiLimits) -> Grammar:
    _check_schema(schema, param, limits)
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def _check_schema(schema: dict[str, Any], param: str, limits: ApiLimits) -> None:
    """Depth and keywords, level by level."""
    level: list[tuple[Any, bool]] = [(schema, True)]  # a value, and whether its keys are schema keywords
    for _ in range(limits.max_schema_depth):
        if not level:
            return
        level = [inner for value, is_schema in level for inner in _inner(value, is_schema, param)]
    if level:
        raise InvalidParameter(f"{param}: the schema nests deeper than {limits.max_schema_depth} levels.", param)


def _inner(value: Any, is_schema: bool, param: str) -> list[tuple[Any, bool]]:
    if isinstance(value, list):
        return [(item, is_schema) for item in value]
    if not isinstance(value, dict):
        return []
    if is_schema:
        for keyword in _UNSUPPORTED_KEYWORDS & value.keys():
            if value[keyword] is not False:
                raise InvalidParameter(f"{param}: the JSON schema keyword '{keyword}' is not supported.", param)
        return [(item, key not in _NAMES_TO_SCHEMAS) for key, item in value.items() if key not in _DATA]
    return [(item, True) for item in value.values()]
