"""An agent of one turn, with nothing but the environment that a run gives it."""

from __future__ import annotations

import json
import os
import sys
import urllib.request


def main() -> None:
    prompt = json.load(sys.stdin)
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps({"model": "policy", "messages": prompt["messages"]}).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        assert response.status == 200
    assert not [name for name in os.environ if name.startswith("MILES_ASYNC_") and name.endswith("_KEY")]


if __name__ == "__main__":
    main()
