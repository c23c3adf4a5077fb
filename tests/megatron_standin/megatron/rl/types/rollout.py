"""Fields as ``pinned.py`` has them."""

from pydantic import BaseModel


class AgentBaseModel(BaseModel, extra="allow"):
    pass


class Rollout(AgentBaseModel):
    trajectory: list[str]
    prompt_length: list[int] | None = None
    reward: float | None = None
    env_id: str = ""
    problem_id: str | None = None
    rollout_status: str = "ok"
    failure_reason: str | None = None


class TokenRollout(AgentBaseModel):
    trajectory: list[list[int]]
    reward: list[float] | float
    generation_mask: list[list[bool]] | None = None
    logprobs: list[list[float]] | None = None
    env_id: str = ""
    problem_id: str | None = None
    completion_ids: list[str] = []
    generation_cap: int | None = None
    rollout_status: str = "ok"
    failure_reason: str | None = None


Rollouts = list[TokenRollout | Rollout]


class RolloutGroup(AgentBaseModel):
    rollouts: Rollouts
    batch_id: int = 0
    index_in_batch: int = 0
    uid: str | None = None

    def __iter__(self):
        return iter(self.rollouts)

    def __len__(self):
        return len(self.rollouts)

    def __getitem__(self, at):
        return self.rollouts[at]
