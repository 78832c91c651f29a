"""Compiles the C sources beside this file into a shared library, once per machine, and loads it.

The library lies in a cache folder under a name made of the sources, the flags, the compiler and the CPU: a change of
any of them makes another file, and two processes that compile at once both end with a whole one. The few files that
were used last are kept, for the machines that share the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
COMPILERS = ("cc", "gcc", "clang")
# No contraction: a * b + c is one rounding only where the source says so, hence the same in every copy of a loop.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-pthread", "-Wno-psabi")
NATIVE = "-march=native"
COMPILE_TIMEOUT_S = 120.0
MAX_LIBRARIES = 8  # in the cache folder, of some 200 kB each


class BuildError(RuntimeError):
    """There is no compiler, or it refused the sources."""


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "orcaserve" / "kernels"


def load(cache_dir: Path, target: str = NATIVE) -> ctypes.CDLL:
    """The library, compiled first (about three seconds) if the cache does not have it. Raises BuildError.

    `target` is the compiler's option for the machine to compile for.
    """
    compiler = find_compiler()
    path = cache_dir / f"cpu-{cache_key(compiler, target)}.so"
    if not path.exists():
        compile_library(compiler, path, target)
        _forget_old(cache_dir, path)
    try:
        with contextlib.suppress(PermissionError):  # a cache that somebody else has filled
            os.utime(path, (time.time(), path.stat().st_mtime))  # many file systems do not note what is read
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}") from error


def find_compiler() -> Path:
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return Path(found).resolve()
    raise BuildError(f"no C compiler found; tried {', '.join(COMPILERS)}")


def cache_key(compiler: Path, target: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCE_DIR.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    status = compiler.stat()
    digest.update(repr((FLAGS, target, str(compiler), status.st_size, status.st_mtime_ns, cpu_identity())).encode())
    return digest.hexdigest()[:24]


def cpu_identity() -> str:
    """What -march=native depends on: the architecture, the model and its feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    kept = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(kept)}))


def compile_library(compiler: Path, path: Path, target: str = NATIVE) -> None:
    """Compiles the sources side by side and links them; the finished file appears under `path` in one move."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
        sources = sorted(SOURCE_DIR.glob("*.c"))
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        _run_all(
            [[str(compiler), *FLAGS, target, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)]
        )
        library = Path(folder) / "library.so"
        _run_all([[str(compiler), "-shared", "-pthread", *map(str, objects), "-lm", "-o", str(library)]])
        os.replace(library, path)
    logger.info("compiled the CPU kernels into %s", path)


def _forget_old(cache_dir: Path, kept: Path) -> None:
    """Remove the libraries that were loaded longest ago, and what a killed compilation has left.

    Who has a library open is not disturbed; others may be removing the same files.
    """
    with contextlib.suppress(FileNotFoundError):
        last_used = {path: path.stat().st_atime for path in cache_dir.glob("cpu-*.so") if path != kept}
        for path in sorted(last_used, key=last_used.__getitem__, reverse=True)[MAX_LIBRARIES - 1 :]:
            path.unlink()
        for folder in cache_dir.glob("building-*"):
            if time.time() - folder.stat().st_mtime > 2 * COMPILE_TIMEOUT_S:
                shutil.rmtree(folder, ignore_errors=True)


def _run_all(commands: list[list[str]]) -> None:
    running = [
        subprocess.Popen(c, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    try:
        for command, process in zip(commands, running, strict=True):
            output, _ = process.communicate(timeout=COMPILE_TIMEOUT_S)
            if process.returncode != 0:
                raise BuildError(f"{' '.join(command)} ended with {process.returncode}: {output.strip()[:2000]}")
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{error.cmd[0]} took more than {COMPILE_TIMEOUT_S:g} s") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
