"""Random conversations between an agent and a model, to test trajectories with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from miles_async.prompts.templates import ChatTemplate
from miles_async.trajectory.context import Context, Turn
from miles_async.trajectory.messages import with_kept_images
from miles_async.trajectory.rendering import Renderer
from miles_async.trajectory.replies import THINK_TAGS, ReplyParser
from miles_async.trajectory.tree import Trajectory
from miles_async.types import Generation, JsonObject, Sample
from miles_async.types.pictures import data_url
from tests.fakes.chat_formats import ORDINARY_TOKENS, STOPS, TOOLS, chat_format
from tests.fakes.pictures import picture, picture_processor
from tests.fakes.reply_parsers import BEGINS, PARSERS, split_think
from tests.json_dict import JsonDict

PARSER_OF = {"qwen3": "qwen", "llama3": "llama3", "glm": "glm"}

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=30)
words = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9 .,;é]{0,20}", fullmatch=True).map(str.strip)


def questions() -> st.SearchStrategy[list[JsonObject]]:
    """First messages of a conversation."""
    return st.builds(
        lambda system, user: [*([{"role": "system", "content": system}] if system else []), user],
        st.one_of(st.none(), texts.filter(bool)),
        texts.map(lambda content: {"role": "user", "content": content}),
    )


def follow_ups() -> st.SearchStrategy[list[JsonObject]]:
    """Messages that an agent or an environment appends: results of tools, a question, a hint of the system."""
    tool = texts.map(lambda content: {"role": "tool", "content": content, "tool_call_id": "call00000"})
    user = texts.map(lambda content: {"role": "user", "content": content})
    system = texts.map(lambda content: {"role": "system", "content": content})
    return st.one_of(
        st.lists(tool, min_size=1, max_size=3),
        st.tuples(user).map(list),
        st.tuples(system, user).map(list),
        st.tuples(tool, user).map(list),
    )


PICTURES = [picture(*size) for size in ((1, 1), (2, 1), (3, 2))]


def with_pictures() -> st.SearchStrategy[list[JsonObject]]:
    """Messages of the user and of tools with images at any place between texts."""
    text = texts.map(lambda text: {"type": "text", "text": text})
    image = st.sampled_from(PICTURES).map(lambda each: {"type": "image_url", "image_url": {"url": data_url(each)}})
    parts = st.lists(text | image, min_size=1, max_size=5)
    user = parts.map(lambda content: {"role": "user", "content": content})
    tool = parts.map(lambda content: {"role": "tool", "content": content, "tool_call_id": "call00000"})
    return st.one_of(st.tuples(user).map(list), st.tuples(tool, user).map(list), st.lists(tool, min_size=1, max_size=2))


@dataclass(frozen=True)
class Say:
    """Text that the model samples in a turn."""

    ids: tuple[int, ...] = ()  # any tokens at all
    text: str = ""  # or what the template would make of it
    calls: tuple[tuple[str, str], ...] = ()  # (tool, query)
    stop: int | None = 0  # which of the stop tokens ends it; None: it was cut


def anything() -> st.SearchStrategy[Say]:
    """Tokens that no tokenizer would make of their text, ended or cut anywhere."""
    ids = st.lists(st.integers(0, ORDINARY_TOKENS - 1), min_size=1, max_size=12).map(tuple)
    return st.builds(Say, ids=ids, stop=st.sampled_from([0, 1, None]))


def canonical_answers(calls: int) -> st.SearchStrategy[Say]:
    """A text or tool calls, exactly as the template writes them."""
    call = st.tuples(st.sampled_from([tool["function"]["name"] for tool in TOOLS]), words)
    spoken = st.builds(Say, text=words)
    called = st.builds(Say, calls=st.lists(call, min_size=1, max_size=calls).map(tuple)) if calls else st.nothing()
    return spoken | called


@dataclass
class Episode:
    """A trajectory that grows, beside what an agent would hold."""

    style: str
    tools: Sequence[JsonObject] = ()
    options: JsonObject = field(default_factory=dict)
    messages: list[JsonDict] = field(default_factory=list)
    as_template_writes: bool = False

    def __post_init__(self) -> None:
        self.chat: ChatTemplate = chat_format(self.style)
        calls = PARSER_OF.get(self.style, "")
        parser = ReplyParser(
            chat=self.chat,
            parse_calls=PARSERS.get(calls),
            split_reasoning=split_think,
            reasoning_tags=THINK_TAGS,
            call_begins=BEGINS.get(calls),
        )
        self.images = picture_processor(self.chat) if self.style == "qwen25_vl" else None
        renderer = Renderer(self.chat, self.images)
        self.trajectory = Trajectory(renderer, parser, as_template_writes=self.as_template_writes)
        self.histories: dict[Turn, list[JsonObject]] = {}  # the messages up to each turn's reply
        self.said = 0

    def turn(self, appended: Sequence[JsonObject], say: Say) -> Turn:
        """The agent appends messages, the model answers."""
        self.messages += appended
        messages = [with_kept_images(message, self.trajectory.keep_image) for message in self.messages]
        context = self.trajectory.extend(messages, self.tools, self.options)
        turn = self.trajectory.add(context, self.sampled(context, self.output_ids(say, appended)))
        self.messages.append(as_client_sends(turn.reply))
        self.histories[turn] = list(self.messages)
        return turn

    def sample(self) -> Sample:
        """The episode so far, which has turns."""
        sample = self.trajectory.sample()
        assert sample is not None
        return sample

    def output_ids(self, say: Say, appended: Sequence[JsonObject]) -> list[int]:
        stops = self.chat.tokenizer.convert_tokens_to_ids(list(STOPS[self.style]))
        ids = list(say.ids) or self.chat.tokenize(self.written(say))
        return ids if say.stop is None else [*ids, stops[say.stop]]

    def written(self, say: Say) -> str:
        """As the template writes it in a turn that is past."""
        if self.style == "qwen3":
            calls = [
                '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
                % (name, json.dumps({"query": query}, ensure_ascii=False))
                for name, query in say.calls
            ]
            return "\n".join([*([say.text] if say.text else []), *calls])
        if self.style == "glm":
            calls = [
                f"\n<tool_call>{name}\n<arg_key>query</arg_key>\n<arg_value>{query}</arg_value>\n</tool_call>"
                for name, query in say.calls
            ]
            return "\n<think></think>" + (f"\n{say.text}" if say.text else "") + "".join(calls)
        if say.calls:
            (name, query), *_ = say.calls
            return '{"name": "%s", "parameters": %s}' % (name, json.dumps({"query": query}, ensure_ascii=False))
        return say.text

    def sampled(self, context: Context, output_ids: Sequence[int]) -> Generation:
        self.said += 1
        length = len(output_ids)
        read = [*context.input_ids().tolist(), *output_ids][context.routed : -1]
        return Generation(
            output_ids=np.array(output_ids, np.int32),
            logprobs=np.linspace(-1, -0.5, length).astype(np.float32) - self.said,
            weight_versions=np.full(length, self.said, np.int32),
            finish_reason="stop" if self.chat.stop_ids & {*output_ids[-1:]} else "length",
            engines=("engine-0",),
            prompt_tokens=context.length,
            routed_experts=np.array([(token, self.said) for token in read]).astype(np.int16).reshape(-1, 2),
        )


def as_client_sends(reply: JsonObject) -> JsonObject:
    """With arguments as JSON texts, and what an openai client adds."""
    sent = {"content": None, "refusal": None, "audio": None, **{k: v for k, v in reply.items() if v != ""}}
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in sent["tool_calls"]
        ]
    return sent
