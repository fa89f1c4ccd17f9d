"""Every command there is, one file each. Their modules import nothing heavy before they are called."""

from __future__ import annotations

import importlib

import click

# In the order of the help. Each is a function of its name in a module of its name.
COMMANDS = ("check", "compare", "doctor", "explain", "export", "report", "rules", "run", "wrap")


def command(name: str) -> click.Command:
    """Give one of COMMANDS, importing no other's module."""
    found: click.Command = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    return found
