"""When TRL generates and steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """TRL's counts: all of a run, and all starts, in micro-batches."""

    per_step: int
    """Micro-batches an optimizer step; fewer in the last one of an epoch that they do not divide."""
    per_generation: int
    """steps_per_generation × num_iterations."""
    per_epoch: int
    """A multiple of ``per_generation``: TRL drops prompts that fill no generation."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps an epoch."""
        return -(-self.per_epoch // self.per_step)

    def micro_batch(self, step: int) -> int:
        """Return how many micro-batches were run when ``step`` optimizer steps are complete."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.per_epoch + steps * self.per_step

    def step(self, micro_batch: int) -> int:
        """Return the optimizer step that a micro-batch is part of."""
        epochs, micro_batches = divmod(micro_batch, self.per_epoch)
        return epochs * self.steps_per_epoch + micro_batches // self.per_step

    def start(self, micro_batch: int) -> int:
        """Return the start of the generation that a micro-batch trains on."""
        return micro_batch - micro_batch % self.per_generation

    def span(self, start: int) -> int:
        """Return how many optimizer steps a generation feeds."""
        return self.step(start + self.per_generation - 1) - self.step(start) + 1
