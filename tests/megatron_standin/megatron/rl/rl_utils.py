"""A trainer that calls its bank as Megatron's does, without a model."""

import os

_ROLLOUT_BANK = None


def maybe_get_rollout_bank(args):
    global _ROLLOUT_BANK
    if args.rl_durable_rollout_bank and _ROLLOUT_BANK is None:
        from megatron.rl.rollout_bank import RolloutBank

        bank_dir = args.rl_rollout_bank_dir or os.path.join(args.save, "rollout_bank")
        _ROLLOUT_BANK = RolloutBank(bank_dir, max_bytes=args.rl_rollout_bank_max_bytes)
    return _ROLLOUT_BANK


class Trainer:
    def __init__(self, bank, pipeline, iteration):
        """``iteration``: what the loaded model checkpoint holds."""
        self.bank = bank
        self.pipeline = pipeline
        self.iteration = iteration
        self.request_ledger = {}  # of this process

    def resume(self):
        restored = self.bank.recover(self.iteration)
        self.pipeline.set_restored_groups(restored)
        return restored

    def collect(self, iteration):
        self.bank.set_collection(iteration)
        groups = self.pipeline.batch(iteration)
        self.bank.mark_consumed_many((group.uid for group in groups), iteration + 1)
        self.join(groups)
        return groups

    def join(self, groups):
        """Look up how each completion was generated; an id that the ledger does not have is an error."""
        return [
            self.request_ledger.pop(completion_id)
            for group in groups
            for rollout in group
            for completion_id in getattr(rollout, "completion_ids", ())
        ]


def maybe_compact_rollout_bank(iteration):
    bank = _ROLLOUT_BANK
    if bank is not None:
        bank.checkpoint(iteration)
