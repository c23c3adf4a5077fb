"""Hold the demo's last line against what it must show."""

import json
import pathlib
import sys

import polars

found = json.loads(pathlib.Path(sys.argv[1]).read_text().splitlines()[-1])
with_bank = sys.argv[2] == "with-bank"
checks = {"kills >= 3": found["kills"] >= 3, "seconds < 60": found["seconds"] < 60}
if with_bank:
    rows = polars.read_parquet(f"{found['bank']}/archive/*.parquet")
    regular = rows.filter(polars.col("irregular_turns").is_null() & polars.col("tokens").is_not_null())
    lengths = [
        polars.col(name).list.len() == polars.col("num_tokens") for name in ("tokens", "generation_mask", "logprobs")
    ]
    checks |= {
        "regenerated == 0": found["regenerated"] == 0,
        "weights identical": found["weights_identical"] is True,
        "restored and replayed": found["restored"] > 0 and found["replayed"] > 0,
        "learns": found["reward_first"] < 0.35 and found["reward_last"] > 0.65,
        "every rollout archived once": rows.height
        == found["rollouts"]
        == rows.unique(["group_uid", "member_index"]).height,
        "aligned": regular.height > 0 and regular.filter(polars.all_horizontal(lengths)).height == regular.height,
    }
else:
    checks["regenerated > 0"] = found["regenerated"] > 0
for what, holds in checks.items():
    print("ok    " if holds else "FAILED", what)
sys.exit(not all(checks.values()))
