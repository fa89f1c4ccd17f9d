"""`dlprof mcp [FOLDER...]`: a server of the Model Context Protocol on stdin and stdout, for AI assistants."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dlprof.commands import PATH
from dlprof.commands.configured import CONFIG
from dlprof.errors import DlprofError


@click.command(short_help="Serve AI assistants over the Model Context Protocol, on stdin and stdout.")
@click.argument("folders", type=PATH, nargs=-1, metavar="[FOLDER]...")
@click.option("--read-only", is_flag=True, help="Without the tools that run commands: record and try.")
def mcp(folders: tuple[Path, ...], read_only: bool) -> None:
    """Serve an AI assistant: record, report, explain, evidence, try, compare and check_advice.

    Reads, records and runs in the FOLDERs alone (by default the working folder); no port is opened. What `record` and
    `try` start is the user's own code, with the user's rights. Needs: pip install 'dlprof[mcp]'.
    """
    try:
        from dlprof.mcp import serve
    except ImportError as e:
        raise DlprofError(f"the package mcp, 2.0 or later, is not installed ({e}): pip install 'dlprof[mcp]'") from None
    os.environ[CONFIG] = ""  # what is asked for says all
    serve(list(folders or (Path(),)), read_only=read_only)
