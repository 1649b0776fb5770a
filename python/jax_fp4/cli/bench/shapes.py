"""The shapes that `bench` measures: data, and how `--shapes` names them.

A product is D[M, N] = A[M, K] B[N, K]^T; N and K are those of a weight [out, in]. Widths are those
of the published model configurations; query, key and value are one weight, and so are the gate and
up projections of an MLP, as training frameworks fuse them. M, the tokens, is what one device has in
published trainings; a smaller machine measures fewer, and every label says how many.
"""

from __future__ import annotations

import dataclasses
import re

TOKENS = 8192  # one sequence a device


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product of a model.

    Attributes:
        model: the set it belongs to, "" for one given by numbers.
        name: the layer.
        m: tokens that are measured.
        n: output features.
        k: input features, which are contracted.
        full_m: tokens in the published setting.
    """

    model: str
    name: str
    m: int
    n: int
    k: int
    full_m: int

    @property
    def label(self) -> str:
        """``llama3-8b/out 64x4096x4096, M of 8192``: what tables call it."""
        name = "/".join(part for part in (self.model, self.name) if part)
        cut = "" if self.m == self.full_m else f", M of {self.full_m}"
        return f"{name} {self.m}x{self.n}x{self.k}{cut}".strip()

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.m * self.n * self.k


def _llama(width: int, key_value: int, hidden: int) -> list[tuple[str, int, int, int]]:
    return [
        ("qkv", TOKENS, width + 2 * key_value, width),
        ("out", TOKENS, width, width),
        ("gate_up", TOKENS, 2 * hidden, width),
        ("down", TOKENS, width, hidden),
    ]


# (layer, M, N, K)
MODELS: dict[str, list[tuple[str, int, int, int]]] = {
    "llama3-8b": _llama(4096, 1024, 14336),
    "llama3-70b": _llama(8192, 1024, 28672),
    "llama3-405b": _llama(16384, 1024, 53248),
    # Multi-head latent attention, then an expert, which gets 8 / 256 of the tokens of a batch of
    # four sequences.
    "deepseek-v3-moe": [
        ("q_down", TOKENS, 1536, 7168),
        ("q_up", TOKENS, 24576, 1536),
        ("kv_up", TOKENS, 32768, 512),
        ("out", TOKENS, 7168, 16384),
        ("expert_gate_up", 1024, 4096, 7168),
        ("expert_down", 1024, 7168, 2048),
    ],
    # Weights of Llama-3-8B and 70B while text is generated.
    "decode": [
        ("8b_out", 1, 4096, 4096),
        ("8b_gate_up", 1, 28672, 4096),
        ("8b_out_batch16", 16, 4096, 4096),
        ("70b_out", 1, 8192, 8192),
    ],
    "square": [(str(n), n, n, n) for n in (1024, 2048, 4096)],
}


@dataclasses.dataclass(frozen=True)
class Block:
    """A transformer block of the demo's kind (cli/transformer.py).

    Attributes:
        model: the set's name.
        width: of the residual stream.
        hidden: of the MLP.
        heads: of attention.
        tokens: of one sequence, measured.
        full_tokens: in the published setting.
    """

    model: str
    width: int
    hidden: int
    heads: int
    tokens: int
    full_tokens: int

    @property
    def label(self) -> str:
        """What tables call it."""
        cut = "" if self.tokens == self.full_tokens else f" of {self.full_tokens}"
        return f"{self.model} {self.width}x{self.hidden}, {self.tokens} tokens{cut}".strip()

    @property
    def weights(self) -> int:
        """Elements of the four linear layers."""
        return 4 * self.width * self.width + 2 * self.width * self.hidden


# (width, hidden, heads)
BLOCKS = {
    "small": (1024, 4096, 16),
    "llama3-8b": (4096, 14336, 32),
    "llama3-70b": (8192, 28672, 64),
    "llama3-405b": (16384, 53248, 128),
}

_NUMBERS = re.compile(r"(\d+)x(\d+)x(\d+)")


def products(text: str, tokens: int) -> list[Product]:
    """The products that ``--shapes`` names.

    Args:
        text: comma-separated: a set ("llama3-8b"), one of its layers ("llama3-8b/out"), or MxNxK.
        tokens: M at most for products of a set; numbers are taken as they are.

    Returns:
        The products in that order, each once.

    Raises:
        ValueError: for a name that is none; the message says which there are.
    """
    found: list[Product] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        numbers = _NUMBERS.fullmatch(word)
        if numbers:
            m, n, k = (int(group) for group in numbers.groups())
            if min(m, n, k) < 1:
                raise ValueError(f"--shapes: expected sizes of at least 1, got {word}")
            found.append(Product("", "", m, n, k, m))
            continue
        model, _, layer = word.partition("/")
        rows = [row for row in MODELS.get(model, []) if layer in ("", row[0])]
        if not rows:
            known = ", ".join(MODELS)
            layers = ", ".join(row[0] for row in MODELS.get(model, []))
            hint = f"a layer of {model}: {layers}" if layers else f"one of {known}, or MxNxK"
            raise ValueError(f"--shapes: expected {hint}; got {word!r}")
        found += [Product(model, name, min(m, tokens), n, k, m) for name, m, n, k in rows]
    return list(dict.fromkeys(found))


def blocks(text: str, tokens: int) -> list[Block]:
    """The blocks that ``--shapes`` names; sets that are no dense model have none.

    Args:
        text: comma-separated names of `BLOCKS`, or WIDTHxHIDDENxHEADS.
        tokens: of the sequence at most.

    Returns:
        The blocks in that order, each once.

    Raises:
        ValueError: for a name that is none.
    """
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        numbers = _NUMBERS.fullmatch(word)
        if numbers:
            width, hidden, heads = (int(group) for group in numbers.groups())
            if min(width, hidden, heads) < 1 or width % (2 * heads):
                raise ValueError(
                    f"--shapes: expected WIDTHxHIDDENxHEADS with a width of an even number for "
                    f"each head, got {word}"
                )
        elif word in BLOCKS:
            width, hidden, heads = BLOCKS[word]
        else:
            raise ValueError(
                f"--shapes: expected one of {', '.join(BLOCKS)}, or WIDTHxHIDDENxHEADS, for a "
                f"layer; got {word!r}"
            )
        name = "" if numbers else word
        found.append(Block(name, width, hidden, heads, min(tokens, TOKENS), TOKENS))
    return list(dict.fromkeys(found))
