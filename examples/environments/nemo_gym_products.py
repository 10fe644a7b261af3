"""A resources server of NeMo Gym: `python examples/environments/nemo_gym_products.py PORT`."""

import sys

import uvicorn
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig
from pydantic import BaseModel


class Expression(BaseModel):
    expression: str


class Product(BaseVerifyRequest):
    answer: str


class Calculator(SimpleResourcesServer):
    """Asks for products, which a tool knows."""

    config: BaseResourcesServerConfig

    def setup_webserver(self):
        app = super().setup_webserver()
        app.post("/calculator")(self.calculator)
        return app

    async def calculator(self, body: Expression) -> int:
        one, other = map(int, body.expression.split("*"))
        return one * other

    async def verify(self, body: Product) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=float(body.response.output_text == body.answer))


if __name__ == "__main__":
    port = int(sys.argv[1]) if sys.argv[1:] else 8000
    config = BaseResourcesServerConfig(name="calculator", host="127.0.0.1", port=port, entrypoint="", domain="math")
    head = BaseServerConfig(host="127.0.0.1", port=0)  # other servers of NeMo Gym are found by it: there are none
    client = ServerClient(head_server_config=head, global_config_dict=DictConfig({}))
    uvicorn.run(Calculator(config=config, server_client=client).setup_webserver(), host=config.host, port=port)
