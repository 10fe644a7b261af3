"""Chat templates of the families that are trained, and how models answer under them: cases of
test_family_templates.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from tests.fakes.chat_formats import TEMPLATES as OWN

THOUGHT = "Hm, so."


@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template, and how the model answers under it."""

    families: Sequence[str]  # model_type of config.json
    file: str = ""  # of trl's package; empty if it has none
    written_after: str = ""  # a template of tests/fakes/chat_templates, for want of it
    stops: Sequence[str]
    calls: str
    reasoning: str | None = None
    thinks: bool = False  # the template writes the reasoning of a turn that calls
    opens: str = ""  # what the model writes first if the template opens reasoning that it writes into no past turn
    parallel: bool = True
    moves_tools: bool = False  # the template writes tools in front of the last question, and so changes what is above
    own_ids: bool = False  # the model gives calls their ids


IM_END = ("<|im_end|>",)
GLM = ("<|endoftext|>", "<|user|>", "<|observation|>")
DEEPSEEK = ("<｜end▁of▁sentence｜>",)
LLAMA = ("<|eot_id|>", "<|eom_id|>")

TEMPLATES: Mapping[str, Template] = {
    "llama3_1": Template(file="llama3_1", families=("llama",), stops=LLAMA, calls="llama3", parallel=False),
    "llama3_2": Template(file="llama3_2", families=("llama",), stops=LLAMA, calls="llama3", parallel=False),
    "qwen2_5": Template(file="qwen2_5", families=("qwen2",), stops=IM_END, calls="qwen"),
    "qwen3": Template(
        file="qwen3", families=("qwen3", "qwen3_moe"), stops=IM_END, calls="qwen", reasoning="qwen3", thinks=True
    ),
    "qwen3_2507": Template(
        file="qwen3_instruct_2507", families=("qwen3_moe", "qwen3_next"), stops=IM_END, calls="qwen"
    ),
    "qwen3_next_thinking": Template(
        families=("qwen3_next",), stops=IM_END, calls="qwen", reasoning="deepseek-r1", thinks=True
    ),
    "qwen3_coder": Template(families=("qwen3_moe",), stops=IM_END, calls="qwen3_coder"),
    "qwen3_5": Template(
        file="qwen3_5_think",
        families=("qwen3_5_text", "qwen3_5_moe_text"),
        stops=IM_END,
        calls="qwen3_coder",
        reasoning="qwen3",
        thinks=True,
    ),
    "qwen3_vl": Template(file="qwen3_vl", families=("qwen3_vl", "qwen3_vl_moe"), stops=IM_END, calls="qwen"),
    "mistral_nemo": Template(families=("mistral",), stops=("</s>",), calls="mistral", moves_tools=True),
    "gemma4": Template(
        file="gemma4_v5",
        families=("gemma4_text",),
        stops=("<turn|>", "<|tool_response>"),
        calls="gemma4",
        reasoning="gemma4",
        thinks=True,
    ),
    "glm4_5": Template(
        file="glm4moe", families=("glm4_moe",), stops=GLM, calls="glm45", reasoning="glm45", thinks=True
    ),
    "glm4_7_flash": Template(families=("glm4_moe_lite",), stops=GLM, calls="glm47", reasoning="glm45", thinks=True),
    "glm5": Template(families=("glm_moe_dsa",), stops=GLM, calls="glm47", reasoning="glm45", thinks=True),
    "minimax_m2": Template(
        families=("minimax_m2",), stops=("[e~[",), calls="minimax-m2", reasoning="minimax", thinks=True
    ),
    **{
        name: Template(
            file=name, families=("nemotron_h",), stops=IM_END, calls="qwen3_coder", reasoning="nemotron_3", thinks=True
        )
        for name in ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra")
    },
    "gpt_oss": Template(
        file="gptoss",
        families=("gpt_oss",),
        stops=("<|return|>", "<|call|>"),
        calls="gpt-oss",
        reasoning="gpt-oss",
        parallel=False,
    ),
    "deepseek_v3": Template(
        file="deepseekv3",
        families=("deepseek_v3",),
        stops=DEEPSEEK,
        calls="deepseekv3",
        reasoning="deepseek-r1",
        opens=f"{THOUGHT}\n</think>\n\n",
    ),
    "deepseek_v31": Template(families=("deepseek_v3",), stops=DEEPSEEK, calls="deepseekv31", reasoning="deepseek-v3"),
    "kimi_k2": Template(families=("kimi_k2",), written_after="kimi_k2", stops=IM_END, calls="kimi_k2", own_ids=True),
}

WITHOUT_RESULTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "gemma": ("gemma", ("<end_of_turn>",)),
    "gemma2": ("gemma", ("<end_of_turn>",)),
    "gemma3_text": ("gemma3", ("<end_of_turn>",)),
    "glm4": ("", GLM),
}
"""Family → (file of trl's package, stops) of templates that take no results of tools."""

WITHOUT_CALLS: Mapping[str, str] = {
    "qwen2_5_vl": "its template writes no calls, and results as messages of the role tool",
    "olmoe": "its template knows no tools",
    "deepseek_v32": "its calls are written by Python code of its own, not by a template",
}
"""Other families whose models have no template with calls → why."""


def template_file(name: str, file: str, written_after: str = "") -> Path:
    """File of a template: trl's, or ``name`` in the folder CHAT_TEMPLATES, which may be absent, or else ours."""
    if file:
        return Path(str(distribution("trl").locate_file(f"trl/chat_templates/{file}.jinja")))
    given = Path(os.environ.get("CHAT_TEMPLATES", "/nonexistent")) / f"{name}.jinja"
    return OWN / f"{written_after}.jinja" if written_after and not given.exists() else given
