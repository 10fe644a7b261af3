"""Convert text and messages to token ids and back, with the tokenizer of ``--hf-checkpoint``, from local files only."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_async.errors import ConfigurationError, TrajectoryError
from miles_async.runtime.detokenize import decode_tokens, fingerprint
from miles_async.runtime.own_thread import in_daemon_thread
from miles_async.runtime.texts import shortened
from miles_async.trajectory.messages import text_of, with_text_arguments
from miles_async.types import JsonObject

if TYPE_CHECKING:  # imported when a tokenizer is loaded
    from transformers import PreTrainedTokenizerBase

RENDER_SECONDS = 10.0  # that a template may take for a short conversation, which is thousands of times what it needs
CONVERSATION_SECONDS = 15.0  # that a template may take for any conversation

_PROBE = "a message that no template has"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})  # of OpenAI's API, which templates follow


class ChatTemplate:
    """Tokenizer with its chat template: prompts to tokens, tokens to text.

    >>> template = ChatTemplate(load_tokenizer(path), apply_chat_template=True)
    >>> template.encode("rev 12")  # same as [{"role": "user", "content": "rev 12"}]
    (1, 4, 55, 42, 59, 37, 13, 14, 5)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        apply_chat_template: bool,
        *,
        continues_answers: bool = True,
        ends: frozenset[int] = frozenset(),
        stops: Sequence[str] = (),
    ) -> None:
        """``continues_answers``: a prompt may end with the beginning of the assistant's answer. ``ends``: more tokens
        that bound a response. ``stops``: texts that end a response in this run. Raises ConfigurationError.
        """
        if apply_chat_template and not tokenizer.chat_template:
            raise ConfigurationError(
                f"--apply-chat-template: the tokenizer in {tokenizer.name_or_path} has no chat template; "
                "use --no-apply-chat-template with prompts that are plain texts"
            )
        self.tokenizer = tokenizer
        self._apply_chat_template = apply_chat_template
        self._continues_answers = continues_answers
        self._ends = ends
        self.stop_texts = stops
        # Some templates write the date: a trajectory that lives past midnight keeps its first date.
        self._clock = {"strftime_now": datetime.now().strftime}
        self._role_problems: dict[tuple[str, ...], str | None] = {}  # roles of a conversation → why it is refused

    def encode(self, content: str | Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> tuple[int, ...]:
        """Encode a prompt for the engine, <bos> occurs once. The assistant's turn begins after it; a last message of
        the assistant is the beginning of that turn, which the model continues.

        Raises TrajectoryError when the template refuses the prompt.
        """
        if not self._apply_chat_template:
            if not isinstance(content, str):
                raise ConfigurationError("messages need the chat template: leave --no-apply-chat-template out")
            return self._encode_text(content)
        # The template writes <bos> itself where the model wants one; nothing is added to what it renders.
        return tuple(self.tokenize(self._render_prompt(content, tools)))

    def check(self, content: str | Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> None:
        """Render a prompt without tokenizing it. Raises TrajectoryError when the template refuses it."""
        if self._apply_chat_template:
            self._render_prompt(content, tools)

    def _render_prompt(self, content: str | Sequence[JsonObject], tools: Sequence[JsonObject]) -> str:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        self.check_roles(messages)
        if messages[-1]["role"] != "assistant":
            return self.render(messages, tools, {}, generation_prompt=True)
        if not self._continues_answers:
            raise TrajectoryError("the last message is the assistant's, whose turn comes next: leave that message out")
        if messages[-1].get("tool_calls"):
            raise TrajectoryError("the last message is the assistant's and has tool calls, which nothing continues")
        text = self.render(messages, tools, {"continue_final_message": True}, generation_prompt=False)
        thoughts = str(messages[-1].get("reasoning_content") or "").strip()
        begun = text_of(messages[-1]).strip()
        if not begun and (not thoughts or thoughts not in text):
            why = "is empty" if not thoughts else "has nothing but thoughts, which the chat template leaves out"
            raise TrajectoryError(f"the last message is the assistant's and {why}: leave that message out")
        opens = not thoughts and begun.startswith("<think>") and "</think>" not in begun
        if opens and text.rstrip().removesuffix(begun).rstrip().endswith("</think>"):
            raise TrajectoryError(
                "the last message is the assistant's and opens a thought, and the chat template writes an empty one "
                "before it: leave that message out"
            )
        return text

    def check_roles(self, messages: Sequence[JsonObject]) -> None:
        """Check, once per sequence of roles, that the template knows them and writes each message.

        Raises TrajectoryError for a role that is not known or whose message is left out, and ConfigurationError for a
        template that does not end.
        """
        roles = tuple("" if message.get("tool_calls") else message["role"] for message in messages)
        if roles not in self._role_problems:
            self._role_problems[roles] = self._role_problem(messages)
        if (problem := self._role_problems[roles]) is not None:
            raise TrajectoryError(problem)

    def _role_problem(self, messages: Sequence[JsonObject]) -> str | None:
        source = str(self.tokenizer.chat_template)
        for role in (message["role"] for message in messages):
            if role not in _ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
                return (
                    f"expected messages of the roles {', '.join(sorted(_ROLES))}, or of one that the chat template "
                    f"{self._file} names, found role {shortened(repr(role))}"
                )
        marked = [{**message, "content": f"message number {index}."} for index, message in enumerate(messages)]
        try:
            rendering = in_daemon_thread(lambda: self.render(marked, (), {}, generation_prompt=True), "time-limit")
            text = rendering.result(RENDER_SECONDS)
        except TimeoutError:
            raise ConfigurationError(
                f"--hf-checkpoint: the chat template {self._file} takes more than {RENDER_SECONDS:g} s for a "
                f"conversation of {len(messages)} short messages: does a loop in it never end?"
            ) from None
        except TrajectoryError:
            return None  # said with the messages themselves, which it may refuse as well
        for message, mark in zip(messages, marked, strict=True):
            if mark["content"] not in text and not message.get("tool_calls"):
                return (
                    f"the chat template {self._file} leaves out messages of the role {message['role']!r} in a "
                    f"conversation of {', '.join(message['role'] for message in messages)}"
                )
        return None

    @property
    def _file(self) -> Path:
        """File that the template is from."""
        directory = Path(self.tokenizer.name_or_path)
        own = directory / "chat_template.jinja"
        return own if own.is_file() else directory / "tokenizer_config.json"

    def _encode_text(self, text: str) -> tuple[int, ...]:
        bos = self.tokenizer.bos_token
        return tuple(self.tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos))))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode a response exactly as sampled, without the tokens at its ends that bound a text or pad it.

        Special tokens inside stay: with many tokenizers, thoughts, answers and calls of tools are marked by them.
        """
        return self.trim(self.decode_all(token_ids))

    def trim(self, text: str) -> str:
        """Make what :meth:`decode_all` gives for a response what :meth:`decode` gives."""
        opening, closing = self._bounds
        return closing.sub("", opening.sub("", text)[::-1])[::-1]

    @property
    def source(self) -> str:
        """Source of the template for conversations with tools."""
        return str(self.tokenizer.get_chat_template(tools=list[JsonObject]()))

    @cached_property
    def decoder_id(self) -> int | None:
        return fingerprint(self.tokenizer)

    @cached_property
    def _bounds(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Patterns of what opens a response, and of what closes it in the reversed text."""
        tokenizer = self.tokenizer
        bounds = {self.decode_all([token]) for token in self.stop_ids | self._ends}
        bounds |= {token for token in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) if token}
        written = self._written_after_a_turn() if tokenizer.chat_template else ""
        special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        bounds.update(token for token in special if token in written)
        opening = "|".join(map(re.escape, bounds)) or r"(?!)"
        closing = "|".join(re.escape(token[::-1]) for token in bounds) or r"(?!)"
        # Models that no turn's end stops may write white space between it and the end of the text.
        return re.compile(rf"\A(?:{opening})+"), re.compile(rf"\A(?:{closing})(?:\s*(?:{closing}))*")

    def _written_after_a_turn(self) -> str:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        try:
            return self.render(turns, (), {}, generation_prompt=False).partition(_PROBE)[2]
        except TrajectoryError:
            return ""

    # The interface for trajectories (``trajectory.rendering.ChatFormat``).
    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn: the tokenizer's, those of generation_config.json and config.json, which engines heed
        as well, and texts that do if each is one token.
        """
        ids = {self.tokenizer.eos_token_id}
        for name in ("generation_config.json", "config.json"):
            path = Path(self.tokenizer.name_or_path) / name
            if path.is_file():
                try:
                    named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
                except (ValueError, AttributeError, RecursionError) as error:
                    raise ConfigurationError(f"{path}: expected a JSON object: {error}") from error
                ids.update(named if isinstance(named, list) else [named])
        ids.update(tokens[0] for text in self.stop_texts if len(tokens := self.tokenize(text)) == 1)
        return frozenset(ids - {None})

    @property
    def end_id(self) -> int:
        """The tokenizer's token for the end of a text. Raises ConfigurationError if it has none."""
        token: int | None = self.tokenizer.eos_token_id
        if token is None:
            raise ConfigurationError(f"the tokenizer in {self.tokenizer.name_or_path} has no eos_token")
        return token

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        options: JsonObject,
        *,
        generation_prompt: bool,
    ) -> str:
        """Render a conversation. ``options``: more of the template's variables; of a request only ``variables``.

        Raises TrajectoryError when the template refuses it, or takes more than ``CONVERSATION_SECONDS``.
        """
        deadline = time.monotonic() + CONVERSATION_SECONDS
        try:
            text: str = self.tokenizer.apply_chat_template(
                [_TimedMessage(message, deadline) for message in self._as_expected(messages)],
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **{**self._clock, **options},
            )
        except Exception as error:  # supervision point: a template is third-party code, and raises anything
            raise TrajectoryError(f"the chat template refuses this conversation: {shortened(str(error))}") from error
        return text

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables of the template that a request may set: all that neither the run nor the tokenizer fills in."""
        import jinja2
        import jinja2.meta

        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
        read: set[str] = set()
        for tools in (None, list[JsonObject]()):  # a tokenizer may have another template for conversations with tools
            source = self.tokenizer.get_chat_template(tools=tools)
            source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)  # a tag of transformers' own
            read |= jinja2.meta.find_undeclared_variables(environment.parse(source))
        filled = {
            *inspect.signature(self.tokenizer.apply_chat_template).parameters,
            *self.tokenizer.special_tokens_map,
        }
        return frozenset(read - filled - {"messages", "raise_exception", *self._clock, *_SPECIAL_TOKENS})

    def after_answer(self) -> str:
        """Text that the template writes after an answer, up to the next question; empty if it refuses to."""
        answer, question = "a plain answer", "the next question"
        asked = {"role": "user", "content": "a question"}
        messages = [asked, {"role": "assistant", "content": answer}, {**asked, "content": question}]
        try:
            text = self.render(messages, (), {}, generation_prompt=False)
        except TrajectoryError:
            return ""
        return text.partition(answer)[2].partition(question)[0]

    def _as_expected(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Map the role developer to system if the template doesn't know it, and arguments to texts if it needs them."""
        messages = list(messages)
        if any(message["role"] == "developer" for message in messages) and not self._writes_developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if any(message.get("tool_calls") for message in messages) and self._needs_text_arguments:
            messages = [_with_texts(message) if message.get("tool_calls") else message for message in messages]
        return messages

    @cached_property
    def _writes_developer(self) -> bool:
        """Whether the template renders the role developer; many silently skip roles that they don't know."""
        text = self._renders([{"role": "developer", "content": _PROBE}, {"role": "user", "content": "a"}])
        return text is not None and _PROBE in text

    @cached_property
    def _needs_text_arguments(self) -> bool:
        """Whether the template renders arguments of calls only as JSON texts, as DeepSeek-V3's does."""

        def refuses(arguments: object) -> bool:
            call = {"id": "call00000", "type": "function", "function": {"name": "a", "arguments": arguments}}
            asked = {"role": "user", "content": "b"}
            called = {"role": "assistant", "content": "", "tool_calls": [call]}
            answered = {"role": "tool", "content": "c", "tool_call_id": "call00000", "name": "a"}
            return self._renders([asked, called, answered]) is None

        return refuses({"d": "e"}) and not refuses('{"d": "e"}')

    def _renders(self, messages: Sequence[JsonObject]) -> str | None:
        """Render a short conversation; None if the template refuses it."""
        try:
            text: str = self.tokenizer.apply_chat_template(list(messages), tokenize=False, **self._clock)
        except Exception:  # supervision point: as in ``render``
            return None
        return text

    def tokenize(self, text: str) -> list[int]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:  # a tokenizer in Python
            slowly: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
            return slowly
        # Less than half the time of the tokenizer's own encode, which also computes the characters of every token.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def decode_all(self, token_ids: Sequence[int]) -> str:
        return decode_tokens(self.tokenizer, list(token_ids))


class _TimedMessage(dict[str, Any]):
    """A message that can be read until a deadline, since a template can take quadratic time for many messages.

    Every loop over a conversation reads messages, and a thread cannot be stopped from outside.
    """

    __slots__ = ("_deadline",)

    def __init__(self, message: JsonObject, deadline: float) -> None:
        super().__init__(message)
        self._deadline = deadline

    def __getitem__(self, key: str) -> Any:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"it takes more than {CONVERSATION_SECONDS:g} s; send fewer messages")
        return super().__getitem__(key)


def _with_texts(message: JsonObject) -> JsonObject:
    """Write arguments of a message's calls as JSON texts, unless they are texts already."""
    calls = message["tool_calls"]
    texts = [call if isinstance(call["function"]["arguments"], str) else with_text_arguments(call) for call in calls]
    return {**message, "tool_calls": texts}
