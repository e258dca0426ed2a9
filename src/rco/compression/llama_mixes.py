"""llama.cpp's own mixtures of types, by the rules of ``llama-quantize`` for tensors and layers.

They are entrants of comparisons, and sizes to aim at. The rules are those of August 2026 for all architectures but
Falcon; the one for models of 80 layers (70B) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rco.compression.gguf_target import GGUFTarget
from rco.compression.llama_quantize import written_type
from rco.compression.plan import CompressionPlan
from rco.formats.ggml.block_types import BLOCK_TYPES
from rco.models.gguf_file import GGUFReader, TensorEntry

__all__ = ["MIXES", "is_mix", "mix_bytes", "mix_choices", "mix_types", "needed_types"]

_PURE = "pure-"

_VALUES = ("attn_v", "attn_qkv", "attn_kv_b")  # tensors that hold the values of attention
_EIGHT_EXPERTS = 8  # Mixtral has rules of its own


@dataclass(frozen=True)
class _Facts:
    """What a rule depends on beside the tensor's kind.

    Attributes:
        layer: Index of the layer, or of the tensor among those with values.
        layers: Number of them.
        shared: Query heads per key head.
        importance: Whether there is an importance matrix.
    """

    layer: int
    layers: int
    shared: int
    importance: bool

    @property
    def favoured(self) -> bool:
        """Whether the layer is among the first or last eighth, or every third of the others."""
        first, last = self.layers // 8, 7 * self.layers // 8
        return self.layer < first or self.layer >= last or (self.layer - first) % 3 == 2

    @property
    def early(self) -> bool:
        """Whether the layer is among the first eighth."""
        return self.layer < self.layers // 8


Rule = Callable[[_Facts], str]


@dataclass(frozen=True)
class _Mix:
    """Types of a mixture: of tensors without a rule, of embedding and output, and by kind of tensor."""

    default: str
    output: str
    embedding: str
    rules: Mapping[str, Rule]
    eight_experts_output: str = "q5_k"


def _same(kind: str) -> Rule:
    return lambda facts: kind


MIXES: dict[str, _Mix] = {
    "llama-q2_k": _Mix(
        "q2_k", "q6_k", "q2_k",
        {
            "value": lambda facts: "q4_k" if facts.shared >= 4 else "q3_k",
            "ffn_down": _same("q3_k"),
            "attn_output": _same("q3_k"),
        },
    ),
    "llama-iq3_xxs": _Mix(
        "iq3_xxs", "q5_k", "iq3_s",
        {
            "value": lambda facts: (
                "q4_k" if facts.shared >= 4 else "iq3_xxs" if facts.importance else "iq3_s"
            ),
            "attn_q": _same("iq2_s"),
            "attn_k": _same("iq2_s"),
            "ffn_down": lambda facts: "iq3_xxs" if facts.importance else "q4_k" if facts.early else "q3_k",
            "attn_output": _same("iq3_s"),
        },
    ),
    "llama-q3_k_m": _Mix(
        "q3_k", "q6_k", "q3_k",
        {
            "value": lambda facts: "q5_k" if facts.layer < 2 else "q4_k",
            "ffn_down": lambda facts: "q5_k" if facts.layer < facts.layers // 16 else "q4_k",
            "attn_output": _same("q4_k"),
        },
    ),
    "llama-iq4_xs": _Mix(
        "iq4_xs", "q6_k", "iq4_xs",
        {
            "value": lambda facts: "q5_k" if facts.shared >= 4 else "iq4_xs",
            "ffn_down": lambda facts: "q5_k" if facts.early and not facts.importance else "iq4_xs",
        },
    ),
    "llama-q4_k_m": _Mix(
        "q4_k", "q6_k", "q4_k",
        {
            "value": lambda facts: "q6_k" if facts.favoured else "q4_k",
            "ffn_down": lambda facts: "q6_k" if facts.favoured else "q4_k",
        },
    ),
}  # fmt: skip
"""Mixtures by the name of an entrant."""


def is_mix(name: str) -> bool:
    """Whether a name is that of a mixture, or of one type for all tensors (``pure-q4_k``)."""
    return name in MIXES or (name.startswith(_PURE) and name.removeprefix(_PURE) in BLOCK_TYPES)


def _mix(name: str) -> _Mix:
    if name in MIXES:
        return MIXES[name]
    kind = name.removeprefix(_PURE)
    return _Mix(kind, kind, kind, {})


def needed_types(names: Iterable[str], reader: GGUFReader) -> list[str]:
    """Types that some mixtures use in a file."""
    return list(dict.fromkeys(kind for name in names for kind in mix_types(name, reader).values()))


def mix_types(name: str, reader: GGUFReader, *, importance: bool = True) -> dict[str, str]:
    """Type of every quantized tensor of a file under a mixture.

    Args:
        name: One of :data:`MIXES`, or ``pure-`` and a type.
        reader: The unquantized file.
        importance: Whether ``llama-quantize`` would be given an importance matrix.
    """
    mix, prefix, pure = _mix(name), reader.architecture, name not in MIXES
    heads = _number(reader, f"{prefix}.attention.head_count")
    keys = _number(reader, f"{prefix}.attention.head_count_kv") or heads
    layers = _number(reader, f"{prefix}.block_count")
    experts = _number(reader, f"{prefix}.expert_count")
    matrices = [entry for entry in reader.tensors.values() if _quantizable(entry)]
    values = sorted(_layer(entry) for entry in matrices if _kind(entry) == "value")
    tied = "output.weight" not in reader.tensors
    found = {}
    for entry in matrices:
        kind = _kind(entry)
        if pure:
            found[entry.name] = written_type(mix.default, entry.columns)
            continue
        if kind == "output" or (kind == "token_embd" and tied):
            found[entry.name] = mix.output if entry.columns % 256 == 0 else "q8_0"
            continue
        place = (values.index(_layer(entry)), len(values)) if kind == "value" else (_layer(entry), layers)
        facts = _Facts(*place, heads // max(keys, 1), importance)
        chosen = mix.embedding if kind == "token_embd" else mix.rules.get(kind, _same(mix.default))(facts)
        if experts == _EIGHT_EXPERTS and kind in ("value", "attn_k"):
            chosen = "q8_0"
        elif experts == _EIGHT_EXPERTS and kind == "attn_output":
            chosen = mix.eight_experts_output
        found[entry.name] = written_type(chosen, entry.columns)
    return found


def mix_choices(plan: CompressionPlan, name: str) -> list[int]:
    """Option of every group of a GGUF plan under a mixture.

    Raises:
        ValueError: The plan does not offer a type of the mixture, or ties tensors that it tells apart.
    """
    target = plan.target
    if target is None:
        raise ValueError(f"{name} is a mixture of ggml's types: add `format='gguf'`.")
    types = mix_types(name, target.reader)
    choices = []
    for group in plan.groups:
        kinds = {_planned(target, types, member.name) for member in group.members}
        offered = [
            k for k, option in enumerate(plan.options) if option.name in kinds and option in group.options
        ]
        if len(kinds) != 1 or len(offered) != 1:
            raise ValueError(
                f"{name} stores {group.name} as {' and '.join(sorted(kinds))}, which is not among its types "
                f"{', '.join(option.name for option in group.options)}: add it to `types`, or drop locks and ties."
            )
        choices.append(offered[0])
    return choices


def mix_bytes(plan: CompressionPlan, name: str) -> int:
    """Bytes of the file under a mixture.

    Raises:
        ValueError: As for :func:`mix_choices`.
    """
    choices, target = mix_choices(plan, name), plan.target
    assert target is not None
    return target.other_bytes(plan.linears, aligned=True) + sum(
        target.option_bytes(group.members, plan.options[choice], aligned=True)
        for group, choice in zip(plan.groups, choices, strict=True)
    )


def _planned(target: GGUFTarget, types: Mapping[str, str], linear: str) -> str:
    name = target.names[linear]
    return types.get(name, target.reader.tensors[name].type_name)


def _number(reader: GGUFReader, key: str) -> int:
    value = reader.metadata.get(key, 0)
    return int(max(value)) if isinstance(value, list) else int(value)


def _quantizable(entry: TensorEntry) -> bool:
    plain = entry.name.endswith("weight") and "_norm.weight" not in entry.name
    return plain and len(entry.shape) >= 2 and "ffn_gate_inp.weight" not in entry.name


def _layer(entry: TensorEntry) -> int:
    parts = entry.name.split(".")
    return int(parts[1]) if parts[0] == "blk" else 0


def _kind(entry: TensorEntry) -> str:
    """Kind of a tensor that rules tell apart; its own stem if none does."""
    stem = entry.name.removesuffix(".weight").rpartition(".")[2]
    if stem in _VALUES:
        return "value"
    return "ffn_down" if stem.startswith("ffn_down") else stem
