"""The calculator as an MCP server, for ``--mcp-server "python -m examples.calculator_tool.mcp_server"``.

With a port it listens at http://127.0.0.1:PORT/mcp instead.
"""

from __future__ import annotations

import sys

from mcp.server.fastmcp import FastMCP

from examples.calculator_tool.calculator import CALCULATOR, calculate


def main(arguments: list[str]) -> None:
    server = FastMCP("calculator", port=int(arguments[0]) if arguments else 0, log_level="WARNING")
    server.tool("calculator", description=CALCULATOR["function"]["description"])(evaluate)
    server.run("streamable-http" if arguments else "stdio")


def evaluate(expression: str) -> str:
    return calculate(expression)


if __name__ == "__main__":
    main(sys.argv[1:])
