from .rollout import AgentBaseModel, Rollout, RolloutGroup, TokenRollout

__all__ = ["AgentBaseModel", "Rollout", "RolloutGroup", "TokenRollout"]
