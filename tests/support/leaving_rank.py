"""A rank in a process of its own, begun with nothing loaded, as torchrun begins one: it prints its last threads."""

import os
from pathlib import Path

from rco.distributed import join

with join(timeout=5.0) as ranks:
    from transformers import LlamaForCausalLM  # noqa: F401 - models load much of torch.distributed, after joining

    assert ranks.gather(lambda: ranks.index) == [*range(ranks.count)]
    ranks.broadcast(None)

threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
print(*threads, sep="\n")
