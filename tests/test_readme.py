"""The README says what the code does, where a machine can tell."""

import re
from pathlib import Path

from orcaserve.cluster.config import ServeConfig

README = (Path(__file__).parents[1] / "README.md").read_text()


def as_written(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default in (None, ()) else f"`{default}`"


def test_every_flag_is_listed_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| (.*?) \|", README, re.MULTILINE))
    for name, field in ServeConfig.model_fields.items():
        if name == "model":
            continue
        assert rows.pop(name.replace("_", "-"), None) == as_written(field.default), name
    assert rows == {}, "flags that do not exist"


def test_the_two_commands_come_first() -> None:
    commands = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("make ")]
    assert commands[:2] == ["make serve", "make test"]
