"""An MCP server on standard input and output that does what servers may do.

    python mcp_server.py [PID_FILE [TOOL ...]]

Plain Python, since it starts in 30 ms and a server of the SDK in a second; its tools need not be well behaved.
"""

import json
import os
import subprocess
import sys
import time

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = ("echo", "count", "repeat", "fail", "refuse", "picture", "die", "hang", "leave", "multiply", "ask")

counted = 0


def answer(tool, arguments):
    global counted
    if tool == "count":
        counted += 1
        return text(str(counted))
    if tool == "repeat":
        return text("x" * int(arguments["text"]))
    if tool == "fail":
        return text("division by zero") | {"isError": True}
    if tool == "picture":
        return {"content": [{"type": "image", "data": "AA==", "mimeType": "image/png"}]}
    if tool == "die":
        os._exit(3)
    if tool == "hang":
        time.sleep(600)
    if tool == "leave":  # a process in a session of its own, which outlives the server unless somebody ends it
        child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
        return text(str(child.pid))
    if tool == "multiply":
        factors = arguments["text"].split("*")
        return text(str(int(factors[0]) * int(factors[1])) if [*map(str.isdigit, factors)] == [True, True] else "error")
    if tool == "ask":  # for something that a client may be able to do
        params = {"messages": [], "maxTokens": 1, "message": "", "requestedSchema": TEXT}
        asked = {"jsonrpc": "2.0", "id": "asked", "method": arguments["text"], "params": params}
        print(json.dumps(asked), flush=True)
        return text(json.loads(sys.stdin.readline())["error"]["message"])
    return text(arguments["text"])


def text(content):
    return {"content": [{"type": "text", "text": content}]}


def reply(message):
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        info = {"name": "fake", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":  # in two pages
        tools = sys.argv[2:] or TOOLS
        page = tools[4:] if params.get("cursor") else tools[:4]
        more = {"nextCursor": "more"} if len(tools) > len(page) and not params.get("cursor") else {}
        return {"tools": [{"name": name, "inputSchema": TEXT} for name in page], **more}
    return answer(params["name"], params["arguments"])


if __name__ == "__main__":
    if sys.argv[1:] == ["mute"]:
        time.sleep(600)
    if sys.argv[1:]:
        with open(sys.argv[1], "a") as file:
            file.write(f"{os.getpid()}\n")
    print("an MCP server for tests", file=sys.stderr, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        if message.get("params", {}).get("name") == "refuse":
            sent = {"error": {"code": -32602, "message": "unknown arguments"}}
        else:
            sent = {"result": reply(message)}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **sent}), flush=True)
