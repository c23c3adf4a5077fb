"""The producer side: environments that generate groups, and batches made of replayed, restored and fresh ones."""

from __future__ import annotations

from arrowbank.pipeline.batches import Batch
from arrowbank.pipeline.pipeline import RolloutPipeline
from arrowbank.pipeline.tasks import EnvTask, WeightedMultiTask

__all__ = ["Batch", "EnvTask", "RolloutPipeline", "WeightedMultiTask"]
