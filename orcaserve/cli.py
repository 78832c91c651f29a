"""The `orcaserve` command. Nothing heavy is imported before it is known what to do."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from orcaserve.cluster.cli import chat, drain, status, trace
from orcaserve.cluster.config import ConfigError, ServeConfig
from orcaserve.loadtest.cli import loadtest_app, simulate_app

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Large language models served on a Ray cluster.",
)


@app.command()
def pull(model: Annotated[str, typer.Argument(help="a short name, such as smollm2-135m, or a hub id")]) -> None:
    """Fetch a model, so that later starts need no network; prints its directory."""
    print(_model_dir(model))


def _serve(model: str, config: Path | None, **options: Any) -> None:
    """Serve a model with the OpenAI API until Ctrl-C."""
    given = {name: value for name, value in options.items() if value not in (None, [])}
    if model:
        given["model"] = model
    try:
        resolved = ServeConfig.load(given, config)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None

    from orcaserve.cluster.auth import read_keys, read_tenants
    from orcaserve.cluster.chat import ChatTemplate
    from orcaserve.cluster.local import check_address
    from orcaserve.cluster.model_info import read_model_info
    from orcaserve.cluster.ray_address import NoRay
    from orcaserve.cluster.serve import StartFailed, run
    from orcaserve.cluster.text import TextCodec

    try:
        check_address(resolved.host, resolved.port)
        folder = _model_dir(resolved.model)
        if resolved.tenants_file is not None:
            read_tenants(resolved.tenants_file)
        if resolved.api_key_file is not None:
            read_keys(resolved.api_key_file)
        info = read_model_info(folder, resolved.served_model_name, resolved.max_model_len)
        TextCodec.from_file(info.tokenizer_file)  # the routers, which read the same, would be half a minute in failing
        ChatTemplate(info.chat_template or "", info.special_tokens)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if resolved.ray_address is None:  # else the name goes to nodes where this directory may not be
        resolved = resolved.model_copy(update={"model": str(folder)})
    try:
        code = run(resolved, info, _say)
    except (StartFailed, NoRay) as error:
        _say(f"error: {error}")
        code = 1
    raise typer.Exit(code)


def _model_dir(model: str) -> Path:
    """A directory, whatever was named: a directory, a GGUF file, a packaged model or a hub id."""
    from orcaserve.workers.errors import WorkerError
    from orcaserve.workers.model_dir import find_model

    try:
        return find_model(model, progress=_progress)
    except WorkerError as error:
        raise typer.BadParameter(str(error)) from None


def _say(text: str) -> None:
    print(f"orcaserve: {text}", file=sys.stderr, flush=True)


def _progress(what: str, done: int, total: int) -> None:
    end = "\n" if done >= total else ""
    print(f"\rorcaserve: {what}: {100 * done // max(total, 1)}%", end=end, file=sys.stderr, flush=True)


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give `function` one command-line option for each field of ServeConfig but the model, which is the argument."""
    parameters = [
        inspect.Parameter(
            "model",
            inspect.Parameter.KEYWORD_ONLY,
            default="",
            annotation=Annotated[str, typer.Argument(help=ServeConfig.model_fields["model"].description)],
        ),
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Path | None, typer.Option(help="YAML file with these options, without the dashes")],
        ),
    ]
    parameters += [_option(name, field) for name, field in ServeConfig.model_fields.items() if name != "model"]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """Not given is None, so that the YAML file's word counts; ranges are ServeConfig's to check."""
    flag = "--" + name.replace("_", "-")
    is_memory = any(isinstance(rule, BeforeValidator) for rule in field.metadata)
    kind = _plain(field.annotation, is_memory)
    flags = (f"{flag}/--no-{flag.removeprefix('--')}",) if kind is bool else (flag,)
    default = "" if field.default in (None, (), "") else f" [default: {field.default}]"
    help_text = (field.description or "") + default
    optional: Any = kind if get_origin(kind) is list else kind | None
    annotation = Annotated[optional, typer.Option(*flags, help=help_text, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _plain(annotation: Any, is_memory: bool) -> Any:
    """The type that typer reads an option as. Amounts of memory stay text, ServeConfig reads them."""
    if get_origin(annotation) in (Union, types.UnionType):
        [annotation] = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) is tuple:
        return list[str]
    return str if is_memory and annotation is int else annotation


app.command("serve")(_with_options(_serve))
for command in (status, chat, trace, drain):
    app.command()(command)
app.add_typer(loadtest_app, name="loadtest")
app.add_typer(simulate_app, name="simulate")


def main() -> None:
    """Bad usage is told in one line, with exit code 2."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0)
    except typer.TyperException as error:
        _say(error.format_message())
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
