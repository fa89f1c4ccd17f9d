"""An MCP server over stdio, for AI assistants: they record, report and prove in the folders that it was given."""
