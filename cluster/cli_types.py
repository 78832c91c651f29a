"""What command-line options have in common."""

from __future__ import annotations

import math
from typing import Any

import typer


def number(text: str = "", least: float | None = None, most: float | None = None) -> Any:
    """A typer.Option that is a finite number within a range.

    Typer alone lets `inf` into an open range, and `nan` in where there is none.
    """
    return typer.Option(min=least, max=most, callback=_finite, help=text)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
