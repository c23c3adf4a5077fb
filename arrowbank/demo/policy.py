"""A small autoregressive token policy in NumPy: embeddings of the last tokens → tanh → logits, with exact gradients.

Invariant: the same parameters and the same uniforms give the same tokens and logprobs, bit for bit, in every
process of one machine; nothing here keeps a random state or runs threads of its own.

Shapes: N tokens to predict, W the window, V the vocabulary, G the members of a group, T one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PAD",
    "VOCABULARY",
    "Adam",
    "Parameters",
    "Policy",
    "TokenBatch",
    "contexts",
]

VOCABULARY = 16
PAD = 0
WINDOW = 8
POSITIONS = 12
EMBEDDING = 12
HIDDEN = 64
CLIP = 0.2
LEARNING_RATE = 0.01

Ints: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float64]
Parameters: TypeAlias = dict[str, Floats]


class TokenBatch(NamedTuple):
    """Sampled tokens with what a policy-gradient step needs of each."""

    windows_NW: Ints
    positions_N: Ints
    tokens_N: Ints
    logprobs_N: NDArray[np.float32]
    """As the sampler stored them."""
    advantages_N: Floats


def contexts(tokens_T: Ints, at_N: NDArray[np.intp]) -> tuple[Ints, Ints]:
    """Return the window before each index and its clipped position. Shapes: (N, W) and (N,)."""
    padded = np.concatenate([np.full(WINDOW, PAD, np.int32), tokens_T])
    windows_NW = padded[at_N[:, None] + np.arange(WINDOW)]
    return windows_NW, np.minimum(at_N, POSITIONS - 1).astype(np.int32)


class Policy:
    """The network: its parameters, sampling, and the gradient of the clipped objective."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    @classmethod
    def initial(cls, seed: int) -> Policy:
        """Return untrained weights, the same for the same seed."""
        rng = np.random.Generator(np.random.PCG64([seed, 0x5EED]))

        def normal(*shape: int, scale: float) -> Floats:
            return rng.standard_normal(shape) * scale

        return cls(
            {
                "embedding": normal(VOCABULARY, EMBEDDING, scale=1.0),
                "position": normal(POSITIONS, HIDDEN, scale=0.5),
                "hidden": normal(WINDOW * EMBEDDING, HIDDEN, scale=(WINDOW * EMBEDDING) ** -0.5),
                "output": normal(HIDDEN, VOCABULARY, scale=0.1 * HIDDEN**-0.5),
                "bias": np.zeros(VOCABULARY),
            }
        )

    def logprobs(self, windows_NW: Ints, positions_N: Ints) -> Floats:
        """Return the log-probability of every next token. Shapes: (N, V)."""
        return self._forward(windows_NW, positions_N).logprobs_NV

    def sample(self, sequences: list[list[int]], uniforms_G: Floats) -> tuple[Ints, NDArray[np.float32]]:
        """Sample the next token of each sequence by inverse transform, with its logprob. Shapes: (G,) both."""
        windows = np.array([([PAD] * WINDOW + tokens)[-WINDOW:] for tokens in sequences], np.int32)
        positions = np.array([min(len(tokens), POSITIONS - 1) for tokens in sequences], np.int32)
        logprobs_GV = self.logprobs(windows, positions)
        below_GV = np.cumsum(np.exp(logprobs_GV), axis=1) <= uniforms_G[:, None]
        tokens_G = np.minimum(below_GV.sum(axis=1), VOCABULARY - 1).astype(np.int32)
        return tokens_G, logprobs_GV[np.arange(len(tokens_G)), tokens_G].astype(np.float32)

    def loss_and_gradient(self, batch: TokenBatch) -> tuple[float, Parameters]:
        """Return GRPO's clipped loss, a mean over tokens, and its gradient by parameter."""
        seen = self._forward(batch.windows_NW, batch.positions_N)
        rows = np.arange(len(batch.tokens_N))
        ratio_N = np.exp(seen.logprobs_NV[rows, batch.tokens_N] - batch.logprobs_N)
        plain_N = ratio_N * batch.advantages_N
        clipped_N = np.clip(ratio_N, 1 - CLIP, 1 + CLIP) * batch.advantages_N
        loss = -float(np.minimum(plain_N, clipped_N).mean())

        # where the clipped branch is the smaller one, the objective is flat
        slope_N = np.where(plain_N <= clipped_N, plain_N, 0.0) / -len(rows)
        logits_grad_NV = -np.exp(seen.logprobs_NV) * slope_N[:, None]
        logits_grad_NV[rows, batch.tokens_N] += slope_N
        return loss, self._backward(batch, seen, logits_grad_NV)

    def _forward(self, windows_NW: Ints, positions_N: Ints) -> _Activations:
        p = self.parameters
        inputs = p["embedding"][windows_NW].reshape(len(windows_NW), -1)
        hidden = np.tanh(inputs @ p["hidden"] + p["position"][positions_N])
        logits = hidden @ p["output"] + p["bias"]
        shifted = logits - logits.max(axis=1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return _Activations(inputs, hidden, logprobs)

    def _backward(self, batch: TokenBatch, seen: _Activations, logits_grad_NV: Floats) -> Parameters:
        p = self.parameters
        hidden_grad = (logits_grad_NV @ p["output"].T) * (1 - seen.hidden**2)
        inputs_grad = hidden_grad @ p["hidden"].T
        gradient = {
            "output": seen.hidden.T @ logits_grad_NV,
            "bias": logits_grad_NV.sum(axis=0),
            "hidden": seen.inputs.T @ hidden_grad,
            "position": np.zeros_like(p["position"]),
            "embedding": np.zeros_like(p["embedding"]),
        }
        np.add.at(gradient["position"], batch.positions_N, hidden_grad)
        np.add.at(gradient["embedding"], batch.windows_NW, inputs_grad.reshape(-1, WINDOW, EMBEDDING))
        return gradient


class _Activations(NamedTuple):
    inputs: Floats
    hidden: Floats
    logprobs_NV: Floats


@dataclass
class Adam:
    """The optimizer; its moments and step count belong into the model checkpoint."""

    mean: Parameters
    square: Parameters
    steps: int = 0

    @classmethod
    def initial(cls, parameters: Parameters) -> Adam:
        """Return the state before the first step."""
        return cls(
            {name: np.zeros_like(value) for name, value in parameters.items()},
            {name: np.zeros_like(value) for name, value in parameters.items()},
        )

    def step(self, parameters: Parameters, gradient: Parameters) -> None:
        """Move ``parameters`` against ``gradient``, in place."""
        self.steps += 1
        for name, slope in gradient.items():
            self.mean[name] = 0.9 * self.mean[name] + 0.1 * slope
            self.square[name] = 0.99 * self.square[name] + 0.01 * slope**2
            mean = self.mean[name] / (1 - 0.9**self.steps)
            square = self.square[name] / (1 - 0.99**self.steps)
            parameters[name] -= LEARNING_RATE * mean / (np.sqrt(square) + 1e-8)
