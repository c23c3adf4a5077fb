"""Hold the demo's last line against what it must show: ``check_demo.py FILE with-bank|rollback|no-bank``."""

import json
import pathlib
import sys

import polars

found = json.loads(pathlib.Path(sys.argv[1]).read_text().splitlines()[-1])
mode = sys.argv[2]
if mode not in ("with-bank", "rollback", "no-bank"):
    sys.exit(f"check_demo.py: {mode!r} is none of with-bank, rollback, no-bank")
checks = {"kills >= 3": found["kills"] >= 3, "seconds < 60": found["seconds"] < 60}
if mode == "no-bank":
    checks["regenerated > 0"] = found["regenerated"] > 0
else:
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
if mode == "rollback":
    rolled_back = found.get("rolled_back") or dict.fromkeys(("from", "to", "replayed", "unarchived"), 0)
    distance = rolled_back["from"] - rolled_back["to"]
    checks |= {
        "rolled back over several checkpoints": distance > 10 and rolled_back["to"] > 0,
        # one more where the stop came between a draw and the news of its training
        "all of that replayed": distance <= rolled_back["replayed"] <= distance + 1,
        "archived groups taken back": rolled_back["unarchived"] > 0,
    }
for what, holds in checks.items():
    print("ok    " if holds else "FAILED", what)
sys.exit(not all(checks.values()))
