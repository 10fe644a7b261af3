"""Tasksets of verifiers 0.4 and the environments that play them, for ``verifiers_host.py``."""

from verifiers.v1.clients import ModelContext, resolve_client
from verifiers.v1.clients import eval as eval_client
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.envs.best_of_n import BestOfNEnvConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config

TOO_LONG = "prompt is too long"  # what sessions answer when there is no room for another turn: the episode is cut
_DOWN = ("SandboxError", "TunnelError")  # what verifiers calls services that fail


class Tasks:
    """One environment. The policy is its only agent without a separate client."""

    def __init__(self, name, config):
        """Raises NotImplementedError for what cannot be trained."""
        self._config = _env_config(name, config)
        seats = [seat for seat, agent in agent_config_fields(self._config).items() if agent.client is None]
        if len(seats) != 1:
            raise NotImplementedError(
                "expected one agent without a client of its own, which is the policy, found "
                f"{', '.join(seats) or 'none'}: give the others a client and a model in --environment-config"
            )
        (self._seat,) = seats
        if isinstance(self._config, BestOfNEnvConfig) and self._config.n > 1:
            raise NotImplementedError(
                f"best-of-n runs the policy {self._config.n} times per episode, and a session is one run of it: "
                "leave it out, and use --n-samples-per-prompt"
            )

    def rows(self, count, held_out):
        """Yield prompts: what the model is asked, and all of the task as metadata. Those to hold out come last."""
        for number, task in enumerate(load_taskset(self._config.taskset)):
            if number == count + held_out:
                return
            data = task.data.model_dump(mode="json")
            system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
            messages = [*system, {"role": "user", "content": task.data.prompt_text}]
            yield {"prompt": messages, "metadata": {"task": data}}

    def serving(self):
        """Context in which episodes are played."""
        share_connections()
        self._environment = load_environment(self._config)
        return self._environment.serving()

    async def play(self, task_data, base_url):
        """Return the outcome of one episode."""
        environment = self._environment
        task_type = type(environment.taskset).task_type()
        task = task_type(task_type.data_type().model_validate(task_data), environment.config.taskset.task)
        client = EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        (slot,) = environment.slots(task)
        context = ModelContext(client=client, model="policy", sampling=SamplingConfig())
        episode = await environment.run_slot(slot, context)
        traces = [trace for trace in episode.traces if trace.agent.name == self._seat]
        if len(traces) > 1:
            return {"error": f"{len(traces)} runs of {self._seat} in one episode: a session is one run of the policy"}
        failed = [error for each in (episode, *episode.traces) if (error := each.last_error) is not None]
        if failed and not (traces and (traces[0].ok or TOO_LONG in failed[-1].message)):
            error = failed[-1]
            return {"error": f"{error.type}: {error.message}", "down": error.type in _DOWN}
        (trace,) = traces
        return {"reward": trace.reward, "turns": trace.num_turns}


def _env_config(name, config):
    """Verifiers' configuration. Agents whose runtime isn't given run in subprocesses, not in verifiers' cloud."""
    given = {**config, "taskset": {**config.get("taskset", {}), "id": name}}
    for seat, agent in agent_config_fields(resolve_env_config(given)).items():
        if agent.runtime.type == "prime":
            given[seat] = {"runtime": {"type": "subprocess"}, **given.get(seat, {})}
    return resolve_env_config(given)


def share_connections():
    """Let all episodes use one pool of connections.

    Written for 0.4.0, whose interception servers keep a client, with connections, for each base URL until they end: one
    for each session of the run.
    """
    make, pools = eval_client.build_async_httpx, {}

    def pool(config):
        timeout = config.timeout.model_dump_json()
        if timeout not in pools:
            pools[timeout] = make(config)
        return pools[timeout]

    eval_client.build_async_httpx = pool
    InterceptionServer._client = lambda self, config: resolve_client(config)
