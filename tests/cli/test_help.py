"""The help of each command: complete on a narrow terminal."""

from __future__ import annotations

import pytest
import typer.main
from typer.testing import CliRunner

from tfcommx.cli.main import COMMANDS, app


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "cache"])
def test_each_option_is_named_in_full_at_80_columns(name: str) -> None:
    """`tfcommx run --help` had `--host-discovery-scri...` and `--blacklist-cooldown-...`."""
    command = typer.main.get_command(app).commands[name]
    printed = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output
    shown = [option for option in command.params if not option.hidden]
    names = {name for option in shown for name in option.opts if name.startswith("--")}
    assert names <= {word.strip(",") for word in printed.split()}
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
