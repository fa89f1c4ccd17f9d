"""The MCP server: it tells a client which tools there are, and answers its calls, over stdin and stdout alone."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from dlprof.errors import DlprofError
from dlprof.marks import __version__
from dlprof.mcp.tools import CheckAdvice, Compare, Evidence, Explain, Record, Report, Tool, Tools, Try, fitted
from dlprof.plain import plain, words_of

_ABOUT = (
    "dlprof says where the time of a PyTorch training step goes, and what a change would gain. The usual way: record,"
    " report, evidence, check_advice, try. Predictions are estimates until `try` has measured them."
)
_READS: dict[str, type[Tool]] = {
    "report": Report,
    "explain": Explain,
    "evidence": Evidence,
    "compare": Compare,
    "check_advice": CheckAdvice,
}
_RUNS: dict[str, type[Tool]] = {"record": Record, "try": Try}


def serve(folders: list[Path], *, read_only: bool) -> None:
    """Answer a client on stdin and stdout until it is gone. `read_only`: without the tools that run commands."""
    kinds = _READS | ({} if read_only else _RUNS)
    with tempfile.TemporaryDirectory(prefix="dlprof-mcp-") as scratch:
        anyio.run(_serve, kinds, Tools(folders, Path(scratch)))


async def _serve(kinds: dict[str, type[Tool]], tools: Tools) -> None:
    async def listed(_context: Any, _asked: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(name, kind) for name, kind in kinds.items()])

    async def called(context: Any, request: types.CallToolRequestParams) -> types.CallToolResult:
        since = time.monotonic()

        async def tell(what: str) -> None:
            await context.session.report_progress(time.monotonic() - since, None, what)

        try:
            if request.name not in kinds:
                raise DlprofError(f"no tool {request.name!r}; there are: {', '.join(kinds)}")
            arguments = msgspec.convert(request.arguments or {}, kinds[request.name])
            text, failed = fitted(await tools.do(arguments, tell)), False
        except Exception as e:  # noqa: BLE001 - a client gets one line, whatever went wrong
            text, failed = plain(e if isinstance(e, msgspec.ValidationError) else words_of(e), 1_000), True
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=failed)

    server = Server("dlprof", version=__version__, instructions=_ABOUT, on_list_tools=listed, on_call_tool=called)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def _described(name: str, kind: type[Tool]) -> types.Tool:
    (_,), schemas = msgspec.json.schema_components([kind])
    schema = schemas[kind.__name__]
    return types.Tool(name=name, description=schema.pop("description"), input_schema=schema)
