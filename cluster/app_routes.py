"""The routes, as a FastAPI application: it matches paths and writes the OpenAPI document; bodies are parsed by us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

import orcaserve
from orcaserve.cluster import protocol_responses as responses
from orcaserve.cluster.app_console import Console
from orcaserve.cluster.app_edge import CALL, Call
from orcaserve.cluster.app_generate import Generation, Generator
from orcaserve.cluster.errors import MethodNotAllowed, ModelNotFound, NotFound, error_body, error_headers, parse_body
from orcaserve.cluster.protocol_chat import ChatCompletionRequest
from orcaserve.cluster.protocol_completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from orcaserve.cluster.wire import ClusterStatus, View
from orcaserve.engine.errors import InvalidParameter, RequestRefused, Unavailable

Model = TypeVar("Model", bound=BaseModel)

_REQUESTS: list[type[BaseModel]] = [ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
_RESPONSES: list[type[BaseModel]] = [
    responses.ChatCompletion,
    responses.ChatCompletionChunk,
    responses.Completion,
    responses.ModelList,
    responses.ModelCard,
    responses.TokenizeResponse,
    responses.DetokenizeResponse,
    responses.VersionResponse,
    responses.HealthResponse,
    responses.ClusterStatusResponse,
    responses.ErrorBody,
]


def create_routes(generator: Generator) -> FastAPI:
    """The application without its edge (app_edge.Edge)."""
    app = FastAPI(
        title="orcaserve", version=orcaserve.__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.include_router(_generation_routes(generator))
    app.include_router(_text_routes(generator))
    app.include_router(_status_routes(generator))
    app.include_router(Console(generator.engine, generator.preparer.model.name).routes())
    app.add_exception_handler(RequestRefused, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.openapi = _openapi_of(app)  # type: ignore[method-assign]
    return app


def _generation_routes(generator: Generator) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_body(ChatCompletionRequest), responses=_chat_responses())
    async def chat_completions() -> Response:
        """Continue a conversation."""
        return Generation(generator, ChatCompletionRequest)

    @router.post("/v1/completions", openapi_extra=_body(CompletionRequest), responses=_completion_responses())
    async def completions() -> Response:
        """Continue one or several prompts."""
        return Generation(generator, CompletionRequest)

    return router


def _text_routes(generator: Generator) -> APIRouter:
    router = APIRouter()
    preparer = generator.preparer

    @router.post("/tokenize", openapi_extra=_body(TokenizeRequest), responses=_answers(responses.TokenizeResponse))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        wanted = _parsed(request, TokenizeRequest)
        preparer.check_model(wanted.model)
        if (wanted.prompt is None) == (wanted.messages is None):
            raise InvalidParameter("Exactly one of prompt and messages is needed.", "prompt")
        if wanted.messages is not None:
            if len(wanted.messages) > generator.config.max_messages:
                raise InvalidParameter(
                    f"messages: {len(wanted.messages)}, but this server allows {generator.config.max_messages}.",
                    "messages",
                )
            text = preparer.render(
                wanted.messages,
                add_generation_prompt=wanted.add_generation_prompt,
                continue_final_message=wanted.continue_final_message,
                template_kwargs=wanted.chat_template_kwargs,
            )
            add_special = wanted.add_special_tokens is True
        else:
            text = wanted.prompt or ""
            add_special = wanted.add_special_tokens is not False
        [ids] = await preparer.encode([text], add_special, "prompt" if wanted.messages is None else "messages")
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": preparer.model.max_model_len, "tokens": ids}
        if wanted.return_token_strs:
            answer["token_strs"] = [preparer.codec.token_text(i)[0] for i in ids]
        return _json(answer)

    @router.post(
        "/detokenize", openapi_extra=_body(DetokenizeRequest), responses=_answers(responses.DetokenizeResponse)
    )
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        wanted = _parsed(request, DetokenizeRequest)
        preparer.check_model(wanted.model)
        preparer.check_ids(wanted.tokens, "tokens")
        return _json(
            {"prompt": preparer.codec.decode(wanted.tokens, skip_special_tokens=bool(wanted.skip_special_tokens))}
        )

    return router


def _status_routes(generator: Generator) -> APIRouter:
    router = APIRouter()
    model = generator.preparer.model
    cards = [
        {
            "id": name,
            "object": "model",
            "created": generator.started_at,
            "owned_by": "orcaserve",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
        }
        for name in model.served_names
    ]

    @router.get("/v1/models", responses=_answers(responses.ModelList))
    async def list_models() -> Response:
        """The served model, under each of its names."""
        return _json({"object": "list", "data": cards})

    @router.get("/v1/models/{model_id:path}", responses=_answers(responses.ModelCard))
    async def get_model(model_id: str) -> Response:
        """One of them."""
        for card in cards:
            if card["id"] == model_id:
                return _json(card)
        raise ModelNotFound

    @router.get("/health", responses=_answers(responses.HealthResponse))
    async def health() -> Response:
        """Alive: the scheduler answers, and some group can work or is starting for the first time."""
        status = await generator.engine.status()
        if not any(group.state in ("ready", "draining") or group.num_starts <= 1 for group in status.groups):
            reasons = {group.error for group in status.groups if group.error}
            raise Unavailable(
                f"No group can serve: {'; '.join(sorted(reasons)) or 'being rebuilt'}.", retry_after_s=5.0
            )
        return _json({"status": "ok"})

    @router.get("/ready", responses=_answers(responses.HealthResponse))
    async def ready() -> Response:
        """A group has loaded the model and generated a token, work under way makes progress, and new work is taken."""
        if generator.engine.leaving:
            raise Unavailable("This router's node is leaving.", retry_after_s=5.0)
        status = await generator.engine.status()
        if not status.ready:
            raise Unavailable(_unready(status), retry_after_s=5.0)
        return _json({"status": "ready"})

    @router.get("/cluster", responses=_answers(responses.ClusterStatusResponse))
    async def cluster() -> Response:
        """Groups, queue and cache at this moment."""
        return _json(await generator.engine.status())

    @router.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus exposition text."""
        generator.metrics.flush()
        try:
            view: View | None = await generator.engine.view()
        except Unavailable:
            view = None
        return Response(generator.metrics.render(view), media_type="text/plain; version=0.0.4")

    @router.get("/version", responses=_answers(responses.VersionResponse))
    async def version() -> Response:
        """This server's version."""
        return _json({"version": orcaserve.__version__})

    return router


def _unready(status: ClusterStatus) -> str:
    if status.draining:
        return "The service is draining."
    phases = ", ".join(f"group {group.group_id}: {group.phase or group.state}" for group in status.groups)
    return f"Not ready yet ({phases})."


def _parsed(request: Request, model: type[Model]) -> Model:
    call: Call = request.scope[CALL]
    return parse_body(model, call.body, call.header(b"content-type").decode("latin-1"))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _refused(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, RequestRefused)
    request.scope[CALL].notes["error"] = refused.code or type(refused).__name__
    return Response(
        msgspec.json.encode(error_body(refused)),
        refused.status,
        headers=error_headers(refused),
        media_type="application/json",
    )


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return await _refused(request, MethodNotAllowed("This route does not take that method."))
    return await _refused(request, NotFound("There is no such route; GET /openapi.json lists them."))


# The OpenAPI document


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _body(model: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _ref(model)}}}}


def _answers(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    error = {"description": "Refused", "content": {"application/json": {"schema": _ref(responses.ErrorBody)}}}
    good = {"description": "Done", "content": {"application/json": {"schema": _ref(model)}}}
    return {200: good, "4XX": error, "5XX": error}


def _chat_responses() -> dict[int | str, dict[str, Any]]:
    answers = _answers(responses.ChatCompletion)
    answers[200]["content"]["text/event-stream"] = {"schema": _ref(responses.ChatCompletionChunk)}
    return answers


def _completion_responses() -> dict[int | str, dict[str, Any]]:
    answers = _answers(responses.Completion)
    answers[200]["content"]["text/event-stream"] = {"schema": _ref(responses.Completion)}
    return answers


def _openapi_of(app: FastAPI) -> Callable[[], dict[str, Any]]:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            named = [(model, "validation") for model in _REQUESTS] + [(model, "serialization") for model in _RESPONSES]
            _, schemas = models_json_schema(named, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = document
        return app.openapi_schema

    return openapi
