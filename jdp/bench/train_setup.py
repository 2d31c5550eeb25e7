"""Setup of `jdp bench train`: which model, parameters and text has every system?

All of it is NumPy, so that each system starts from the same numbers and reads the same
batches.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

HEAD_WIDTH = 32
VOCABULARY = 256  # bytes.
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 3  # JAX compiles in the first; DDP makes its buckets in the second.
_NUM_WORDS = 500
_TEXT_WORDS = 60_000
_HELD_OUT = 0.1  # share of the text that no system trains on.
_HELD_OUT_SEQUENCES = 16

Params = dict[str, Any]


class TrainConfig(NamedTuple):
    """Sizes of the GPT, and of the batch of one process."""

    num_layers: int
    width: int  # a multiple of `HEAD_WIDTH`.
    context: int  # tokens of a sequence.
    batch_size: int  # sequences of one process.


class Data(NamedTuple):
    """Text in bytes, (n,) int32 each."""

    training: np.ndarray
    held_out: np.ndarray


def init_params(config: TrainConfig) -> Params:
    """Returns the first parameters: as in GPT-2, with the sizes of `config`; float32.

    Weights are (inputs, outputs); the output layer is the embedding of the tokens.
    Source: Radford et al. 2019, section 2.3, for normal(0.02) and for the division of
    the weights that end a residual branch.
    """
    rng = np.random.default_rng(0)
    d = config.width

    def normal(*shape: int, scale: float = 0.02) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def zeros(n: int) -> np.ndarray:
        return np.zeros(n, np.float32)

    def norm() -> Params:
        return {"scale": np.ones(d, np.float32), "bias": zeros(d)}

    def linear(n: int, m: int, scale: float = 0.02) -> Params:
        return {"w": normal(n, m, scale=scale), "b": zeros(m)}

    last = 0.02 / math.sqrt(2 * config.num_layers)
    return {
        "tokens": normal(VOCABULARY, d),
        "positions": normal(config.context, d),
        "norm": norm(),
        "blocks": [
            {
                "norm_1": norm(),
                "attend": linear(d, 3 * d),
                "project": linear(d, d, last),
                "norm_2": norm(),
                "widen": linear(d, 4 * d),
                "narrow": linear(4 * d, d, last),
            }
            for _ in range(config.num_layers)
        ],
    }


def make_data() -> Data:
    """Returns made-up text: words of a random language, as frequent as Zipf's law says.

    A model learns the spelling of the words, and which of them are frequent.
    """
    rng = np.random.default_rng(1)
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgk", np.uint8)
    words = [
        rng.choice(letters, size=size).tobytes()
        for size in rng.integers(2, 9, size=_NUM_WORDS)
    ]
    frequency = 1.0 / np.arange(1, _NUM_WORDS + 1)
    chosen = rng.choice(_NUM_WORDS, size=_TEXT_WORDS, p=frequency / frequency.sum())
    text = np.frombuffer(b" ".join(words[i] for i in chosen), np.uint8).astype(np.int32)
    first = int(len(text) * (1 - _HELD_OUT))
    return Data(text[:first], text[first:])


def draw_batches(
    config: TrainConfig, text: np.ndarray, process: int
) -> Iterator[np.ndarray]:
    """Yields the batch of each step, (batch_size, context + 1) int32, without end."""
    rng = np.random.default_rng([2, process])
    while True:
        yield _cut(text, config.context, config.batch_size, rng)


def held_out_batch(config: TrainConfig, text: np.ndarray) -> np.ndarray:
    """Returns the sequences that losses are compared on, (16, context + 1) int32."""
    rng = np.random.default_rng(3)
    return _cut(text, config.context, _HELD_OUT_SEQUENCES, rng)


def _cut(
    text: np.ndarray, context: int, num_sequences: int, rng: np.random.Generator
) -> np.ndarray:
    first = rng.integers(0, len(text) - context, size=num_sequences)
    return text[first[:, None] + np.arange(context + 1)]
