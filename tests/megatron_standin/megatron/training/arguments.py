"""The flags of Megatron's own bank, and those that say how long a batch is trained on."""


def _add_rl_args(parser):
    group = parser.add_argument_group(title="rl")
    group.add_argument("--grpo-prompts-per-step", type=int, default=32)
    group.add_argument("--grpo-group-size", type=int, default=2)
    group.add_argument("--rl-durable-rollout-bank", action="store_true")
    group.add_argument("--rl-rollout-bank-dir", type=str, default=None)
    group.add_argument("--rl-rollout-bank-max-bytes", type=int, default=0)
    group.add_argument("--grpo-iterations", type=int, default=2)
    return parser
