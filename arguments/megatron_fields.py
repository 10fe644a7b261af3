"""The fields of Megatron's configs, which ``--megatron-X`` sets: read from the installed source, so that neither torch
nor Megatron is imported to check a command line.
"""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from miles_async.arguments.megatron_owned import owner_of
from miles_async.arguments.words import looks_like_flag

ConfigName = Literal["provider", "optimizer", "ddp"]
"""Bridge's model provider, OptimizerConfig, DistributedDataParallelConfig."""

FieldValue = bool | int | float | str | None

SOURCES: tuple[tuple[ConfigName, str, str], ...] = (
    ("provider", "bridge/models/gpt_provider.py", "GPTModelProvider"),
    ("provider", "core/transformer/transformer_config.py", "TransformerConfig"),
    ("provider", "core/transformer/transformer_config.py", "MLATransformerConfig"),
    ("provider", "core/model_parallel_config.py", "ModelParallelConfig"),
    ("optimizer", "core/optimizer/optimizer_config.py", "OptimizerConfig"),
    ("ddp", "core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
)
"""(config, file, class); of a field that several classes of one config declare, the first counts."""

DTYPES = ("fp32", "bf16", "fp16", "fp8")
ATTENTION_BACKENDS = ("flash", "fused", "unfused", "local", "auto")  # AttnBackend of megatron-core 0.19
SIMPLE_KINDS = {"bool", "int", "float", "str"}


@dataclass(frozen=True, slots=True)
class FieldType:
    """The values of a field that a command line can express."""

    kinds: tuple[str, ...] = ()  # names of types of one value
    choices: tuple[str, ...] = ()
    optional: bool = False  # the word "none" means None
    single: bool = True  # one value by itself
    many: bool = False  # a list

    def __or__(self, other: FieldType) -> FieldType:
        return FieldType(
            tuple(dict.fromkeys(self.kinds + other.kinds)),
            self.choices + other.choices,
            optional=self.optional or other.optional,
            single=self.single or other.single,
            many=self.many or other.many,
        )

    def __str__(self) -> str:
        words = [*self.kinds, *self.choices, *(["none"] if self.optional else [])]
        return ("list of " if self.many else "") + "|".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronField:
    """One field, of one or several configs."""

    name: str
    configs: tuple[ConfigName, ...]
    type: FieldType | None  # None: a command line cannot say it (a function, a table)
    default: str  # as the source has it
    about: str  # first sentence of its documentation
    owner: str | None  # why it is not set by --megatron-X, and what to do instead

    @property
    def flag(self) -> str:
        return "--megatron-" + self.name.replace("_", "-")

    def parse(self, words: Sequence[str]) -> FieldValue | list[FieldValue]:
        """Value of the field. Raises ValueError saying what was expected."""
        if self.owner is not None:
            raise ValueError(self.owner)
        if self.type is None:
            raise ValueError("it is not a number, text or switch: it cannot be set on a command line")
        if not words and "bool" in self.type.kinds:
            return True
        values = [self._parse_one(word, self.type) for word in words]
        if not values or (len(values) > 1 and not self.type.many):
            raise ValueError(f"expected {self.type}, found {' '.join(words) or 'nothing'}")
        alone = len(values) == 1 and (self.type.single or values[0] is None)
        return values[0] if alone else values

    def _parse_one(self, word: str, kind: FieldType) -> FieldValue:
        if kind.optional and word.lower() == "none":
            return None
        if word in kind.choices or ("dtype" in kind.kinds and word in DTYPES):
            return word
        if "bool" in kind.kinds and word.lower() in ("true", "false"):
            return word.lower() == "true"
        for name, convert in (("int", int), ("float", float)):
            if name in kind.kinds:
                try:
                    return convert(word)
                except ValueError:
                    continue
        if "str" in kind.kinds:
            return word
        shown = f"{kind} ({', '.join(DTYPES)})" if "dtype" in kind.kinds else str(kind)
        raise ValueError(f"expected {shown}, found {word!r}")


@lru_cache(maxsize=1)
def megatron_fields() -> Mapping[str, MegatronField]:
    """Name → field, in alphabetical order. Empty if Megatron-core and Megatron-Bridge are not installed."""
    found: dict[str, MegatronField] = {}
    for config, file, name in SOURCES:
        source = _source(file)
        if source is None:
            return {}
        for item in _fields_of(source, name, config):
            known = found.get(item.name)
            if known is None:
                found[item.name] = item
            elif config not in known.configs:
                found[item.name] = replace(known, configs=(*known.configs, config))
    return dict(sorted(found.items()))


def as_megatron_flags(words: Sequence[str], ours: Sequence[str]) -> Iterator[str]:
    """Write ``--X`` as ``--megatron-X`` where it is not a flag of ours and X is exactly the name of a field."""
    known = set(ours)
    for word in words:
        name, equals, value = word.partition("=")
        if not looks_like_flag(word) or not name.startswith("--") or name in known:
            yield word
            continue
        field = name[2:].replace("-", "_")
        if field in megatron_fields():
            yield "--megatron-" + name[2:] + equals + value
        elif not equals and field.startswith("no_") and _is_switch(field[3:]):
            yield from ("--megatron-" + name[5:], "false")
        else:
            yield word


def _is_switch(name: str) -> bool:
    field = megatron_fields().get(name)
    return field is not None and field.type is not None and "bool" in field.type.kinds


def _source(file: str) -> ast.Module | None:
    package = importlib.util.find_spec("megatron")
    for place in (package and package.submodule_search_locations) or ():
        if (path := Path(place) / file).is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    return None


def _fields_of(source: ast.Module, class_name: str, config: ConfigName) -> Iterator[MegatronField]:
    (definition,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    for statement, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value) if name[0] != "_":
                yield MegatronField(
                    name=name,
                    configs=(config,),
                    type=_type_of(annotation),
                    default=_default(value),
                    about=_documentation(following),
                    owner=owner_of(name),
                )


def _documentation(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            sentence = " ".join(textwrap.dedent(text).split()).split(". ")[0]
            return sentence.removesuffix(".")
    return ""


def _default(node: ast.expr | None) -> str:
    match node:
        case None:
            return ""
        case ast.Call(func=ast.Name(id="field"), keywords=keywords):
            given = {item.arg: item.value for item in keywords}
            return ast.unparse(given["default"]) if "default" in given else "computed"
    return ast.unparse(node)


def _type_of(node: ast.expr) -> FieldType | None:
    """Read an annotation; None if a command line cannot say such a value."""
    match node:
        case ast.Constant(value=None):
            return FieldType(optional=True, single=False)
        case ast.Name(id="AttnBackend"):
            return FieldType(choices=ATTENTION_BACKENDS)
        case ast.Name(id=name) if name in SIMPLE_KINDS:
            return FieldType((name,))
        case ast.Attribute(attr="dtype"):
            return FieldType(("dtype",))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _union([left, right])
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _union([inner, ast.Constant(value=None)])
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            return _union(parts)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return FieldType(choices=tuple(str(part.value) for part in parts if isinstance(part, ast.Constant)))
        case ast.Subscript(value=ast.Name(id="List" | "list"), slice=inner):
            item = _type_of(inner)
            return item and replace(item, single=False, many=True)
    return None


def _union(parts: Sequence[ast.expr]) -> FieldType | None:
    """Combine the parts that a command line can express: at least one besides None."""
    readable = [part for part in map(_type_of, parts) if part is not None]
    whole = FieldType(single=False)
    for part in readable:
        whole |= part
    return whole if whole.kinds or whole.choices else None
