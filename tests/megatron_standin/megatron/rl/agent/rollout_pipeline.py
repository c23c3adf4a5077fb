"""Groups for a batch: each environment's restored ones first, then new ones, which are banked as they assemble."""


class RolloutPipeline:
    def __init__(self, bank, envs, generate):
        self.bank = bank
        self.envs = envs  # environment → groups of each batch
        self.generate = generate
        self.restored = {}  # environment → groups, first in, first out
        self.generated = 0

    def set_restored_groups(self, groups):
        self.restored = {}
        for group in groups:
            self.restored.setdefault(group[0].env_id, []).append(group)

    def batch(self, batch_id):
        groups = []
        for env_id, quota in self.envs.items():
            for _ in range(quota):
                if self.restored.get(env_id):
                    group = self.restored[env_id].pop(0)
                else:
                    self.generated += 1
                    group = self.generate(env_id, self.generated)
                    group.uid = self.bank.append(group)
                group.batch_id, group.index_in_batch = batch_id, len(groups)
                groups.append(group)
        return groups
