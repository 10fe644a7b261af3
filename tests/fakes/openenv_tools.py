"""A server of OpenEnv whose actions are calls of tools, for a Python that has openenv (uvicorn openenv_tools:app)."""

from fastmcp import FastMCP
from openenv.core.env_server import State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation


class Calculator(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("calculator")

        @tools.tool
        def calculator(expression: str) -> int:
            """The product of two whole numbers."""
            one, other = map(int, expression.split("*"))
            return one * other

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(metadata={"error": "only tools"})

    @property
    def state(self):
        return State()


app = create_fastapi_app(Calculator, CallToolAction, CallToolObservation, max_concurrent_envs=512)
