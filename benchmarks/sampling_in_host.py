"""The child process of sampling_precision.py: the real host, which reads sys.argv while it is imported."""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "host"))
from in_host import pack, sample, torch, write_results  # noqa: E402  boots the host

# isort: split
from unets import conditioning, host_model  # noqa: E402

OPTIONS = json.loads(os.environ["REF2V_BENCHMARK"])
select = pack("nodes.host.model.select").select_model_precision
NAME = "SD 1.5"


def sampled(choose):
    """(seconds to choose the model's precision and sample with it, the latent)."""
    positive, empty = conditioning(NAME), torch.zeros(1, 4, OPTIONS["size"], OPTIONS["size"])
    start = time.perf_counter()
    latent = sample(choose(), positive, empty, steps=OPTIONS["steps"], cfg=2.0)
    return time.perf_counter() - start, latent


def run():
    source = host_model(NAME)
    ways = {
        "none": lambda: source,
        "default": lambda: select(source).model,
        # a node between the two selectors has made a clone, so the restored MODEL is a new object
        "default, restored": lambda: select(select(source, "bf16").model.clone()).model,
    }
    wanted = {name: sampled(choose)[1] for name, choose in ways.items()}  # and the host has loaded everything once
    seconds = {name: [] for name in ways}
    for pair in range(OPTIONS["pairs"]):
        for name in [*ways] if pair % 2 else reversed([*ways]):  # none of them is always the last
            taken, latent = sampled(ways[name])
            assert torch.equal(latent, wanted["none"]), name
            seconds[name].append(taken)
    return seconds


if __name__ == "__main__":
    write_results({"seconds": run})
